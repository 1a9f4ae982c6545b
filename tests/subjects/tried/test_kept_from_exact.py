"""What other code in a step cannot do: in a process of its own, for a hook stays for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import os, pathlib, shutil, subprocess, sys, socket
import torch
from sumgrad.subjects.program.tried.kept_from import NotHere, kept_from_outside, with_less_memory
place = pathlib.Path(sys.argv[1])
"""


def ran(tmp_path, code):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code, str(tmp_path)], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.strip(), done.stderr


@pytest.mark.parametrize("does", [
    "open(place / 'kept', 'w')", "open(place / 'kept', 'a')", "(place / 'kept').unlink()",
    "os.rename(place / 'kept', place / 'other')", "(place / 'new').mkdir()",
    "os.open(place / 'kept', os.O_WRONLY)", "shutil.copyfile(place / 'kept', place / 'new')",
    "shutil.rmtree(place)", "subprocess.run(['true'])", "os.system('true')",
    "socket.create_connection(('127.0.0.1', 9))", "torch.save(torch.ones(3), place / 'kept')",
    "os.write(held, b'more')",
])  # fmt: skip
def test_nothing_is_done_outside_of_the_process(tmp_path, does):
    (tmp_path / "kept").write_text("as it was")
    code, out, error = ran(
        tmp_path,
        f"""
held = os.open(place / 'kept', os.O_WRONLY | os.O_APPEND)
try:
    with kept_from_outside():
        {does}
except OSError as error:
    print("kept", len(open(place / 'kept').read()))
(place / "after").write_text("again")
torch.save(torch.ones(3), place / "saved")
""",
    )
    assert (code, out) == (0, "kept 9"), error
    assert (tmp_path / "kept").read_text() == "as it was"
    assert (tmp_path / "after").read_text() == "again"
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "saved").stat().st_size > 0


def test_what_is_read_and_said_is_no_matter(tmp_path):
    (tmp_path / "kept").write_text("as it was")
    code, out, error = ran(
        tmp_path,
        """
with kept_from_outside():
    print(open(place / 'kept').read(), torch.ones(3).sum().item(), list(place.iterdir())[0].name)
""",
    )
    assert (code, out) == (0, "as it was 3.0 kept"), error


def test_memory_has_an_end(tmp_path):
    code, out, error = ran(
        tmp_path,
        """
with_less_memory(256 << 20)
try:
    held = [bytearray(1 << 20) for _ in range(4096)]
except MemoryError:
    print("no more")
""",
    )
    assert (code, out) == (0, "no more"), error
