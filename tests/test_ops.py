"""`sumgrad ops`: ours green, planted red, guards against fooling oneself, and the report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from sumgrad.arrangement import PROPERTIES, arrangements, base
from sumgrad.catalogue import OPERATORS
from sumgrad.cli import main
from sumgrad.invariance import (
    LENGTHS,
    Difference,
    IdenticalConfigurations,
    Poison,
    Report,
    Rows,
    assert_invariant,
    check_operator,
    compare,
    draw_problem,
    plain,
)
from sumgrad.ops_matrix import OpsMatrix, run_matrix
from sumgrad.workloads.operators import CHAIN, LEAF, shipped

OURS = {
    "rms_norm": {"y", "dx", "dweight"},
    "layer_norm": {"y", "dx", "dweight", "dbias"},
    "linear": {"y", "dx", "dweight", "dbias"},
    "attention": {"y", "dq", "dk", "dv"},
    "embedding": {"y", "dweight"},
    "swiglu": {"y", "dgate", "dup"},
    "rope": {"y", "dx"},
    "cross_entropy": {"loss", "dlogits"},
    "chain": {"loss", "y", *("d" + name for name in CHAIN.shapes())},
}


@pytest.fixture(scope="module")
def matrix(sumgrad_launcher):
    """Everything, once: 5 real ranks, float32."""
    return run_matrix([], dtype="float32", seed=0, timeout_s=900, launcher=sumgrad_launcher)


def of(matrix, name) -> Report:
    return next(report for report in matrix.reports if report.operator == name)


def test_the_catalogue_lists_what_there_is():
    assert list(OPERATORS) == [operator.name for operator in shipped()]


@pytest.mark.distributed
def test_the_matrix_is_ok(matrix):
    assert matrix.wrong == []
    assert matrix.ok


@pytest.mark.distributed
@pytest.mark.parametrize("name", OURS)
def test_every_cell_of_ours_is_green(matrix, name):
    report = of(matrix, name)
    assert set(report.cells) == {(t, p) for t in OURS[name] for p in PROPERTIES}
    assert report.red == []
    assert set(report.errors) == OURS[name]
    assert max(report.errors.values()) <= 8


@pytest.mark.distributed
def test_every_planted_operator_is_red_and_every_property_is_red_for_one(matrix):
    planted = [report for report in matrix.reports if report.expect == "planted"]
    assert len(planted) == 9
    assert all(report.red for report in planted)
    assert {difference.prop for report in planted for difference in report.red} == set(PROPERTIES)


@pytest.mark.distributed
def test_last_block_is_deterministic_and_not_invariant(matrix):
    report = of(matrix, "rms_norm last_block")
    assert report.cells["dweight", "repeat"] is None
    assert {difference.tensor for difference in report.red} == {"dweight"}
    for prop in ("batch", "order", "pad left", "pad right", "packed", "micro", "dp 3"):
        assert report.cells["dweight", prop] is not None


@pytest.mark.distributed
def test_controls_are_reported_as_they_are(matrix):
    controls = [report for report in matrix.reports if report.expect == "control"]
    assert len(controls) == 7
    assert all(report.cells for report in controls)
    assert of(matrix, "torch linear").cells["dweight", "order"] is not None


@pytest.mark.distributed
def test_a_red_cell_says_where_how_much_and_between_which_configurations(matrix):
    difference = of(matrix, "planted: sum over physical rows").red[0]
    text = str(difference)
    assert text.startswith("planted: sum over physical rows: dweight differs in ")
    assert "max abs" in text
    assert "max rel" in text
    assert base(LENGTHS).name in text
    data = matrix.to_json()
    cell = next(
        c
        for o in data["operators"]
        if o["name"] == difference.operator
        for c in o["cells"]
        if c["status"] == "differs"
    )
    assert tuple(cell["difference"]["index"]) == difference.index
    json.dumps(data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["rms_norm", "linear"])
def test_other_dtypes_are_invariant_too_and_nodes_are_not_rounded(name, dtype):
    operator = next(op for op in shipped() if op.name == name)
    report = check_operator(operator, dtype=dtype)
    assert report.red == []
    assert max(report.errors.values()) <= 8


def test_micro_batches_and_ranks_cut_at_nodes_that_plain_sums_do_not_share():
    """The splits cut inside samples, differ from each other and from powers of two."""
    found = list(arrangements(LENGTHS, cut=LEAF, rows_alone=True))
    micro = [a for a in found if a.prop == "micro"]
    assert any(s.start for a in micro for call in a.calls for s in call.segments)
    by_ranks = {a.num_ranks: a for a in found if a.num_ranks}
    assert set(by_ranks) == {1, 2, 3, 5}
    tokens = [tuple(sum(s.length for s in c.segments) for c in a.calls) for a in by_ranks.values()]
    assert tokens == [(158,), (86, 72), (53, 67, 38), (32, 38, 32, 25, 31)]
    for arrangement in found:
        rows = [s for call in arrangement.calls for s in call.segments]
        covered = sorted((s.sample, p) for s in rows for p in range(s.start, s.stop))
        assert covered == [(s, p) for s, n in enumerate(LENGTHS) for p in range(n)]


def norm(rows, weights, call):
    return torch.nn.functional.rms_norm(rows["x"], (24,), weights["w"])


def test_a_users_operator_in_one_line(tmp_path):
    with pytest.raises(AssertionError, match=r"mine is not invariant:\nmine: dw differs in"):
        assert_invariant(plain("mine", norm, rows={"x": Rows((24,))}, weights={"w": (24,)},
                               output=(24,)))  # fmt: skip
    row_wise = plain("sign", lambda r, w, c: r["x"].sign() * r["x"], rows={"x": Rows((5,))},
                     output=(5,))  # fmt: skip
    assert assert_invariant(row_wise).invariant


@pytest.mark.distributed
def test_a_users_file_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "from sumgrad.invariance import Rows, plain\n"
        "def double(rows, weights, call):\n"
        "    return 2 * rows['x']\n"
        "def leaky(rows, weights, call):\n"
        "    return rows['x'] + 1e-3 * rows['x'].mean()\n"
        "good = plain('good', double, rows={'x': Rows((5,))}, output=(5,))\n"
        "bad = plain('bad', leaky, rows={'x': Rows((5,))}, output=(5,))\n"
    )
    assert main(["ops", "--op", f"{path}:good", "--quiet"]) == 0
    assert "24 of 24 cells of 1 operators invariant" in capsys.readouterr().out
    assert main(["ops", "--op", f"{path}:bad", "--json", str(tmp_path / "ops.json")]) == 1
    assert "bad: y differs in" in capsys.readouterr().out
    assert json.loads((tmp_path / "ops.json").read_text())["ok"] is False
    assert main(["ops", "--op", f"{path}:nobody"]) == 2
    assert main(["ops", "--op", "no_such_operator"]) == 2
    assert "there are rms_norm, layer_norm" in capsys.readouterr().err


@pytest.mark.distributed
def test_an_operator_that_raises_on_one_rank_ends_at_once(tmp_path, sumgrad_launcher):
    path = tmp_path / "raises.py"
    path.write_text(
        "from sumgrad.invariance import Rows, plain\n"
        "def small(rows, weights, call):\n"
        "    assert call.rank != 1, 'not here'\n"
        "    return rows['x'] * weights['w']\n"
        "op = plain('small', small, rows={'x': Rows((5,))}, weights={'w': (5,)}, output=(5,))\n"
    )
    matrix = run_matrix(
        [f"{path}:op"], dtype="float32", seed=0, timeout_s=60, launcher=sumgrad_launcher
    )
    assert not matrix.ok
    assert any("not here" in line for line in matrix.wrong)
    assert of(matrix, "small").cells["y", "dp 1"] is None


def test_the_gpu_script_runs_every_step_at_toy_sizes(tmp_path):
    command = [sys.executable, "scripts/gpu.py", "--try-on-cpu", "--out", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    data = json.loads((tmp_path / "gpu_cpu_bench.json").read_text())
    assert set(data["same_bits_at_real_sizes"].values()) == {True}
    assert {m["operator"] for m in data["measured"]} >= {"matmul dW", "attention backward"}
    assert json.loads((tmp_path / "gpu_cpu_ops_float32.json").read_text())["ok"]


def test_a_configuration_that_does_not_differ_is_an_error():
    operator = plain("same", lambda r, w, c: r["x"] * 1, rows={"x": Rows((3,))}, output=(3,))
    with pytest.raises(IdenticalConfigurations, match="gives the operator the very inputs"):
        check_operator(operator, lengths=(4, 4), properties=["packed"])


def test_nan_and_the_sign_of_zero_are_seen():
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    found = compare("op", "order", ("a", {"y": a}), ("b", {"y": b}))["y"]
    assert found.what == "differs"
    assert found.index == (0,)
    nan = torch.tensor([0.0, float("nan")])
    assert compare("op", "order", ("a", {"y": nan}), ("b", {"y": nan}))["y"].what == "nan"
    assert compare("op", "order", ("a", {"y": a}), ("b", {}))["y"].what.startswith("y: nothing")
    assert compare("op", "order", ("a", {"y": a}), ("b", {"y": a.double()}))["y"] is not None


def test_poison_fills_what_torch_hands_out():
    with Poison():
        for made in (torch.empty(3), torch.ones(3).new_empty(3), torch.empty_like(torch.ones(3))):
            assert made.isnan().all()


def test_inputs_are_random_and_their_plain_sums_depend_on_order():
    operator = next(op for op in shipped() if op.name == "rms_norm")
    problem = draw_problem(operator, dtype=torch.float32)
    terms = problem.seed * problem.rows["x"]
    forward, backward = torch.zeros(24), torch.zeros(24)
    for i in range(len(terms)):
        forward += terms[i]
        backward += terms[-1 - i]
    assert (forward != backward).float().mean() > 0.5
    assert (terms.sum(0).abs() / terms.abs().sum(0)).median() < 0.3


def test_an_operator_that_nobody_compared_is_not_ok():
    report = Report(operator="mine", expect="invariant")
    assert OpsMatrix(dtype="float32", reports=(report,)).wrong == ["mine: nothing was compared"]
    assert not OpsMatrix(dtype="float32", reports=()).ok
    poor = Report(operator="mine", expect="invariant", cells={("y", "order"): None},
                  errors={"y": 100.0})  # fmt: skip
    assert (
        "100 roundings of its inputs off the oracle"
        in OpsMatrix(dtype="float32", reports=(poor,)).wrong[0]
    )
    nan = Report(operator="mine", expect="invariant", cells={("y", "order"): None},
                 errors={"y": float("nan")})  # fmt: skip
    assert OpsMatrix(dtype="float32", reports=(nan,)).wrong
    red = Difference(operator="mine", tensor="y", prop="order", first="a", second="b")
    planted = Report(operator="bad", expect="planted", cells={("y", "order"): red})
    assert OpsMatrix(dtype="float32", reports=(planted,)).ok
