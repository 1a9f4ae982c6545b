"""Hostile input files are bounded before they are built and refused in bounded lines."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
import time

import pytest
from conftest import ROOT
from sumgrad.base.errors import UserError
from sumgrad.cli.main import main
from sumgrad.subjects.loading import import_file
from sumgrad.topology.pools import load_topology

fuzz = import_file(ROOT / "scripts" / "fuzz_inputs.py")
HEAD = "name: t\nworkload: three_pool\n"
POOL = "pools:\n  ci: {axes: {dp: 1}}\n"

HOSTILE = {
    "decimal of 5,000 digits": (HEAD + f"rows: {'9' * 5000}\n" + POOL, ":3:", "64 digits"),
    "hexadecimal": (HEAD + f"options: {{rows: 0x{'f' * 6000}}}\n" + POOL, ":3:", "64 digits"),
    "sexagesimal": (HEAD + f"rows: 1{':1' * 3000}\n" + POOL, ":3:", "64 digits"),
    "float": (HEAD + f"rows: 1.{'1' * 5000}\n" + POOL, ":3:", "64 digits"),
    "huge axes": (HEAD + "pools:\n  a: {axes: {"
                  + ", ".join(f"a{i}: 1048576" for i in range(2000)) + "}}\n",
                  ":4:", "ranks, at most"),
    "many huge pools": (HEAD + "pools:\n"
                        + "".join(f"  p{i}: {{axes: {{dp: 1048576}}}}\n" for i in range(300)),
                        ":5:", "ranks, at most"),
    "an axis of 10**9": (HEAD + "pools:\n  a: {axes: {dp: 1000000000}}\n", ":4:", "1048576"),
    "nested keys": ("? " * 20_000 + "a", ":1:", "nested deeper than 32"),
    "keys of flow mappings": ("{" * 40 + "a" + "}: 1" * 40, ":1:", "nested deeper than 32"),
    "a mapping as a key": ("? {" + "a: b, " * 5000 + "}\n: 1\n", ":1:", "got key a mapping"),
    "a sequence as a key": ("? [" + "a, " * 9000 + "]\n: 1\n", ":1:", "got key a sequence"),
    "values": (HEAD + "options: {rows: [" + "1," * 300_000 + "]}\n" + POOL, ":3:", "than 20000"),
    "keys": ("".join(f"k{i}: 1\n" for i in range(15_000)), ":", "more than 20000"),
    "unknown keys": ("".join(f"k{i}: 1\n" for i in range(5000)), "t.yaml", "and 4981 more"),
    "a long name": (f"name: {'x' * 70_000}\nworkload: x\n" + POOL, ":1:", "..."),
    "a long key": (HEAD + "k" * 1000 + ": 1\n" + POOL, ":3:", "kkk...: unknown key"),
    "a key of several lines": (HEAD + '"a\\nb\\e[31m": 1\n' + POOL, ":3:", "unknown key"),
    "an alias of a long name": ("a: *" + "b" * 60_000, ":1:", "aliases are not allowed"),
    "a long bad tag": ("a: !" + "<" + "b" * 60_000, ":1:", "not valid YAML"),
}  # fmt: skip


LOAD = """
import sys
from pathlib import Path
from sumgrad.base.errors import UserError
from sumgrad.topology.pools import load_topology
try:
    load_topology(Path(sys.argv[1]))
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_in_bounded_lines(case, tmp_path):
    text, place, words = HOSTILE[case]
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_topology(path)
    assert place in str(caught.value)
    assert words in str(caught.value)
    assert len(caught.value.problems) <= 21
    for problem in caught.value.problems:
        assert problem.isprintable(), problem
        assert len(problem) <= 400 + len(str(path))


def test_a_megabyte_of_values_needs_no_gigabytes(tmp_path):
    """They needed 2.6 GB before they were counted."""
    path = tmp_path / "t.yaml"
    path.write_text("? {" + "a: b, " * 160_000 + "}\n: 1\n")
    limit = 512 << 20
    process = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert process.stdout == f"{path}:1: more than 20000 values; a topology fits one screen\n"


def test_the_most_values_that_are_allowed_pass(tmp_path):
    path = tmp_path / "t.yaml"
    rows = ", ".join(["1"] * 19_000)
    path.write_text(HEAD + f"pools:\n  a: {{axes: {{dp: 19000}}, rows_per_rank: [{rows}]}}\n")
    assert load_topology(path).world_size == 19_000
    path.write_text(HEAD + f"rows: {'0' * 63}1\n" + POOL)
    assert load_topology(path).rows == 1


def test_errors_on_the_terminal_hold_no_escapes(tmp_path, capsys):
    path = tmp_path / "t.yaml"
    path.write_text(HEAD + '"\\e]0;title\\a": 1\n' + POOL)
    assert main(["plan", str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "\x1b[31mred.yaml")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_mutated_topologies(tmp_path):
    outcomes = fuzz.fuzz_topologies(250, seed=1, place=tmp_path)
    assert [o for o in outcomes if o.wrong] == []
    assert {o.code for o in outcomes} == {0, 2}


@pytest.fixture(scope="module")
def stored_runs(run_once):
    fault = {"fault": "drop_message", "tiers": ("structure",)}
    asked = [("three_pool_ones", {}), ("three_pool_ones", fault), ("ddp", {})]
    runs = []
    for name, flags in asked:
        verdict, directory = run_once(name, **flags)
        passed = verdict.status == "pass"
        runs.append(fuzz.Stored(name=directory.name, directory=directory, passed=passed))
    return runs


@pytest.mark.distributed
def test_damaged_run_directories(stored_runs, tmp_path):
    outcomes, kinds = fuzz.fuzz_directories(40, seed=4, runs=stored_runs, place=tmp_path)
    assert [o for o in outcomes if o.wrong] == []
    assert len(outcomes) == 80
    assert len(kinds) >= 9


@pytest.mark.distributed
@pytest.mark.parametrize("number", [0, 2], ids=["workload", "program"])
def test_one_changed_bit_of_a_gradient_is_no_pass(number, stored_runs, tmp_path, capsys):
    """The lowest bit of one number: no comparison can see it, and the file is not as written."""
    directory = shutil.copytree(stored_runs[number].directory, tmp_path / "run")
    assert main(["judge", str(directory), "--quiet"]) == 0
    path = min(directory.glob("ranks/grads_*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    assert main(["judge", str(directory)]) == 3
    assert f"{path.name}: is not what the run wrote" in capsys.readouterr().out


@pytest.mark.distributed
def test_a_whole_rank_of_another_run_is_no_pass(stored_runs, run_once, tmp_path):
    """The same topology, another seed of nothing that is compared: still not this run."""
    directory = shutil.copytree(stored_runs[2].directory, tmp_path / "run")
    _, other = run_once("ddp", seed=1)
    for path in (other / "ranks").glob("rank_00002.*"):
        shutil.copy(path, directory / "ranks" / path.name)
    assert main(["judge", str(directory), "--quiet"]) == 3


@pytest.mark.distributed
def test_a_run_that_lost_its_list_is_no_pass(stored_runs, tmp_path, capsys):
    directory = shutil.copytree(stored_runs[0].directory, tmp_path / "run")
    (directory / "manifest.json").unlink()
    assert main(["judge", str(directory)]) == 3
    assert "manifest.json: is missing" in capsys.readouterr().out


@pytest.mark.distributed
def test_logs_are_no_evidence(stored_runs, tmp_path):
    directory = shutil.copytree(stored_runs[0].directory, tmp_path / "run")
    for path in [directory / "verdict.json", *(directory / "ranks").glob("*.log")]:
        path.write_text("something else")
    assert main(["judge", str(directory), "--quiet"]) == 0


def test_the_fuzz_fails_what_it_must(tmp_path):
    """What it calls wrong: exit 4, a traceback, an exit 0 that is not earned, a case that hangs."""
    ok = ["plan", "three_pool_ones", "--quiet"]
    assert fuzz.run_command(["list", "--quiet"], "x", allowed=[0]).wrong is None
    assert "exit 0" in fuzz.run_command(["list", "--quiet"], "x", allowed=[1, 2, 3]).wrong
    assert fuzz.run_command(["plan", str(tmp_path / "absent")], "x", allowed=[2]).wrong is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz, "WALL_LIMIT_S", 0.05)
        patch.setattr(fuzz, "command", lambda argv: time.sleep(9))
        assert "took more" in fuzz.run_command(ok, "x", allowed=fuzz.CODES).wrong
        patch.setattr(fuzz, "WALL_LIMIT_S", 900)
        patch.setattr(fuzz, "CPU_LIMIT_S", 0.05)
        patch.setattr(fuzz, "command", lambda argv: all(iter(lambda: True, False)))
        assert "took more" in fuzz.run_command(ok, "x", allowed=fuzz.CODES).wrong
        patch.setattr(fuzz, "CPU_LIMIT_S", 30)
        patch.setattr(fuzz, "command", lambda argv: 4)
        assert "exit 4" in fuzz.run_command(ok, "x", allowed=fuzz.CODES).wrong
        patch.setattr(fuzz, "command", lambda argv: print("Traceback", file=sys.stderr) or 2)
        assert "traceback" in fuzz.run_command(ok, "x", allowed=fuzz.CODES).wrong
