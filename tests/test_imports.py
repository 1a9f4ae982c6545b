"""Who may import whom, read from the source: imports point down, and some doors stay shut."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

HARNESS = ROOT / "harness"
MODULES = {path.stem: path for path in HARNESS.glob("*.py")}
# One line a layer, lowest first; a module may import its own layer and those below it.
LAYERS = [
    [
        "__init__",
        "errors",
        "files",
        "tolerances",
        "verdict",
        "interpreter",
        "arrangement",
        "arguments",
        "interrupts",
        "processes",
        "conversation",
        "rank_log",
        "manifest",
        "commands",
        "plain_text",
    ],
    ["yaml_source", "topology", "outcome"],
    [
        "declaration",
        "rank",
        "convention",
        "exchange",
        "fit",
        "tree_exchange",
        "operations",
        "collective_faults",
        "fault_operators",
        "delegation",
    ],
    ["plan"],
    [
        "proof",
        "schedule",
        "workload",
        "process_group",
        "operator_run",
        "bits",
        "invariance",
        "noise_floor",
    ],
    [
        "faults",
        "predict",
        "hypotheses",
        "endings",
        "program",
        "program_probe",
        "program_context",
        "placement",
        "evidence",
        "misbehaviour",
        "unseen",
        "narrow",
    ],
    ["step", "reference", "program_reference", "program_faults", "program_rank"],
    [
        "record",
        "compare",
        "case",
        "free_factors",
        "direct_causes",
        "verdict_json",
        "program_record",
        "program_compare",
        "unseen_checks",
        "program_fit",
        "program_names",
        "ledger_checks",
        "ledger_causes",
        "uniform_causes",
        "divergent_causes",
        "clean_trace",
    ],
    [
        "diagnose",
        "program_diagnose",
        "launch",
        "fork_server",
        "program_job",
        "check_rank",
        "check_reference",
        "ops_rank",
        "warm_rank",
        "plugin_rank",
        "agreement",
    ],
    ["judge", "program_judge", "report", "report_files", "catalogue", "matrix"],
    ["plan_report", "program_check", "check"],
    ["program_matrix", "shrink"],
    ["torchrun", "fault_matrix", "ops_matrix"],
    ["cli", "pytest_plugin", "entry", "run", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# rank starts user functions, which may live in a file: it borrows the importer at run time.
EXCEPTIONS = {("rank", "workload")}
MAY_TOUCH_DISTRIBUTED = {
    "convention", "exchange", "process_group", "step", "check_rank", "torchrun", "pytest_plugin",
    "fork_server", "launch", "tree_exchange", "ops_rank", "placement", "program_context",
    "program_rank", "evidence", "misbehaviour", "warm_rank", "delegation",
}  # fmt: skip
MAY_PRINT = {"cli"}


def imported(path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path) -> set[str]:
    names = {name.split(".")[1] for name in imported(path) if name.startswith("sumgrad.")}
    return {name for name in names if name in MODULES}


def test_every_module_has_a_layer():
    assert not set(MODULES) - set(LEVEL), "put the new module into a layer"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name):
    for other in own(MODULES[name]):
        if (name, other) not in EXCEPTIONS:
            assert LEVEL[other] <= LEVEL[name], f"{name} imports {other}, which is above it"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_workloads_import_kernels(name):
    assert not any(n.startswith("sumgrad.kernels") for n in imported(MODULES[name]))


def test_kernels_import_nothing_of_the_harness():
    for path in (ROOT / "kernels").glob("**/*.py"):
        own_names = [n for n in imported(path) if n.startswith("sumgrad")]
        assert all(n.startswith("sumgrad.kernels") for n in own_names), path


@pytest.mark.parametrize("name", sorted(set(MODULES) - MAY_TOUCH_DISTRIBUTED))
def test_who_touches_torch_distributed(name):
    names = imported(MODULES[name])
    assert not any(n.startswith(("torch.distributed", "multiprocessing")) for n in names)


@pytest.mark.parametrize("name", ["reference", "workload", "declaration"])
def test_the_reference_shares_no_distributed_code(name):
    forbidden = {"plan", "proof", "schedule", "step", "exchange", "convention", "process_group"}
    assert not own(MODULES[name]) & forbidden
    for path in (HARNESS / "workloads").glob("*.py"):
        assert not own(path) & forbidden, path


def test_judge_and_launch_never_meet():
    for name in ("judge", "compare", "diagnose", "free_factors", "predict", "fit"):
        assert not own(MODULES[name]) & {"launch", "fork_server", "step"}
    for name in ("launch", "fork_server", "rank"):
        assert not own(MODULES[name]) & {"judge", "compare", "diagnose"}


@pytest.mark.parametrize("path", [*HARNESS.glob("*.py"), *HARNESS.glob("workloads/*.py")])
def test_only_the_command_line_prints(path):
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    printed = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
    assert not printed or path.stem in MAY_PRINT


@pytest.mark.parametrize("path", [*HARNESS.glob("*.py"), *(ROOT / "kernels").glob("*.py")])
def test_no_module_takes_a_standard_library_name(path):
    assert path.stem not in sys.stdlib_module_names - {"__init__", "__main__"}


def test_the_plugin_and_help_import_no_torch():
    code = (
        "import sys, sumgrad.pytest_plugin, sumgrad.cli.main; "
        "sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
