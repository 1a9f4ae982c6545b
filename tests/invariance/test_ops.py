"""`sumgrad ops`: ours green, planted red, guards against fooling oneself, and the report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from sumgrad.base.errors import UserError
from sumgrad.cli.catalogue import OPERATORS
from sumgrad.cli.main import main
from sumgrad.invariance.arrangement import PROPERTIES, arrangements, base
from sumgrad.invariance.bits import Difference, Report, compare, error_limit
from sumgrad.invariance.matrix import OpsMatrix, run_matrix
from sumgrad.invariance.operator_run import Poison, draw_problem
from sumgrad.invariance.protocol import OperatorError, Rows, validate
from sumgrad.invariance.runs import (
    LENGTHS,
    IdenticalConfigurations,
    assert_invariant,
    check_operator,
    plain,
)
from sumgrad.workloads.operators.ours import CHAIN, LEAF, shipped

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
    assert matrix.status == "pass"
    assert matrix.exit_code == 0


@pytest.mark.distributed
@pytest.mark.parametrize("name", OURS)
def test_every_cell_of_ours_is_green(matrix, name):
    report = of(matrix, name)
    assert set(report.cells) == {(t, p) for t in OURS[name] for p in PROPERTIES}
    assert report.red == []
    assert set(report.errors) == OURS[name]
    assert max(report.errors.values()) <= 10


@pytest.mark.distributed
def test_every_planted_operator_is_red_and_every_property_is_red_for_one(matrix):
    planted = [report for report in matrix.reports if report.expect == "planted"]
    assert len(planted) == 9
    assert all(report.red for report in planted)
    assert all(report.wrong == [] for report in planted)
    required = {cell for report in planted for cell in report.must_differ}
    assert {prop for _, prop in required} == set(PROPERTIES)


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
    assert report.wrong == []


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
    out = capsys.readouterr().out
    assert "24 of 24 cells of 1 operators invariant, 0 of 1 checked for accuracy" in out
    assert main(["ops", "--op", f"{path}:bad", "--json", str(tmp_path / "ops.json")]) == 1
    assert "bad: y differs in" in capsys.readouterr().out
    assert json.loads((tmp_path / "ops.json").read_text())["status"] == "fail"
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
        [f"{path}:op"], dtype="float32", seed=0, timeout_s=240, launcher=sumgrad_launcher
    )
    assert matrix.status == "fail"
    assert any("rank 1 of 2: raised AssertionError: not here" in line for line in matrix.wrong)
    assert of(matrix, "small").cells["y", "dp 1"] is None


def test_the_gpu_script_runs_every_step_at_toy_sizes(tmp_path):
    command = [sys.executable, "scripts/gpu.py", "--try-on-cpu", "--out", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    data = json.loads((tmp_path / "gpu_cpu_bench.json").read_text())
    assert set(data["same_bits_at_real_sizes"].values()) == {True}
    assert {m["operator"] for m in data["measured"]} >= {"matmul dW", "attention backward"}
    assert json.loads((tmp_path / "gpu_cpu_ops_float32.json").read_text())["status"] == "pass"
    checks = json.loads((tmp_path / "gpu_cpu_checks.json").read_text())["checks"]
    assert (
        [case["verdict"] for case in checks] == [case["right"] for case in checks] == 2 * ["pass"]
    )


def test_a_configuration_that_does_not_differ_is_an_error():
    operator = plain("same", lambda r, w, c: r["x"] * 1, rows={"x": Rows((3,))}, output=(3,))
    with pytest.raises(IdenticalConfigurations, match="gives the operator the very inputs"):
        check_operator(operator, lengths=(4, 4), properties=["packed"])


def test_nan_and_the_sign_of_zero_are_seen():
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    order = next(arrangements(LENGTHS, cut=16, rows_alone=True))

    def compared(first, second):
        return compare("op", order, ("a", first), ("b", second))["y"]

    found = compared({"y": a}, {"y": b})
    assert found.what == "differs"
    assert found.index == (0,)
    nan = torch.tensor([0.0, float("nan")])
    assert compared({"y": nan}, {"y": nan}).what == "nan"
    infinite = torch.full((2,), float("inf"))
    assert compared({"y": infinite}, {"y": infinite}).what == "y: every element is infinite"
    masked = torch.tensor([0.0, -float("inf")])
    assert compared({"y": masked}, {"y": masked.clone()}) is None
    assert compared({"y": a[:0]}, {"y": a[:0]}).what == "y: it has no element to be compared"
    assert compared({"y": a}, {}).what.startswith("y: got nothing")
    assert compared({}, {"y": a}).kind == "error"
    assert compared({"y": a}, {"y": a.double()}).kind == "error"


def test_poison_fills_what_torch_hands_out():
    with Poison():
        for made in (torch.empty(3), torch.ones(3).new_empty(3), torch.empty_like(torch.ones(3))):
            assert made.isnan().all()


def test_inputs_are_random_and_their_plain_sums_depend_on_order():
    operator = next(op for op in shipped() if op.name == "rms_norm")
    problem = draw_problem(operator, lengths=LENGTHS, dtype=torch.float32)
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
    assert OpsMatrix(dtype="float32", reports=()).status == "unknown"
    assert OpsMatrix(dtype="float32", reports=()).exit_code == 3
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
    assert OpsMatrix(dtype="float32", reports=(planted,)).status == "pass"
    crashed = Difference(
        operator="mine", tensor="y", prop="order", first="a", second="b", what="raised"
    )
    for cell in (None, crashed):  # green, or red for another reason: not caught
        planted = Report(
            operator="bad",
            expect="planted",
            cells={("y", "order"): cell},
            must_differ=[("y", "order")],
        )
        assert planted.wrong == ["bad: planted, not caught in y order"]
    control = Report(operator="torch", expect="control", cells={("y", "order"): red})
    assert OpsMatrix(dtype="float32", reports=(control,)).status == "unknown"
    lost = Report(
        operator="mine", expect="invariant", cells={("y", "order"): None},
        expected={("y", "order"), ("y", "batch")},
    )  # fmt: skip
    assert lost.wrong == ["mine: y, batch: was not compared"]


HALF = Rows((6,))


def rows_of(call):
    return [s.row for s in call.segments]


class _Leak(torch.autograd.Function):
    """Right in forward; its backward multiplies by the number of physical rows."""

    @staticmethod
    def forward(ctx, x, num_rows):
        ctx.num_rows = num_rows
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 + 1e-3 * ctx.num_rows), None


def zero_in_place(rows, weights, call):
    y = 2 * rows["x"]
    rows["x"].data.zero_()
    return y


def nan_padding(rows, weights, call):
    valid = torch.zeros(call.num_rows, 1)
    for s in call.segments:
        valid[s.row : s.row + s.length] = 1
    return rows["x"] + (rows["x"] * (1 - valid)).mul(0).sum()


# What a reviewer slipped past the matrix once: each must be red, by its own words.
ATTACKS = {
    "no gradient": (
        lambda r, w, c: r["x"].detach() * 1 + 0 * r["z"],
        {"rows": {"x": HALF, "z": HALF}},
        "dx: no call gave a gradient to this input",
    ),
    "unused weight": (
        lambda r, w, c: r["x"] * 2,
        {"weights": {"w": (6,)}},
        "dw: no call gave a gradient to this weight",
    ),
    "changes its input": (zero_in_place, {}, "changed its input 'x'"),
    "other dtype": (lambda r, w, c: r["x"].double() * 2, {}, "y: got torch.float64, expected"),
    "other shape": (lambda r, w, c: r["x"][:, :3] * 2, {}, r"y: got shape \(350, 3\), expected"),
    "backward": (lambda r, w, c: _Leak.apply(r["x"], c.num_rows), {}, "dx differs in"),
    "poisoned by padding": (nan_padding, {}, "NaN in the padding"),
    "position in the call": (
        lambda r, w, c: r["x"] * 1 + 1e-4 * torch.arange(c.num_rows)[:, None], {}, "y differs"
    ),
    "exits": (lambda r, w, c: r["x"] * 1 if c.num_rows == 350 else sys.exit(), {}, "SystemExit"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_what_slipped_past_once_is_red(name):
    function, fields, words = ATTACKS[name]
    operator = plain(name, function, **{"rows": {"x": HALF}, "output": (6,), **fields})
    with pytest.raises((AssertionError, OperatorError), match=words):
        assert_invariant(operator)


def oracle_of(function):
    return plain("op", lambda r, w, c: r["x"] * 2, rows={"x": HALF}, output=(6,),
                 reference=function)  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (lambda r, w, seed, n: {"y": 3 * r["x"], "dx": 2 * seed}, "y is .* roundings"),
        (lambda r, w, seed, n: {"y": 2 * r["x"]}, "its oracle gives y"),
        (lambda r, w, seed, n: {"y": 2 * r["x"][:1], "dx": 2 * seed}, "its oracle gives dx"),
        (lambda r, w, seed, n: {"y": r["x"] * float("nan"), "dx": 2 * seed}, "inf roundings"),
    ],
)
def test_an_oracle_counts_in_an_assertion_too(reference, words):
    with pytest.raises((AssertionError, OperatorError), match=words):
        assert_invariant(oracle_of(reference))
    right = oracle_of(lambda r, w, seed, n: {"y": 2 * r["x"], "dx": 2 * seed})
    assert assert_invariant(right).errors == {"y": 0.0, "dx": 0.0}


def test_what_is_made_of_parts_may_round_with_each_of_them():
    assert error_limit(torch.bfloat16) == error_limit(torch.float16) == 2
    assert error_limit(torch.bfloat16, 4) == 4
    assert error_limit(torch.float32, 4) == error_limit(torch.float32) == error_limit(torch.float64)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_planted_operators_are_caught_in_16_bits(dtype, sumgrad_launcher):
    """Their weights' gradients are not rounded to 16 bits, where an order hides."""
    names = ["rms_norm last_block", "planted: sum over physical rows"]
    matrix = run_matrix(names, dtype=dtype, seed=0, timeout_s=240, launcher=sumgrad_launcher)
    assert matrix.status == "pass", matrix.wrong


def test_many_small_errors_count_where_the_largest_element_hides_them():
    """Half of the elements zeroed: less than the limit in the maximum norm of bfloat16."""
    operator = plain(
        "zeroes", lambda r, w, c: torch.where(r["x"].abs() < 1.5, 0 * r["x"], r["x"]),
        rows={"x": HALF}, output=(6,),
        reference=lambda r, w, seed, n: {
            "y": r["x"], "dx": torch.where(r["x"].abs() < 1.5, 0, seed)
        },
    )  # fmt: skip
    with pytest.raises(AssertionError, match=r"y is .* roundings of its inputs off"):
        assert_invariant(operator, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"expect": "invarient"}, "expect: got 'invarient'"),
        ({"rows": {}}, "rows: is empty"),
        ({"parts": 0}, "parts: got 0, expected an integer >= 1"),
        ({"parts": "two"}, "parts: got 'two'"),
        ({"rows": {"x": Rows(6)}}, r"rows\['x'\]"),
        ({"weights": {"x": (6,)}}, "share the name 'dx'"),
    ],
)
def test_impossible_operators_are_named(fields, words):
    operator = plain(
        "odd", lambda r, w, c: r["x"], **{"rows": {"x": HALF}, "output": (6,), **fields}
    )
    with pytest.raises(OperatorError, match=words):
        validate(operator)


def test_options_of_an_assertion_are_checked():
    operator = plain("op", lambda r, w, c: r["x"] * 2, rows={"x": HALF}, output=(6,))
    with pytest.raises(ValueError, match="oder"):
        assert_invariant(operator, properties=["oder", "repeat"])
    with pytest.raises(ValueError, match="at least one token"):
        assert_invariant(operator, lengths=())
    with pytest.raises(OperatorError, match="expected a scalar loss; give output"):
        assert_invariant(plain("op", lambda r, w, c: r["x"] * 2, rows={"x": HALF}))


def test_rows_of_integers_only_need_no_gradient():
    operator = plain(
        "one_hot", lambda r, w, c: torch.nn.functional.one_hot(r["t"], 4).float(),
        rows={"t": Rows(limit=4)}, output=(4,),
    )  # fmt: skip
    assert assert_invariant(operator).invariant


@pytest.mark.parametrize(
    ("body", "name", "words"),
    [
        ("import sys; sys.exit(0)", "op", "SystemExit"),
        ("1 / 0", "op", "ZeroDivisionError"),
        ("def op(rows, weights, call): return rows['x']", "op", "wrap it with"),
        ("op = 3", "op", "lacks name, rows"),
        ("op = []", "op", "there is no operator"),
        (
            "from sumgrad.invariance import *\n"
            "a = plain('a', abs, rows={'x': Rows((1,))}, output=(1,))\nop = [a, a]",
            "op",
            "'a' is the name of two operators",
        ),
    ],
)
def test_files_that_hold_no_operator_are_bad_usage(tmp_path, capsys, body, name, words):
    path = tmp_path / "bad.py"
    path.write_text(body + "\n")
    assert main(["ops", "--op", f"{path}:{name}", "--quiet"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.distributed
def test_one_operator_that_cannot_run_does_not_take_the_others_with_it(tmp_path, sumgrad_launcher):
    path = tmp_path / "mixed.py"
    path.write_text(
        "from sumgrad.invariance import *\n"
        "def fails(*_): raise KeyError('oops')\n"
        "good = plain('good[b]', lambda r, w, c: r['x'] * 2, rows={'x': Rows((5,))}, output=(5,))\n"
        "bad = plain('bad', fails, rows={'x': Rows((5,))}, output=(5,))\n"
        "odd = plain('odd', lambda r, w, c: r['x'] * 2, rows={'x': Rows((5,))}, output=(5,),\n"
        "            reference=fails, expect='control')\n"
        "def several(r, w, c):\n"
        "    x = r['x']\n"
        "    return x * 2, {'third': x * 3, 'best': x.argmax(1), 'high': x > 0}\n"
        "more = plain('more', several, rows={'x': Rows((5,))}, output=(5,))\n"
        "ops = [good, bad, odd, more]\n"
    )
    matrix = run_matrix(
        [f"{path}:ops"], dtype="float32", seed=0, timeout_s=240, launcher=sumgrad_launcher
    )
    assert of(matrix, "good[b]").wrong == []
    assert of(matrix, "more").wrong == []  # on ranks, too, which have some of the rows
    assert {"third", "best", "high"} <= {tensor for tensor, _ in of(matrix, "more").cells}
    assert "bad: the base configuration: raised KeyError: 'oops'" in matrix.wrong
    assert "odd: its oracle: raised KeyError: 'oops'" in matrix.wrong
    assert of(matrix, "odd").expect == "invariant"  # whatever a user's operator says of itself
    with pytest.raises(UserError, match="seed"):
        run_matrix([], dtype="float32", seed=-1, timeout_s=240, launcher=sumgrad_launcher)


def by_sample(rows, weights, call):
    """Of a call without rows there is no gradient of the input to give."""
    x = rows["x"]
    y = torch.zeros_like(x)
    for s in call.segments:
        if s.length:
            at = torch.arange(s.row, s.row + s.length)
            y = y.index_copy(0, at, x[at] * 2)
    return y


def test_a_rank_without_rows_gives_its_input_no_gradient():
    wanted = {"rows": {"x": Rows((4,))}, "output": (4,), "rows_alone": False}
    report = check_operator(plain("by_sample", by_sample, **wanted))
    assert not report.red, report.red
    cut = plain("cut", lambda rows, *_: rows["x"].detach() * 2, **wanted)
    with pytest.raises(OperatorError, match="no call gave a gradient to this input"):
        check_operator(cut)


@pytest.mark.parametrize(("more", "red"), [
    (lambda x: {"scaled": x / x.abs().max()}, {"scaled"}),
    (lambda x: {"place": (x == x.max()).int()}, {"place"}),
    (lambda x: {"above": x > x.mean()}, {"above"}),
    (lambda x: {"best": x.argmax(1), "above": x > 0, "third": x * 3}, set()),
])  # fmt: skip
def test_other_results_are_compared_whole_numbers_too(more, red):
    operator = plain("more", lambda r, *_: (r["x"] * 2, more(r["x"])), rows={"x": Rows((4,))},
                     output=(4,))  # fmt: skip
    report = check_operator(operator)
    assert {difference.tensor for difference in report.red} == red


@pytest.mark.parametrize("name", ["y", "dx", "dw", "loss"])
def test_other_results_have_names_of_their_own(name):
    operator = plain("more", lambda r, w, _: (r["x"] * w["w"], {name: r["x"]}),
                     rows={"x": Rows((4,))}, weights={"w": (4,)}, output=(4,))  # fmt: skip
    with pytest.raises(OperatorError, match=f"the name '{name}', which is taken"):
        check_operator(operator)


def test_what_a_loss_is_made_of_may_be_called_as_a_result():
    def loss(r, *_):
        return r["x"].square().sum(), {"y": r["x"] * 2}

    report = check_operator(plain("loss", loss, rows={"x": Rows((4,))}))
    assert ("y", "batch") in report.cells
