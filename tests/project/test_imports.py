"""The house holds: entries, floors, prefixes, the picture in the page; and doors that stay shut."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import house
import pytest
from conftest import ROOT

HARNESS = ROOT / "harness"
MODULES = house.modules()
MAY_TOUCH_DISTRIBUTED = {
    "convention", "subjects.planned.context", "subjects.planned.exchange", "subjects.planned.step",
    "subjects.planned.job", "subjects.planned.bitwise.step",
    "subjects.program.tried.changed", "subjects.program.tried.changed_collective",
    "subjects.program.context", "subjects.program.held_gradients",
    "subjects.program.tier_run", "subjects.program.placed.parts_by_value",
    "subjects.program.tried.whole", "subjects.program.tried.rendezvous",
    "subjects.program.tried.exchange",
    "ledger.process_group", "ledger.delegation", "ledger.backends", "ledger.late",
    "faults.misbehaviour", "launch.rank", "launch.again.trial_rank",
    "launch.torchrun.member", "launch.torchrun.ranks", "launch.matrix.warm_rank",
    "launch.script.watched.in_front", "launch.script.watched.seat", "launch.script.watched.watch",
    "subjects.script.roundings",
    "invariance.tree_exchange", "invariance.ranks",
}  # fmt: skip


def imported(path, *, all_names: bool = True) -> set[str]:
    """Everything that a file imports, whole names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_file_of_tests_has_a_name_of_its_own():
    """Two of one name in two folders are one module to pytest: the second is not collected."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py")]
    assert {name for name in names if names.count(name) > 1} <= {"__init__.py"}


def test_the_house_keeps_its_rules():
    assert house.problems() == []


def test_the_picture_in_the_page_is_the_one_that_the_imports_draw():
    page = house.PAGE.read_text()
    assert house.page_with(page, house.drawing()) == page, "run scripts/house.py --draw"


def make(tmp_path, **files: str):
    """A house of these files; `__` for a slash."""
    for name, text in files.items():
        path = tmp_path / "harness" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.parent != tmp_path / "harness":
            path.with_name("__init__.py").touch()
    return tmp_path / "harness"


def test_each_rule_is_noticed_when_it_is_broken(tmp_path):
    late = "def f():\n    from sumgrad.top import x"
    assert house.problems(make(tmp_path / "a", top__m="from sumgrad.low import x", low__m="")) == []
    (text,) = house.problems(make(tmp_path / "b", top__m="import sumgrad.low", low__m=late))
    assert text.startswith("imports go round: ")
    tower = {f"r{i}__m": f"from sumgrad.r{i + 1}.m import x" for i in range(8)} | {"r8__m": ""}
    assert house.problems(make(tmp_path / "c", **tower)) == ["9 floors, at most 8"]
    del tower["r8__m"]
    assert house.problems(make(tmp_path / "d", **tower)) == []
    (text,) = house.problems(make(tmp_path / "e", **{f"m{i}": "" for i in range(21)}))
    assert text.startswith("21 entries in harness/, at most 20")
    (text,) = house.problems(make(tmp_path / "g", **{f"r__m{i}": "" for i in range(20)}))
    assert text.startswith("21 entries in harness/r/, at most 20: __init__.py, m0.py")
    same = make(tmp_path / "f", r__ops_a="", r__ops_b="", r__ops_c="")
    assert house.problems(same) == ["harness/r: ops_a.py, ops_b.py, ops_c.py share a prefix"]
    (same / "r" / "__init__.py").unlink()
    assert house.problems(same)[1] == "harness/r: no __init__.py says what lives here"


def test_the_picture_shows_each_arrow_that_no_longer_way_implies(tmp_path):
    chain = {"a__m": "import sumgrad.b.m, sumgrad.c.m", "b__m": "from sumgrad import c", "c__m": ""}
    lines = house.drawing(make(tmp_path, **chain)).split("\n")
    assert [line for line in lines if "-->" in line] == ["    a --> b", "    b --> c"]


def test_every_folder_says_what_lives_in_it():
    for path in HARNESS.rglob("__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert len(text) > 60, path


def test_every_folder_is_installed():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {
        ".".join(["sumgrad", *path.parent.relative_to(HARNESS).parts])
        for path in [*HARNESS.rglob("__init__.py"), *HARNESS.rglob("*.jinja")]
    }
    listed = set(data["tool"]["setuptools"]["packages"])
    assert listed == folders | {"sumgrad.kernels", "sumgrad.topologies"}


def test_only_workloads_import_kernels():
    for name, path in MODULES.items():
        if not name.startswith("workloads."):
            assert not any(n.startswith("sumgrad.kernels") for n in imported(path)), name


def test_kernels_import_nothing_of_the_harness():
    for path in (ROOT / "kernels").glob("**/*.py"):
        own_names = [n for n in imported(path) if n.startswith("sumgrad")]
        assert all(n.startswith("sumgrad.kernels") for n in own_names), path


def test_who_touches_torch_distributed():
    touching = {
        name
        for name, path in MODULES.items()
        if any(n.startswith(("torch.distributed", "multiprocessing")) for n in imported(path))
    }
    users = {name for name in touching if name.startswith("workloads.")}  # as users write
    assert touching - users == MAY_TOUCH_DISTRIBUTED


@pytest.mark.parametrize(
    "name",
    [
        "subjects.planned.reference", "subjects.planned.workload",
        "subjects.program.reference.compute", "subjects.program.probe", "subjects.noise_floor",
        "topology.declaration", "subjects.planned.bitwise.reference",
        "subjects.planned.bitwise.rows", "base.tree",
    ],
)  # fmt: skip
def test_the_reference_shares_no_distributed_code(name):
    forbidden = ("plan", "ledger", "convention", "launch", "subjects.planned.step",
                 "subjects.planned.exchange", "subjects.planned.bitwise.step",
                 "subjects.program.rank", "subjects.program.tier_run")  # fmt: skip
    assert not [n for n in house.imported(MODULES[name]) if n.startswith(forbidden)]
    for other, path in MODULES.items():
        if other.startswith("workloads.three_pool"):
            assert not [n for n in house.imported(path) if n.startswith(forbidden)], other


LOOKS = ("values", "where", "inputs", "over_ranks", "how_wrong", "in_code", "autograd", "weights",
         "wanted", "trying")  # fmt: skip


def test_a_look_asks_only_those_above_it():
    """As docs/architecture.md has them."""
    rooms = {name: [] for name in LOOKS}
    for name, path in MODULES.items():
        if name.startswith("diagnose.modules."):
            asked = [
                n.split(".")[2] for n in house.imported(path) if n.startswith("diagnose.modules.")
            ]
            rooms[name.split(".")[2]] += asked
    for place, room in enumerate(LOOKS):
        assert {*rooms[room]} <= {*LOOKS[: place + 1]}, room
    page = house.PAGE.read_text()
    assert all(f"`{room}/`" in page for room in LOOKS)


def test_judging_starts_nothing():
    for name, path in MODULES.items():
        if house.room_of(name) in ("record", "judge", "diagnose"):
            names = list(house.imported(path))
            assert not [n for n in names if n.startswith(("launch", "subjects", "workloads"))], name
            assert not imported(path) & {"subprocess", "multiprocessing", "socket"}, name


def test_a_kind_of_spec_is_asked_for_in_subjects_only():
    """What a subject knows is asked for (a plan, facts); its class is nobody else's business."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                kinds = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                found = kinds & {"RunSpec", "PlannedStep", "UserStep", "Declaration", "Facts"}
                assert not found or house.room_of(name) == "subjects", name


def test_only_the_command_line_prints():
    for name, path in MODULES.items():
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        printed = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert not printed or house.room_of(name) == "cli", name


@pytest.mark.parametrize("path", [*HARNESS.glob("*"), *(ROOT / "kernels").glob("*.py")])
def test_no_module_takes_a_standard_library_name(path):
    assert path.stem not in sys.stdlib_module_names - {"__init__", "__main__"}


def test_the_plugin_and_help_import_no_torch():
    code = (
        "import sys, sumgrad.pytest_plugin, sumgrad.cli.main; "
        "sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
