"""What a stored run of a planned workload must not pass with: every rank, tier, step and ledger."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction

import pytest
from records_in_memory import planned_record, with_rank
from sumgrad.diagnose.verdict import judge, prediction_agrees
from sumgrad.judge.checks.ledgers import ledger_mismatches
from sumgrad.judge.knowledge import known_plan
from sumgrad.plan.edges import Reduction

KEYS = [(tier, step) for tier in ("structure", "precision") for step in (0, 1)]


@pytest.fixture(scope="module")
def record():
    return planned_record()


def tiers_of(verdict) -> dict[str, str]:
    return {t.name: t.status for t in verdict.tiers}


def test_a_right_run_passes_and_says_nothing(record):
    verdict = judge(record)
    assert verdict.status == "pass"
    assert tiers_of(verdict) == {"structure": "pass", "precision": "pass"}
    assert (verdict.findings, verdict.warnings, verdict.reasons, verdict.diagnoses) == ((),) * 4
    assert verdict.tiers[0].dtype == "float64"
    assert len(verdict.data["tensors"]) == 2 * 2 * (3 * 2 + 2 * 2 + 2 * 2 + 2 * 4)
    assert verdict.data["fault"] is None
    assert "fault_report" not in verdict.data


def test_nothing_asked_for_is_nothing_passed(record):
    verdict = judge(replace(record, spec=replace(record.spec, tiers={})))
    assert verdict.status == "unknown"
    assert verdict.reasons == ("no tier was asked for, so nothing was compared",)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_missing_rank_is_unknown_in_every_tier(record, rank):
    gone = replace(record, ranks={r: h for r, h in record.ranks.items() if r != rank})
    verdict = judge(gone)
    assert verdict.status == "unknown"
    assert tiers_of(verdict) == {"structure": "unknown", "precision": "unknown"}
    pool = "ci[0]" if rank == 0 else "ppgd[1]"
    assert verdict.reasons == (
        f"rank {rank} ({pool}): ended well, but its record is missing or incomplete",
    )
    dead = tuple(
        replace(o, status="killed", detail="signal 9") if o.rank == rank else o
        for o in record.outcomes
    )
    assert judge(replace(gone, outcomes=dead)).reasons == (
        f"rank {rank} ({pool}): killed, signal 9",
    )
    late = judge(replace(record, outcomes=dead))  # after its last write
    assert (late.status, late.reasons) == ("unknown", (f"rank {rank} ({pool}): killed, signal 9",))


@pytest.mark.parametrize("tier", ["structure", "precision"])
def test_a_step_of_the_reference_that_is_missing_is_unknown(record, tier):
    for kept in (0, 1):
        references = {**record.references, tier: [record.references[tier][kept]]}
        found = tiers_of(judge(replace(record, references=references)))
        assert found == {"structure": "pass", "precision": "pass"} | {tier: "unknown"}
    gone = {t: r for t, r in record.references.items() if t != tier}
    assert tiers_of(judge(replace(record, references=gone)))[tier] == "unknown"


def test_damage_and_a_ledger_that_is_not_whole_are_unknown(record):
    verdict = judge(replace(record, damage=("a file is torn",)))
    assert (verdict.status, verdict.reasons) == ("unknown", ("a file is torn",))
    verdict = judge(with_rank(record, 5, ledger_whole=False))
    assert verdict.status == "unknown"
    assert verdict.reasons == (
        "rank 5 (b1[0]): its ledger is missing, cut short, or has operations nobody waited for",
    )
    assert tiers_of(verdict) == {"structure": "pass", "precision": "pass"}


@pytest.mark.parametrize("tier", ["structure", "precision"])
def test_a_norm_that_could_not_have_failed_is_unknown(record, tier):
    """Four floors of a norm are compared with half of it."""
    for share, status in ((0.124, "pass"), (0.126, "unknown")):
        references = {
            **record.references,
            tier: [replace(r, norm_floor=share * r.norm) for r in record.references[tier]],
        }
        verdict = judge(replace(record, references=references))
        assert tiers_of(verdict)[tier] == status
        said = [x for t in verdict.tiers for x in t.reasons]
        text = "norm: a halved or doubled norm would not have been seen"
        assert (text in said) == (status == "unknown")


def test_the_clipped_norm_is_rounded_once_more_and_must_be_seen_too():
    one = planned_record(steps=1, tiers={"precision": "bfloat16"})
    references = [replace(r, norm_floor=0.124 * r.norm) for r in one.references["precision"]]
    (tier,) = judge(replace(one, references={"precision": references})).tiers
    assert tier.status == "unknown"
    assert [r for r in tier.reasons if "norm" in r] == [
        "clipped_norm: a halved or doubled norm would not have been seen"
    ]


def test_a_failure_is_in_the_data_with_its_outcomes_causes_and_planted_fault(record):
    wrong = scaled(record, 0.5)
    planted = replace(wrong, spec=replace(wrong.spec, fault="avg_on_ci"))
    data = judge(planted).data
    assert data["status"] == "fail"
    assert [o["rank"] for o in data["outcomes"]] == list(range(9))
    assert data["diagnoses"][0]["factor"] == "1/2"
    report = data["fault_report"]
    assert (report["visible"], report["breaks_law"]) == (True, True)
    assert report["prediction"]["agrees"] is False  # an average over three is no half
    third = replace(scaled(record, 1 / 3), spec=planted.spec)
    assert judge(third).data["fault_report"]["prediction"]["agrees"] is True


def test_wrong_scalars_fail_their_own_tier_and_equal_ones_are_one_line(record):
    wrong = record
    for rank in (3, 4):
        info = {**wrong.ranks[rank].info}
        info["precision", 1] = {**info["precision", 1], "weights": "other"}
        wrong = with_rank(wrong, rank, info=info)
    verdict = judge(wrong)
    assert verdict.status == "fail"
    assert tiers_of(verdict) == {"structure": "pass", "precision": "fail"}
    assert verdict.findings == (
        "weights, precision, step 1, rank 3-4: started from other weights than the reference",
    )


# ---- ledgers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(9))
def test_the_ledger_of_every_rank_is_held_against_the_plan(record, rank):
    for key in KEYS:
        events = copy.deepcopy(record.ranks[rank].events)
        events[key][-1]["numel"] = 2
        (found,) = ledger_mismatches(with_rank(record, rank, events=events))
        assert (found.rank, found.label) == (rank, f"{key[0]}, step {key[1]}")
        del events[key]
        lost = ledger_mismatches(with_rank(record, rank, events=events))
        assert len(lost) == len(record.ranks[rank].events[key])
    assert ledger_mismatches(record) == []


def test_operations_outside_of_every_step_are_differences_too(record):
    event = {**record.ranks[7].events["structure", 0][-1], "label": ""}
    (found,) = ledger_mismatches(with_rank(record, 7, stray=(event,)))
    assert (found.rank, found.label, found.edge) == (7, "outside every planned step", "unlabelled")
    events = {**record.ranks[7].events, ("structure", 2): [event]}
    (found,) = ledger_mismatches(with_rank(record, 7, events=events))
    assert found.label == "outside every planned step"


def test_a_ledger_that_differs_fails_where_the_law_is_enforced_and_warns_elsewhere(record):
    wrong = record
    for rank in (3, 4):
        events = copy.deepcopy(wrong.ranks[rank].events)
        events["structure", 0][-1]["numel"] = 2
        wrong = with_rank(wrong, rank, events=events)
    verdict = judge(wrong)
    assert (verdict.status, len(verdict.findings), verdict.warnings) == ("fail", 1, ())
    assert verdict.findings[0].startswith("ledger, rank 3-4: structure, step 0, norm")
    reported = judge(replace(wrong, spec=replace(wrong.spec, law="report")))
    assert (reported.status, reported.findings) == ("pass", ())
    assert reported.warnings == verdict.findings
    unread = judge(with_rank(with_rank(wrong, 3, ledger_whole=False), 4, ledger_whole=False))
    assert (unread.status, unread.findings) == ("unknown", ())


# ---- the tool checks itself ----------------------------------------------------------------------


def faulty(record, weight: Fraction):
    edge = known_plan(record).edge("reduce:ci_fn@ci")
    assert isinstance(edge, Reduction)
    return known_plan(record).with_edge(replace(edge, weight=weight))


def scaled(record, weight: float, *, off: float = 0.0, keys=KEYS, ranks=(0, 1, 2)):
    """The record in which the CI pool's gradients are multiplied by `weight`, and are `off`."""
    for rank in ranks:
        grads = {k: dict(g) for k, g in record.ranks[rank].grads.items()}
        for key in keys:
            grads[key] = {n: g * weight + off for n, g in grads[key].items()}
        record = with_rank(record, rank, grads=grads)
    return record


def test_a_prediction_that_holds_agrees(record):
    found = prediction_agrees(record, known_plan(record))
    assert found == {
        "tier": "structure", "step": 1, "worst_of_threshold": 0.0, "unpredicted": 0, "agrees": True,
    }  # fmt: skip
    found = prediction_agrees(scaled(record, 0.5), faulty(record, Fraction(1, 2)))
    assert found["agrees"]
    assert found["worst_of_threshold"] == 0


@pytest.mark.parametrize("sign", [1, -1])
def test_a_prediction_that_is_off_does_not_agree(record, sign):
    """The threshold of these tensors is 4e-13, and grows with a factor above 1."""
    for factor, weight in ((1.0, Fraction(1, 2)), (3.0, Fraction(3))):
        plan = faulty(record, weight)
        near = scaled(record, float(weight), off=sign * factor * 3.8e-13)
        far = scaled(record, float(weight), off=sign * factor * 4.3e-13)
        assert prediction_agrees(near, plan)["agrees"]
        found = prediction_agrees(far, plan)
        assert not found["agrees"]
        assert found["worst_of_threshold"] == pytest.approx(4.3 / 4, rel=0.02)
    assert not prediction_agrees(record, faulty(record, Fraction(1, 2)))["agrees"]


def test_the_last_step_of_the_first_tier_is_predicted_on_every_holder(record):
    plan = faulty(record, Fraction(1, 2))
    late = scaled(record, 0.5, keys=[("structure", 1)])
    assert prediction_agrees(late, plan)["agrees"]
    early = scaled(record, 0.5, keys=[("structure", 0), ("precision", 1)])
    assert not prediction_agrees(early, plan)["agrees"]
    one = scaled(record, 0.5, ranks=(0, 1))
    assert not prediction_agrees(one, plan)["agrees"]
    none = {t: [replace(r, partials={}) for r in held] for t, held in record.references.items()}
    assert prediction_agrees(replace(record, references=none), plan) == {"agrees": None}
    second = {"structure": none["structure"], "precision": record.references["precision"]}
    assert prediction_agrees(replace(record, references=second), plan)["tier"] == "precision"


def test_what_cannot_be_predicted_does_not_agree(record):
    """A statistic at this rank's own sums needs partials that were not kept."""
    edge = known_plan(record).edge("statistic:imp@ci")
    found = prediction_agrees(record, known_plan(record).with_edge(replace(edge, mode="local")))
    assert (found["agrees"], found["unpredicted"]) == (False, 1)


def test_a_buffer_of_the_step_before_is_predicted_from_its_partials(record):
    edge = known_plan(record).edge("reduce:v@b0")
    stale = known_plan(record).with_edge(replace(edge, stale_rank=3))
    assert not prediction_agrees(record, stale)["agrees"]
    before = record.partials("structure")[0]
    wrong = record
    offsets = known_plan(record).offsets["b0"]
    for rank in (3, 4):
        grads = {k: dict(g) for k, g in wrong.ranks[rank].grads.items()}
        for name in ("v.V", "v.U"):
            own = before["stoch", "b0"][name][offsets[0] : offsets[1]].sum(0)
            own = own + before["faith", "b0"][name][0]
            handed = before["ppgd", "ppgd"][name].sum(0)  # its leader took it in
            grads["structure", 1][name] = grads["structure", 1][name] + own + handed
        wrong = with_rank(wrong, rank, grads=grads)
    found = prediction_agrees(wrong, stale)
    assert found["agrees"], found
