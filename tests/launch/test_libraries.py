"""Which of a Program's imports the fork server may make once for all, and that it makes them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import MY_STEP
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher

LOOKS = """
import json, os, sys, threading, time, types
from sumgrad.launch.libraries import Imports
imports = Imports()
{first}
import mako.template, mine
print(json.dumps(imports.libraries()))
"""


def libraries(tmp_path, first: str) -> list[str]:
    """What is found in a fresh process. `mako` stands for any installed library."""
    (tmp_path / "mine.py").write_text("x = 1\n")
    code = LOOKS.format(first=first).replace("mako.template", "markdown_it.token")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=env
    )
    assert out.returncode == 0, out.stderr
    return out.stdout


@pytest.mark.parametrize("first", ["", "sys.modules['cython_runtime'] = types.ModuleType('c')"])
def test_installed_modules_and_not_the_users(tmp_path, first):
    found = libraries(tmp_path, first)
    assert '"markdown_it.token"' in found
    assert "mine" not in found


@pytest.mark.parametrize(
    "first",
    [
        "os.environ['HYPOTHESIS_SETTING'] = '1'",
        "sys.modules['stub'] = types.ModuleType('stub')",
        "threading.Thread(target=time.sleep, args=(3,), daemon=True).start()",
    ],
)
def test_nothing_where_a_rank_might_have_imported_something_else(tmp_path, first):
    assert libraries(tmp_path, first).strip() == "[]"


@pytest.mark.distributed
@pytest.mark.parametrize("setting", ["", "import os; os.environ['SET_FIRST'] = '1'"])
def test_the_server_imports_them_once(tmp_path, setting):
    seen = "[n for n in ('markdown_it.token', 'sumgrad_user_mine') if n in sys.modules]"
    path, topology = tmp_path / "mine.py", tmp_path / "dp.yaml"
    path.write_text(
        f"import sys\nbefore = {seen}\n{setting}\nimport markdown_it.token\n{MY_STEP}\n"
        f"    def distribute(self, model, ctx):\n"
        f"        open({str(tmp_path / 'seen')!r} + str(ctx.rank), 'a').write(str(before) + '|')\n"
        f"        return DistributedDataParallel(model)\n"
    )
    topology.write_text(
        f"name: dp\nworkload: {path}:MyStep\npools:\n  train: {{axes: {{dp: 2}}}}\n"
    )
    options = CheckOptions(topology=topology, out=tmp_path / "run", timeout_s=240)
    with Launcher() as launcher:
        sys.modules.pop("markdown_it.token", None)
        try:
            run_check(options, launcher=launcher, preload=True)
        finally:
            os.environ.pop("SET_FIRST", None)
    wanted = "['sumgrad_user_mine']" if setting else "['markdown_it.token', 'sumgrad_user_mine']"
    assert {(tmp_path / f"seen{rank}").read_text().split("|")[0] for rank in (0, 1)} == {wanted}
