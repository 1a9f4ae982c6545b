"""Attempts to get a wrong verdict that once worked, or nearly did. Each must stay refused."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from mini import MINI, ONE_POOL
from sumgrad.base.errors import UserError
from sumgrad.diagnose.verdict import judge
from sumgrad.record.directory import load_record

pytestmark = pytest.mark.distributed
HEAD = "from sumgrad.workloads.three_pool.workload import ThreePool, ThreePoolFormulas\n"


@pytest.fixture
def mini(tmp_path, sumgrad_check):
    """`mini(body, **flags)`: check the small workload, changed by `body`, on three ranks."""

    def run(body: str = "", **flags):
        source, topology = tmp_path / "mini.py", tmp_path / "mini.yaml"
        source.write_text(MINI + "\nclass Changed(Mini):\n    pass\n" + body)
        topology.write_text(ONE_POOL)
        return sumgrad_check(topology, workload=f"{source}:Changed", **flags)

    return run


@pytest.fixture
def mine(tmp_path, sumgrad_check):
    """`mine(source, **flags)`: check three_pool_ones with the workload class Mine."""

    def run(source: str, name: str = "three_pool_ones.yaml", **flags):
        path = tmp_path / "mine.py"
        path.write_text(HEAD + source)
        return sumgrad_check(name, workload=f"{path}:Mine", **flags)

    return run


def formulas(body: str) -> str:
    return f"""
class Odd(ThreePoolFormulas):
{body}

class Mine(ThreePool):
    def formulas(self, dtype, device, *, rounded_to=None):
        return Odd(self, dtype=dtype, device=device, rounded_to=rounded_to or dtype)
"""


# ---- runs ----------------------------------------------------------------------------------------


def test_a_small_workload_of_ones_own_passes(mini):
    verdict = mini(steps=2)
    assert verdict.status == "pass", (verdict.findings, verdict.reasons)


def test_a_collective_that_nobody_planned_fails(mine):
    verdict = mine(
        formulas(
            "    def produce(self, params, rows):\n"
            "        import torch, torch.distributed as dist\n"
            "        if dist.is_initialized():\n"
            "            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.AVG,\n"
            "                            group=dist.new_group([dist.get_rank()],\n"
            "                            use_local_synchronization=True))\n"
            "        return super().produce(params, rows)\n"
        ),
        tiers=("structure",),
    )
    assert verdict.status == "fail"
    assert any("outside every planned step" in text for text in verdict.findings)


def test_gradients_that_are_clipped_wrongly_fail(mine):
    verdict = mine(
        formulas("    pass\n")
        + """
import sumgrad.subjects.planned.step
def clip(grads, *, norm, max_norm):
    for grad in grads:
        grad.mul_(1000.0)
sumgrad.subjects.planned.step.clip_by_global_norm_ = clip
""",
        tiers=("structure",),
    )
    assert verdict.status == "fail"
    assert any(text.startswith("clipped norm") for text in verdict.findings)


def test_precision_alone_does_not_pass_what_it_cannot_see(sumgrad_check):
    verdict = sumgrad_check(
        "three_pool_square.yaml", tiers=("precision",), dtype="bfloat16", fault="divide_by_ci_count"
    )
    assert verdict.status in ("fail", "unknown")


def test_scattered_ranks_pass(tmp_path, sumgrad_check):
    topology = tmp_path / "t.yaml"
    topology.write_text(
        "name: scattered\nworkload: three_pool\npools:\n"
        "  ci: {axes: {dp: 3}, ranks: [6, 2, 0]}\n"
        "  b0: {role: block, axes: {dp: 2}, ranks: [5, 1], rows_per_rank: [0, 29]}\n"
        "  ppgd: {axes: {dp: 2}, ranks: [4, 3]}\n"
    )
    verdict = sumgrad_check(topology, tiers=("structure",))
    assert verdict.status == "pass", verdict.findings


KEY_BIAS = """
class Changed(Mini):
    shapes = {"w": (3, 2), "b": (1,)}
    class Formulas(Mini.Formulas):
        def loss_sum(self, term, *, params, rows, **_):
            scores = self.x[rows] @ params["w"].T + params["b"]   # b shifts every score alike
            return (scores.softmax(-1) * torch.arange(3)).square().sum()
"""


def test_a_gradient_that_is_zero_by_mathematics_passes(mini):
    assert mini(KEY_BIAS).status == "pass"


DEAD = """
class Changed(Mini):
    shapes = {"w": (3, 2), "b": (3,), "dead": (4,)}
"""


def test_a_parameter_that_no_term_reaches_is_unknown(mini):
    verdict = mini(DEAD)
    assert verdict.status == "unknown"
    assert any("dead: no term reaches" in r for t in verdict.tiers for r in t.reasons)
    assert mini(DEAD, tiers=("precision",)).status == "unknown"


PART = """
class Changed(Mini):
    terms = (*Mini.terms, Term(name="other", role="dp", kind="rows"))
    class Formulas(Mini.Formulas):
        def loss_sum(self, term, *, params, rows, **_):
            bias = params["b"] if term == "main" else 0
            return (self.x[rows] @ params["w"].T + bias).square().sum()
"""


def test_a_term_may_leave_a_tensor_of_its_unit_alone(mini):
    assert mini(PART).status == "pass"


STATISTIC = """
class Changed(Mini):
    terms = (*Mini.terms, Term(name="log", role="dp", kind="statistic", statistic_numel=3))
    class Formulas(Mini.Formulas):
        def produce(self, params, rows):
            return Produced(quantity={}, inner=self.x[rows] @ params["w"].T + params["b"])
        def statistics(self, term, produced, rows):
            return produced.inner.square().sum(0)
        def value(self, term, statistics, count):
            return torch.log2(1 + statistics).sum() / count
"""


def test_a_statistic_without_a_quantity_passes(mini):
    verdict = mini(STATISTIC)
    assert verdict.status == "pass", (verdict.findings, verdict.reasons)


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_loss_that_is_not_finite_anywhere_fails(mini, value):
    body = f"""
class Changed(Mini):
    class Formulas(Mini.Formulas):
        def loss_sum(self, term, *, params, **more):
            return super().loss_sum(term, params=params, **more) * float("{value}")
"""
    assert mini(body).status == "fail"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("terms = ()", "declares no terms"),
        ("terms = (*Mini.terms, *Mini.terms)", "of equal name"),
        ("terms = (Term(name='a', role='tp', kind='rows'),)", "unknown role 'tp'"),
        ("terms = (Term(name='a/b', role='dp', kind='rows'),)", "has a / or @ in it"),
        (
            "terms = (Term(name='a', role='dp', kind='rows', reads_quantity=True),)",
            "reads a quantity",
        ),
    ],
)
def test_declarations_that_cannot_be_checked(mini, body, words):
    with pytest.raises(UserError, match=words):
        mini(f"\nclass Changed(Mini):\n    {body}\n")


def test_units_without_a_home(mini):
    body = """
class Changed(Mini):
    def __init__(self, options, **more):
        super().__init__(options, **more)
        from dataclasses import replace
        lost = Param(name="lost", unit="nobody", shape=(2,))
        d = self.declaration
        self.declaration = replace(d, params=(*d.params, lost))
"""
    with pytest.raises(UserError, match="unit 'nobody' has 0 home roles"):
        mini(body)


def test_a_reference_that_hangs_is_ended(mini):
    body = """
class Changed(Mini):
    class Formulas(Mini.Formulas):
        def loss_sum(self, term, *, params, **more):
            import torch.distributed as dist
            if not dist.is_initialized():
                sum(range(10**13))
            return super().loss_sum(term, params=params, **more)
"""
    started = time.monotonic()
    verdict = mini(body, timeout_s=1.5, tiers=("structure",))
    assert time.monotonic() - started < 60
    assert verdict.status == "unknown"
    assert any("reference" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys; sys.exit(0)", "cannot be imported: SystemExit"),
        ("import sys; sys.exit('needs a GPU')", "needs a GPU"),
    ],
)
def test_a_workload_file_that_exits(mine, source, words):
    with pytest.raises(UserError, match=words):
        mine(source)


@pytest.mark.parametrize("body", ["raise KeyError(3)", "return None", "return {'w': [1]}"])
def test_weights_that_are_none(mini, body):
    with pytest.raises(UserError, match="workload mini: params"):
        mini(f"class Changed(Mini):\n    def params(self, step):\n        {body}\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("loss_sum(self, term, **k):\n            return super().loss_sum(term, **k)[None]",
         "expected a scalar"),
        ("statistics(self, term, p, rows):\n            return p.inner.sum(0)[:2]",
         "declared (3,)"),
    ],
)  # fmt: skip
def test_wrong_shapes_of_formulas_do_not_pass(mini, change, words):
    body = (
        STATISTIC.replace("class Changed(Mini)", "class Base(Mini)")
        + f"""
class Changed(Base):
    class Formulas(Base.Formulas):
        def {change}
"""
    )
    verdict = mini(body, tiers=("structure",))
    assert verdict.status == "unknown"
    assert any(words in (o["detail"] or "") for o in verdict.data["outcomes"])


EMPTY_CI = """
name: empty_ci
workload: three_pool
pools:
  critics: {role: ci, axes: {dp: 3}, rows_per_rank: [20, 9, 0]}
  b0: {role: block, axes: {dp: 2}}
  ppgd: {axes: {dp: 2}}
"""


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("imp_differentiable_sum", "differentiable_sum"), ("avg_on_ci", "avg"), (None, None)],
)
def test_faults_go_by_role_and_take_empty_ranks(tmp_path, sumgrad_check, fault, kind):
    topology = tmp_path / "t.yaml"
    topology.write_text(EMPTY_CI)
    verdict = sumgrad_check(topology, fault=fault, tiers=("structure",))
    if fault is None:
        assert verdict.status == "pass"
    else:
        assert verdict.status == "fail"
        assert verdict.diagnoses[0].kind == kind
        assert verdict.data["fault_report"]["prediction"]["agrees"]


def test_a_local_statistic_that_changes_nothing_is_named_by_its_ledger(tmp_path, sumgrad_check):
    topology = tmp_path / "t.yaml"
    topology.write_text(EMPTY_CI.replace("[20, 9, 0]", "[29, 0, 0]"))
    verdict = sumgrad_check(topology, fault="imp_local_statistic", tiers=("structure",))
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].kind == "local_statistic"


def test_faults_without_a_place_are_refused(mini):
    with pytest.raises(UserError, match="needs pools with the roles ci and block"):
        mini(fault="avg_on_ci")


# ---- stored runs ---------------------------------------------------------------------------------


@pytest.fixture
def stored(run_once, tmp_path) -> Path:
    _, directory = run_once("three_pool", steps=2, tiers=("structure",), keep_partials=True)
    return Path(shutil.copytree(directory, tmp_path / "run"))


def edit(path: Path, change) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


END = "ranks/rank_00003.json"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (END, lambda d: d.pop("result")),
        (END, lambda d: d["result"].pop("steps")),
        (END, lambda d: d["result"]["steps"].pop()),
        (END, lambda d: d["result"]["steps"][1].update(counts={})),
        (END, lambda d: d["result"]["steps"][1].pop("norm")),
        (END, lambda d: d["result"]["steps"][1].update(norm="nan")),
        (END, lambda d: d["result"]["steps"][1].update(clipped_norm=1.0)),
        (END, lambda d: d["result"]["steps"].append("junk")),
        (END, lambda d: d["result"].update(operations=5)),
        ("outcomes.json", lambda d: d[3].update(exit_code=-9)),
        ("outcomes.json", lambda d: d[3].update(status="timed_out")),
        ("outcomes.json", lambda d: d.pop()),
        ("reference_structure_0.json", lambda d: d.pop("norm")),
        ("reference_structure_0.json", lambda d: d["floor"].update({"ci.q.weight": "nan"})),
        ("reference_structure_0.json", lambda d: d.update(norm="nan")),
        ("reference_structure_0.json", lambda d: d["counts"].pop("imp")),
        ("reference_structure_0.json", lambda d: d["floor"].clear()),
    ],
)
def test_edited_records_do_not_pass(stored, file, change):
    assert judge(load_record(stored)).status == "pass"
    edit(stored / file, change)
    assert judge(load_record(stored)).status != "pass"


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:-1],
        lambda lines: [line for line in lines if '"done"' not in line],
        lambda lines: [*lines, "[1, 2]", '{"n": 900}'],
        lambda lines: [],
        lambda lines: lines[: len(lines) // 2],
    ],
)
@pytest.mark.parametrize("law", ["enforce", "report"])
def test_edited_ledgers_do_not_pass(stored, change, law):
    path = stored / "ranks" / "rank_00003.ledger.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(change(lines)) + "\n")
    edit(stored / "run.json", lambda d: d.update(law=law))
    if change(["a", "b"]) == ["a", "b", "[1, 2]", '{"n": 900}']:
        assert judge(load_record(stored)).status == "pass"  # no operation was added
    else:
        assert judge(load_record(stored)).status != "pass"


def test_an_operation_of_a_step_that_was_not_asked_for_fails(stored):
    path = stored / "ranks" / "rank_00003.ledger.jsonl"
    first = json.loads(path.read_text().splitlines()[2])
    more = {**first, "n": 9999, "label": "structure/7/reduce:ci_fn@ci", "op": "allreduce"}
    path.write_text(path.read_text() + json.dumps(more) + '\n{"done": 9999}\n')
    edit(stored / END, lambda d: d["result"].update(operations=d["result"]["operations"] + 1))
    assert judge(load_record(stored)).status == "fail"


def test_lost_outcomes_are_unknown(stored):
    (stored / "outcomes.json").unlink()
    verdict = judge(load_record(stored))
    assert verdict.status == "unknown"
    assert any("outcomes.json" in reason for reason in verdict.reasons)
