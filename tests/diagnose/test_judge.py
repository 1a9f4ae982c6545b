"""Judging stored records: every way in which a run can be wrong must not pass.

One real run is made; the tests change what it recorded and judge again. Gradients of faults that
nobody planted come from Prediction: what ranks would have written had they run that plan.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from sumgrad.diagnose.explainers.of_plans.hypotheses import hypotheses
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.knowledge import known_plan
from sumgrad.plan.edges import Emission, Handoff, Plan, Reduction, Transfer, messages
from sumgrad.plan.predict import PartialSums, Prediction
from sumgrad.record.directory import Record, load_record

pytestmark = pytest.mark.distributed
KEY = ("structure", 1)


@pytest.fixture(scope="module")
def stored(run_once) -> Record:
    _, directory = run_once("three_pool", steps=2, tiers=("structure",), keep_partials=True)
    return load_record(directory)


@pytest.fixture(scope="module")
def stored_ragged(run_once) -> Record:
    _, directory = run_once("three_pool_ragged", steps=2, tiers=("structure",), keep_partials=True)
    return load_record(directory)


@pytest.fixture
def record(stored) -> Record:
    """A copy that a test may change; ranks that hold the same bits share them as they are read."""
    out = copy.deepcopy(stored)
    for held in out.ranks.values():
        for at, grads in held.grads.items():
            held.grads[at] = {name: grad.clone() for name, grad in grads.items()}
    return out


def predict_run(record: Record, plan: Plan) -> Record:
    """The record that ranks running `plan` in the second step would have left, but the ledger."""
    partials = record.partials("structure")
    prediction = Prediction(plan, PartialSums(partials[1]), PartialSums(partials[0]))
    out = copy.deepcopy(record)
    for pool in plan.topology.pools:
        for rank in pool.ranks:
            for unit in plan.units[pool.name]:
                gradient = prediction.gradient(pool.name, unit, rank)
                assert gradient is not None
                out.ranks[rank].grads[KEY].update(gradient)
            # The ledgers stay the clean run's: the values alone must name the cause.
    for edge in plan.select(Emission):
        if edge.placement == "all":
            digest = {"edge": edge.name, "unit": "", "norm": 1.0, "sha256": ""}
            for rank in plan.topology.pool(edge.pool).ranks[1:]:
                out.ranks[rank].info[KEY]["digests"].append(digest)
    return out


def first_kind(record: Record) -> str | None:
    verdict = judge(record)
    return verdict.diagnoses[0].kind if verdict.diagnoses else None


def test_the_clean_record_passes(record):
    verdict = judge(record)
    assert verdict.status == "pass"
    assert not verdict.diagnoses
    assert not verdict.coefficients


def test_its_own_prediction_passes(record):
    assert judge(predict_run(record, known_plan(record))).status == "pass"


def tensor(record: Record, rank: int, name: str) -> torch.Tensor:
    return record.ranks[rank].grads[KEY][name]


def every_rank(record: Record, name: str) -> list[int]:
    return [r for r, held in record.ranks.items() if name in held.grads[KEY]]


@pytest.mark.parametrize("size", [1e-9, 1e-11, -1e-11])
def test_a_small_factor_on_one_tensor_fails(record, size):
    for name in ("ci.k.weight", "0.v.V", "1.down.U"):
        changed = copy.deepcopy(record)
        for rank in every_rank(changed, name):
            changed.ranks[rank].grads[KEY][name] = tensor(changed, rank, name) * (1 + size)
        assert judge(changed).status == "fail", name


def test_one_wrong_element_on_one_rank_fails(record):
    grad = tensor(record, 3, "ci.in.weight").clone()
    grad[0, 0] += 1e-3 * float(grad.abs().max())
    record.ranks[3].grads[KEY]["ci.in.weight"] = grad
    verdict = judge(record)
    assert verdict.status == "fail"
    assert any("replicas" in text for text in verdict.findings)


def test_replicas_that_differ_in_the_last_bit_fail(record):
    grad = tensor(record, 5, "0.v.V").clone()
    grad[0, 0] = torch.nextafter(grad[0, 0], torch.tensor(float("inf"), dtype=grad.dtype))
    record.ranks[5].grads[KEY]["0.v.V"] = grad
    verdict = judge(record)
    assert verdict.status == "fail"
    assert any("rank 4 and rank 5 hold other bits of 0.v.V" in text for text in verdict.findings)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_fails(record, value):
    for rank in every_rank(record, "ci.in.bias"):
        tensor(record, rank, "ci.in.bias")[3] = value
    verdict = judge(record)
    assert verdict.status == "fail"
    assert "[3]" in verdict.diagnoses[0].cause


def test_zero_gradients_fail(record):
    for held in record.ranks.values():
        held.grads[KEY] = {n: torch.zeros_like(g) for n, g in held.grads[KEY].items()}
    assert judge(record).status == "fail"


def drop_rank(record):
    del record.ranks[7]


def drop_step(record):
    del record.ranks[7].grads[KEY]


def drop_reference(record):
    record.references.clear()


def drop_one_step_of_the_reference(record):
    record.references["structure"].pop()


def drop_outcome(record):
    worse = replace(record.outcomes[2], status="timed_out", detail="slept")
    object.__setattr__(record, "outcomes", (*record.outcomes[:2], worse, *record.outcomes[3:]))


def drop_every_rank(record):
    record.ranks.clear()


def drop_tiers(record):
    object.__setattr__(record, "spec", replace(record.spec, tiers={}))


@pytest.mark.parametrize(
    "damage",
    [
        drop_rank,
        drop_step,
        drop_reference,
        drop_one_step_of_the_reference,
        drop_outcome,
        drop_every_rank,
        drop_tiers,
    ],
)
def test_what_was_not_compared_is_unknown(record, damage):
    damage(record)
    verdict = judge(record)
    assert verdict.status == "unknown"
    assert verdict.exit_code == 3


def test_a_missing_tensor_fails(record):
    del record.ranks[0].grads[KEY]["ci.in.bias"]
    assert judge(record).status == "fail"


def test_a_wrong_shape_fails(record):
    record.ranks[0].grads[KEY]["ci.in.bias"] = tensor(record, 0, "ci.in.bias")[:-1]
    assert judge(record).status == "fail"


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("weights", "0123", "weights"),
        ("norm", 1.0, "norm"),
        ("norm", float("nan"), "norm"),
        ("clipped_norm", 1.0, "clipped norm"),
        ("counts", {"imp": 17}, "count"),
    ],
)
def test_wrong_scalars_fail(record, field, value, what):
    record.ranks[1].info[KEY][field] = value
    verdict = judge(record)
    assert verdict.status == "fail"
    assert any(text.startswith(what) for text in verdict.findings)


def edit_ledger(record: Record, change: Callable[[list[dict]], None]) -> Record:
    change(record.ranks[4].events[KEY])
    return record


@pytest.mark.parametrize(
    "change",
    [
        lambda events: events.pop(),
        lambda events: events.append(dict(events[-1])),
        lambda events: events.reverse(),
        lambda events: events[-2].update(reduce="AVG"),
        lambda events: events[-2].update(numel=3),
        lambda events: events[-2].update(dtype="float32"),
        lambda events: events[-2].update(group=[4, 5, 6]),
        lambda events: events.clear(),
    ],
)
def test_a_ledger_that_is_not_the_plan_fails(record, change):
    changed = edit_ledger(record, change)
    verdict = judge(changed)
    assert verdict.status == "fail"
    assert verdict.diagnoses
    reported = replace(changed, spec=replace(changed.spec, law="report"))
    verdict = judge(reported)
    assert verdict.status == "pass"
    assert verdict.warnings


# ---- causes ------------------------------------------------------------------------------------


def one_edge_faults(plan: Plan):
    """A sample of every kind of one-edge fault, none of them from the shipped catalogue's code."""
    for edge in plan.select(Reduction)[:2]:
        yield "skipped_reduction", [replace(edge, op="none")]
    yield "avg", [replace(plan.edge("reduce:ci_fn@ci"), op="avg")]
    for edge in plan.select(Emission):
        if edge.placement == "leader":
            yield "replicated_contribution", [replace(edge, placement="all")]
    for edge in plan.select(Transfer):
        if edge.kind == "cotangent":
            for m in messages(plan, edge)[::2]:
                lost = (((m.src, m.dst), Fraction(0)),)
                yield "lost_message", [replace(edge, overrides=lost)]
    for edge in plan.select(Handoff):
        yield "lost_handoff", [replace(edge, weight=Fraction(0))]
    yield "stale_buffer", [replace(plan.edge("reduce:ci_fn@ci"), stale_rank=1)]


def test_one_edge_faults_are_named(stored_ragged):
    for kind, edges in one_edge_faults(known_plan(stored_ragged)):
        plan = known_plan(stored_ragged)
        for edge in edges:
            plan = plan.with_edge(edge)
        verdict = judge(predict_run(stored_ragged, plan))
        assert verdict.status == "fail", (kind, edges)
        named = verdict.diagnoses[0]
        readings = {named.kind} | {
            h.kind for h in hypotheses(known_plan(stored_ragged)) if h.cause in named.also
        }
        # An AVG that the (clean) ledger denies is read as a division before the SUM.
        expected = {kind} | ({"divided_before_reduction"} if kind == "avg" else set())
        assert readings & expected, (kind, edges, verdict.diagnoses)


def test_two_faults_at_once_are_free_factors(stored_ragged):
    plan = known_plan(stored_ragged)
    back = [t for t in plan.select(Transfer) if t.kind == "cotangent"]
    for transfer, weight in ((back[0], Fraction(7, 3)), (back[2], Fraction(2, 9))):
        plan = plan.with_edge(replace(transfer, weight=weight))
    verdict = judge(predict_run(stored_ragged, plan))
    assert verdict.diagnoses[0].kind == "free_factor"
    found = {(c.term, c.producer): c.fraction for c in verdict.coefficients}
    assert found[back[0].term, back[0].src] == "7/3"
    assert found[back[2].term, back[2].src] == "2/9"


def test_an_odd_factor_is_measured_and_not_made_a_fraction(stored_ragged):
    plan = known_plan(stored_ragged)
    weight = Fraction(0.7390851332151607)
    plan = plan.with_edge(replace(plan.edge("emit:imp@ci"), weight=weight))
    verdict = judge(predict_run(stored_ragged, plan))
    imp = next(c for c in verdict.coefficients if c.term == "imp")
    assert imp.recovered == pytest.approx(0.7390851332151607, abs=1e-10)
    assert imp.fraction is None


def test_noise_is_not_called_a_weighting_bug(record):
    generator = torch.Generator().manual_seed(0)
    noise = {}
    for rank, held in record.ranks.items():
        for name, grad in held.grads[KEY].items():
            if name.startswith("ci."):
                if name not in noise:
                    draw = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
                    noise[name] = 1e-3 * float(grad.abs().max()) * draw
                record.ranks[rank].grads[KEY][name] = grad + noise[name]
    verdict = judge(record)
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].kind == "open"
    assert not verdict.coefficients


def test_one_wrong_tensor_is_no_plan_fault(record):
    """Half of one tensor: no factor on a unit's terms explains it, and none is made up."""
    for rank in every_rank(record, "ci.q.weight"):
        record.ranks[rank].grads[KEY]["ci.q.weight"] = tensor(record, rank, "ci.q.weight") / 2
    assert first_kind(record) == "open"


def test_a_record_without_partials_names_no_cause(record):
    for reference in record.references["structure"]:
        reference.partials.clear()
    for rank in every_rank(record, "ci.q.weight"):
        record.ranks[rank].grads[KEY]["ci.q.weight"] = tensor(record, rank, "ci.q.weight") / 2
    verdict = judge(record)
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].kind == "unexplained"


def test_two_edges_in_two_pools_are_two_causes(stored):
    plan = known_plan(stored)
    plan = plan.with_edge(replace(plan.edge("reduce:ci_fn@ci"), op="avg"))
    plan = plan.with_edge(replace(plan.edge("emit:faith@block1"), placement="all"))
    changed = predict_run(stored, plan)
    for rank in (0, 1, 2, 3):
        for event in changed.ranks[rank].events[KEY]:
            if event["label"].endswith("reduce:ci_fn@ci"):
                event["reduce"] = "AVG"
    verdict = judge(changed)
    assert [d.kind for d in verdict.diagnoses] == ["replicated_contribution", "avg"]
    assert "block1" in verdict.diagnoses[0].cause
    assert not any("AVG" in text for text in verdict.diagnoses[0].because)
    assert any("AVG" in text for text in verdict.diagnoses[1].because)


def test_digests_that_contradict_are_counted(stored):
    """A leader that counts faith twice looks like two emitters, but only one rank emitted."""
    plan = known_plan(stored)
    for pool in ("block0", "block1"):
        edge = plan.edge(f"emit:faith@{pool}")
        plan = plan.with_edge(replace(edge, weight=Fraction(2)))
    verdict = judge(predict_run(stored, plan))
    assert verdict.diagnoses[0].kind == "factor"
    assert verdict.diagnoses[0].factor == "2"


@pytest.mark.parametrize("step", [0, 1])
def test_an_error_just_above_the_threshold_gets_no_invented_cause(record, step):
    threshold = next(
        t["threshold"]
        for t in judge(record).data["tensors"]
        if t["name"] == "ci.in.weight" and t["step"] == step
    )
    for rank in every_rank(record, "ci.in.weight"):
        grad = record.ranks[rank].grads["structure", step]["ci.in.weight"].clone()
        grad[3, 3] += 1.6 * threshold
        record.ranks[rank].grads["structure", step]["ci.in.weight"] = grad
    verdict = judge(record)
    assert verdict.status == "fail"
    assert [d.kind for d in verdict.diagnoses] == ["open"]
    assert not verdict.coefficients


def test_overlapping_groups_give_true_coefficients(stored_ragged):
    plan = known_plan(stored_ragged)
    wanted = {"block0": Fraction(29, 15), "block1": Fraction(29, 14)}
    for pool, weight in wanted.items():
        edge = plan.edge(f"dg:stoch:{pool}->ci")
        plan = plan.with_edge(replace(edge, weight=weight))
    verdict = judge(predict_run(stored_ragged, plan))
    cells = [(c.producer, c.fraction) for c in verdict.coefficients if c.term == "stoch"]
    assert sorted(cells) == [(pool, str(weight)) for pool, weight in wanted.items()]


def test_dependent_partials_have_no_coefficient(record):
    """Where two terms have proportional partials, neither factor is determined."""
    partials = record.partials("structure")
    for step in partials.values():
        for name in ("0.v.V", "0.v.U"):
            step["stoch", "block0"][name] = step["ppgd", "ppgd"][name].clone()
    for rank in (4, 5):
        for name in ("0.v.V", "0.v.U"):
            part = partials[1]["ppgd", "ppgd"][name].sum(0)
            record.ranks[rank].grads[KEY][name] = tensor(record, rank, name) - part * 4 / 7
    verdict = judge(record)
    found = [c for c in verdict.coefficients if c.term in ("stoch", "ppgd")]
    assert verdict.status == "fail"
    assert all(c.recovered is None for c in found)


def test_local_counts_are_named(record):
    for rank in (4, 5):
        record.ranks[rank].info["structure", 0]["counts"]["stoch"] = 1000 + rank
    verdict = judge(record)
    assert verdict.diagnoses[0].kind == "count"
    assert verdict.diagnoses[0].ranks == (4, 5)
    assert "1004, 1005" in verdict.diagnoses[0].cause


def test_one_nan_does_not_hide_the_other_cause(stored):
    plan = known_plan(stored).with_edge(
        replace(known_plan(stored).edge("reduce:ci_fn@ci"), op="avg")
    )
    changed = predict_run(stored, plan)
    changed.ranks[9].grads[KEY]["0.v.V"] = changed.ranks[9].grads[KEY]["0.v.V"] * float("nan")
    kinds = [d.kind for d in judge(changed).diagnoses]
    assert "not_finite" in kinds
    assert "divided_before_reduction" in kinds
