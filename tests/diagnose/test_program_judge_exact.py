"""What a Program's stored run must not pass with, and what is only said."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from records_in_memory import FLOOR, SCALE, SHAPES, program_record, with_rank
from sumgrad.base.verdict import Diagnosis, Verdict
from sumgrad.diagnose.explainers import BESIDE_A_CAUSE, EXPLAINERS
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.verdict import judge
from sumgrad.record.trace import Trace, Traces

KEY = ("structure", 0)
ROUNDING = 2.0**-23 * SCALE  # one of float32, of the scale


@pytest.fixture(scope="module")
def record():
    return program_record(steps=2)


def with_info(record, rank: int, key=KEY, **change):
    info = {**record.ranks[rank].info}
    info[key] = {**info[key], **change}
    return with_rank(record, rank, info=info)


def with_references(record, tier: str, **change):
    references = [replace(r, **change) for r in record.references[tier]]
    return replace(record, references={**record.references, tier: references})


def with_facts(record, **change):
    return replace(record, spec=replace(record.spec, facts=replace(record.spec.facts, **change)))


def tiers_of(verdict: Verdict) -> dict[str, str]:
    return {t.name: t.status for t in verdict.tiers}


def test_a_right_run_passes_and_says_nothing(record):
    verdict = judge(record)
    assert verdict.status == "pass"
    assert tiers_of(verdict) == {"structure": "pass", "precision": "pass"}
    assert (verdict.findings, verdict.warnings, verdict.reasons, verdict.diagnoses) == ((),) * 4
    assert len(verdict.data["tensors"]) == 3 * 2 * 2 * 2
    assert [t.dtype for t in verdict.tiers] == ["float64", "float32"]
    assert judge(replace(record, spec=replace(record.spec, law="enforce"))).status == "pass"


def test_a_tier_that_was_not_run_is_unknown_and_says_why(record):
    spec = replace(record.spec, skipped={"bitwise": "no float64"})
    verdict = judge(replace(record, spec=spec))
    assert verdict.status == "unknown"
    assert tiers_of(verdict)["bitwise"] == "unknown"
    assert verdict.tiers[-1].reasons == ("no float64",)
    assert verdict.data["tiers"]["bitwise"]["reasons"] == ["no float64"]
    assert verdict.reasons == ("the bitwise tier was not run: no float64",)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_missing_rank_is_unknown(record, rank):
    gone = replace(record, ranks={r: h for r, h in record.ranks.items() if r != rank})
    verdict = judge(gone)
    assert tiers_of(verdict) == {"structure": "unknown", "precision": "unknown"}
    where = f"rank {rank} (train[{rank}])"
    assert verdict.reasons == (f"{where}: ended well, but its record is missing or incomplete",)
    dead = tuple(
        replace(o, status="raised", detail="ValueError: x") if o.rank == rank else o
        for o in record.outcomes
    )
    assert judge(replace(gone, outcomes=dead)).reasons == (f"{where}: raised, ValueError: x",)
    late = judge(replace(record, outcomes=dead))
    assert (late.status, late.reasons) == ("unknown", (f"{where}: raised, ValueError: x",))
    silent = tuple(replace(o, detail=None) for o in dead)
    assert judge(replace(gone, outcomes=silent)).reasons == (f"{where}: raised",)
    nobody = judge(replace(record, ranks={}))
    assert nobody.status == "unknown"


@pytest.mark.parametrize("key", [("structure", 0), ("precision", 1)])
def test_a_step_that_one_rank_did_not_write_is_unknown_in_its_tier(record, key):
    grads = {k: g for k, g in record.ranks[1].grads.items() if k != key}
    verdict = judge(with_rank(record, 1, grads=grads))
    assert tiers_of(verdict)[key[0]] == "unknown"
    assert sorted(tiers_of(verdict).values()) == ["pass", "unknown"]


def test_a_missing_or_unsound_reference_is_unknown_in_its_tier(record):
    for tier in ("structure", "precision"):
        for kept in ([0], [1], []):
            references = {**record.references, tier: [record.references[tier][i] for i in kept]}
            verdict = judge(replace(record, references=references))
            assert tiers_of(verdict)[tier] == "unknown"
        verdict = judge(with_references(record, tier, problems=("it draws",)))
        assert tiers_of(verdict)[tier] == "unknown"
        assert verdict.reasons == (f"{tier}: it draws",)
        assert sorted(tiers_of(verdict).values()) == ["pass", "unknown"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"built": "other"}, "build() gives other weights on rank 1 than in a single process"),
        ({"batch": "other"}, "batch() gives another batch on rank 1 than in a single process"),
        ({"unknown": ("x (2,): nowhere",)}, "rank 1 (train[1]): x (2,): nowhere"),
        ({"ledger_whole": False}, "rank 1 (train[1]): its ledger is missing, cut short, or has"),
    ],
)
def test_what_one_rank_did_otherwise_is_unknown(record, change, words):
    verdict = judge(with_rank(record, 1, **change))
    assert verdict.status == "unknown"
    assert any(reason.startswith(words) for reason in verdict.reasons), verdict.reasons
    assert verdict.findings == ()


def test_damage_and_problems_of_the_program_are_reasons(record):
    assert judge(replace(record, damage=("torn",))).reasons == ("torn",)
    verdict = judge(with_facts(record, problems=("no build()",)))
    assert (verdict.status, verdict.reasons) == ("unknown", ("no build()",))
    half = replace(record.ranks[0], params=("w",))
    verdict = judge(replace(record, ranks=dict.fromkeys(range(3), half)))
    assert verdict.reasons == ("no rank holds b, so its gradient was not compared",)


def test_a_step_that_changes_weights_is_unknown(record):
    wrong = with_info(with_info(record, 2, changed_weights=["w", "b"]), 1, changed_weights=["b"])
    (reason,) = judge(wrong).reasons
    assert reason.startswith("step() changes the weights of b and 1 more on rank 1-2")
    (reason,) = judge(with_info(record, 0, ("precision", 1), changed_weights=["w"])).reasons
    assert reason.startswith("step() changes the weights of w on rank 0")


def test_what_breaks_fails(record):
    other = judge(with_info(record, 2, ("precision", 1), other_weights=["w", "b"]))
    assert other.status == "fail"
    assert other.findings == (
        "weights, precision, step 1: rank 2 starts from other values of w and 1 more than the "
        "reference",
    )
    for key in record.ranks[0].info:
        (text,) = judge(with_info(record, 0, key, other_weights=["w"])).findings
        assert text.startswith(f"weights, {key[0]}, step {key[1]}: rank 0 starts from other values")
    elsewhere = with_info(with_rank(record, 2, built="x"), 2, other_weights=["w"])
    assert judge(elsewhere).findings == ()  # said already: build() gives other weights
    races = with_info(with_info(record, 0, races=["a", "b"]), 2, races=["a", "c", "d"])
    verdict = judge(races)
    assert verdict.status == "fail"
    assert [f.partition(",")[0] for f in verdict.findings] == [
        "nobody waits for a", "nobody waits for b", "nobody waits for c"
    ]  # fmt: skip
    assert "on rank 0, 2: what it gives" in verdict.findings[0]


def test_what_is_only_said(record):
    partial = with_info(with_info(record, 0, partial=["w"]), 2, partial=["w", "b"])
    verdict = judge(partial)
    assert verdict.status == "pass"
    (text,) = verdict.warnings
    assert text.startswith("the gradient of w and 1 more on rank 0, 2 is still a Partial DTensor")
    loud = with_references(with_references(record, "structure", warnings=("x", "y")),
                           "precision", warnings=("y", "z"))  # fmt: skip
    verdict = judge(loud)
    assert (verdict.status, verdict.warnings) == (
        "pass", ("structure: x", "structure: y", "precision: z")
    )  # fmt: skip


@pytest.mark.parametrize("law", ["report", "enforce"])
def test_replicas_with_other_bits_fail_only_where_the_law_is_enforced(law):
    one = program_record(law=law)
    grads = {**one.ranks[1].grads}
    grads["precision", 0] = {**grads["precision", 0]}
    grads["precision", 0]["b"] = grads["precision", 0]["b"] * (1 + 2.0**-22)
    verdict = judge(with_rank(one, 1, grads=grads, again=grads["precision", 0]))
    said = (
        "replicas, precision, step 0: rank 0 and rank 1 hold other bits of b's gradient, which one "
        "collective gave to both",
    )
    if law == "report":
        assert (verdict.status, verdict.findings, verdict.warnings) == ("pass", (), said)
    else:
        assert (verdict.status, verdict.findings, verdict.warnings) == ("fail", said, ())


def test_a_repeated_step_that_fails_where_the_first_passed(record):
    again = {**record.ranks[2].again, "b": record.ranks[2].again["b"] + 1}
    verdict = judge(with_rank(record, 2, again=again))
    assert verdict.status == "fail"
    assert any("gave another gradient of b the second time, on rank 2" in text.replace("\n", " ")
               for text in verdict.findings)  # fmt: skip
    wrong = with_rank(record, 2, again=again)
    grads = {**wrong.ranks[2].grads}
    key = ("precision", 0)
    grads[key] = {**grads[key], "b": grads[key]["b"] + 1}
    verdict = judge(with_rank(wrong, 2, grads=grads))  # it failed already
    assert not any("second time" in text for text in (*verdict.findings, *verdict.warnings))


def test_a_repeated_step_with_other_bits_in_the_noise_is_said(record):
    b = record.ranks[2].again["b"]
    again = {**record.ranks[2].again, "b": b * (1 + torch.finfo(b.dtype).eps)}
    verdict = judge(with_rank(record, 2, again=again))
    assert verdict.status == "pass"
    assert any("gave other bits of b the second time, on rank 2" in text.replace("\n", " ")
               for text in verdict.warnings)  # fmt: skip
    assert not any("second time" in text for text in judge(record).warnings)


def noisy(tiers, size: float, *, rank: int = 1):
    """Each element of w off by a different part of `size`, one of them by all of it."""
    one = program_record(tiers=tiers)
    key = (next(iter(tiers)), 0)
    noise = size * torch.tensor([1, -0.3, 0.7, 0.2, -0.9, 0.4, -0.1, 0.8, 0.5, -0.6, 0.15, 0.35])
    for r in range(3):
        grads = {k: dict(g) for k, g in one.ranks[r].grads.items()}
        grads[key]["w"] = (grads[key]["w"].double() + noise.double().view(4, 3)).to(
            grads[key]["w"].dtype
        )
        one = with_rank(one, r, grads=grads, again={})
    return one


@pytest.mark.parametrize(("times", "status"), [(15.9, "unknown"), (16.1, "fail"), (150, "fail")])
def test_errors_like_float32_roundings_are_unknown_up_to_sixteen_of_them(times, status):
    verdict = judge(noisy({"structure": "float64"}, times * ROUNDING))
    assert verdict.status == status
    said = [x for t in verdict.tiers for x in t.reasons]
    assert any("no larger than float32 roundings" in x for x in said) == (status == "unknown")


@pytest.mark.parametrize(
    ("places", "status"), [([], "fail"), (["float32 at mine.py:9"], "unknown")]
)
def test_float32_is_an_excuse_only_where_it_was_seen(places, status):
    one = noisy({"structure": "float64"}, 15 * ROUNDING)
    for r in range(3):
        info = {key: {**held, "narrow": places} for key, held in one.ranks[r].info.items()}
        one = with_rank(one, r, info=info)
    verdict = judge(one)
    assert verdict.status == status
    said = [x for t in verdict.tiers for x in t.reasons]
    assert any("the step makes float32 at mine.py:9" in x for x in said) == bool(places)


def test_float32_is_no_excuse_elsewhere():
    loud = judge(noisy({"precision": "float32"}, 60 * ROUNDING))
    assert loud.status == "fail"
    lost = noisy({"structure": "float64"}, 15 * ROUNDING)
    grads = {KEY: {n: g for n, g in lost.ranks[0].grads[KEY].items() if n != "b"}}
    assert judge(with_rank(lost, 0, grads=grads)).status == "fail"
    # A factor that explains it is a cause, however small it is.
    scaled = program_record(tiers={"structure": "float64"})
    for r in range(3):
        grads = {KEY: {n: g * (1 + 2.0**-22) for n, g in scaled.ranks[r].grads[KEY].items()}}
        scaled = with_rank(scaled, r, grads=grads, again={})
    assert judge(scaled).status == "fail"


def test_another_gradient_fails_and_says_where(record):
    grads = {**record.ranks[1].grads, KEY: {**record.ranks[1].grads[KEY]}}
    grads[KEY]["w"] = grads[KEY]["w"] * 2
    verdict = judge(with_rank(record, 1, grads=grads))
    assert verdict.status == "fail"
    assert tiers_of(verdict) == {"structure": "fail", "precision": "pass"}
    bad = [t for t in verdict.data["tensors"] if t["status"] == "fail"]
    assert [(t["name"], t["rank"]) for t in bad] == [("w", 1)]
    assert set(SHAPES) == {t["name"] for t in verdict.data["tensors"]}


BFLOAT16 = 2.0**-7 * SCALE
BOTH = {"precision": "float32", "structure": "float64"}


def coarse(times: float, *, places=("bfloat16 at mine.py:9",), structure=0.0, lift=True):
    """A run whose precision tier is off by this many roundings of bfloat16."""
    one = noisy(BOTH, times * BFLOAT16)
    one = replace(one, spec=replace(one.spec, lift=lift))
    for r in range(3):
        info = {
            key: {**held, "narrow": list(places) if key[0] == "precision" else []}
            for key, held in one.ranks[r].info.items()
        }
        grads = {k: dict(g) for k, g in one.ranks[r].grads.items()}
        grads["structure", 0]["w"] = grads["structure", 0]["w"] + structure
        one = with_rank(one, r, info=info, grads=grads)
    return one


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"times": 15.9}, "unknown"),
        ({"times": 16.1}, "fail"),
        ({"times": 1, "places": ()}, "fail"),
        ({"times": 1, "places": ("elsewhere",)}, "fail"),
        ({"times": 1, "lift": False}, "fail"),
        ({"times": 1, "structure": 1.0}, "fail"),
    ],
)
def test_fewer_digits_excuse_what_is_right_in_float64_up_to_their_roundings(asked, status):
    verdict = judge(coarse(**asked))
    assert verdict.status == status, (verdict.reasons, verdict.diagnoses)
    said = [x for t in verdict.tiers for x in t.reasons]
    assert any("bfloat16 at mine.py:9" in x for x in said) == (status == "unknown")


def test_a_rank_that_does_not_say_what_it_computed_in_is_no_traceback():
    one = coarse(1)
    for r in range(3):
        one = with_rank(
            one, r, info={k: v for k, v in one.ranks[r].info.items() if k[0] != "precision"}
        )
    assert judge(one).status != "pass"


def test_a_repeated_step_that_fails_as_the_first_did_is_not_another_gradient(record):
    """The first is UNKNOWN: its roundings are those of a dtype that the step chose."""
    rank = record.ranks[2]
    key = (rank.again_tier, record.spec.steps - 1)
    loud = {n: g + 1e-3 * g.abs().max() for n, g in rank.again.items()}
    info = {**rank.info, key: {**rank.info[key], "narrow": {"bfloat16 at mine.py:9": 1}}}
    grads = {**rank.grads, key: loud}
    verdict = judge(with_rank(record, 2, grads=grads, again=loud, info=info))
    assert verdict.status == "unknown"
    assert [d.cause for d in verdict.diagnoses if "each time" in d.cause] == []
    (why,) = {d["reason"] for d in verdict.data["tensors"] if d["status"] == "unknown"}
    assert "the step makes bfloat16 at mine.py:9" in why
    assert why.endswith("; --dtype bfloat16 holds it to the noise of bfloat16")


@pytest.mark.parametrize("times", [3.0, 0.01, -1.0])
def test_a_gradient_with_the_parameter_itself_in_it(record, times):
    """As of a buffer that held parameters, or a decay: they are known from the second run."""
    generator = torch.Generator().manual_seed(3)
    params = {n: torch.randn(s, generator=generator, dtype=torch.float64)
              for n, s in SHAPES.items()}  # fmt: skip

    def with_traces(wrong, values):
        none = Trace(calls=(), outputs=(), gradients=(), sources={})
        traces = Traces(tier="structure", step=0, ranks=dict.fromkeys(wrong.ranks, none),
                        single=replace(none, params=values))  # fmt: skip
        return judge(replace(wrong, traces=traces)).diagnoses[0]

    wrong = record
    for rank, held in record.ranks.items():
        grads = {at: dict(own) for at, own in held.grads.items()}
        grads[KEY] = {n: g + times * params[n] for n, g in grads[KEY].items()}
        wrong = with_rank(wrong, rank, grads=grads)
    found = with_traces(wrong, params)
    assert (found.kind, found.standing, found.ranks) == ("own_value", "proved", (0, 1, 2))
    assert float(Fraction(found.factor)) == pytest.approx(times)
    others = {n: p + torch.ones_like(p) for n, p in params.items()}
    assert with_traces(wrong, others).kind != "own_value"
    assert with_traces(wrong, {}).kind != "own_value"


def kinds_of(record, params, change):
    """The causes of a run whose every gradient has `change(name)` added, the parameters known."""
    none = Trace(calls=(), outputs=(), gradients=(), sources={})
    wrong = record
    for rank, held in record.ranks.items():
        grads = {at: dict(own) for at, own in held.grads.items()}
        grads[KEY] = {n: g + change(n) for n, g in grads[KEY].items()}
        wrong = with_rank(wrong, rank, grads=grads)
    traces = Traces(
        tier="structure", step=0, ranks=dict.fromkeys(wrong.ranks, none),
        single=replace(none, params=params),
    )  # fmt: skip
    return [d.kind for d in judge(replace(wrong, traces=traces)).diagnoses]


def test_a_multiple_of_the_parameter_must_leave_nothing_over_the_threshold(record):
    params = {n: torch.ones(s, dtype=torch.float64) for n, s in SHAPES.items()}

    def change(factor):
        def of(name):
            more = 3.0 * params[name]
            more[0] += factor * 4 * FLOOR if name == "w" else 0.0
            return more

        return of

    assert kinds_of(record, params, change(0.0)) == ["own_value"]
    assert "own_value" not in kinds_of(record, params, change(100.0))


def test_a_multiple_of_the_parameter_must_explain_what_is_wrong(record):
    """An error just over the threshold is brought under it by a little of anything."""
    params = {n: torch.ones(s, dtype=torch.float64) for n, s in SHAPES.items()}
    signs = torch.tensor([[1.0, -1.0, 1.0]] * 4, dtype=torch.float64)

    def change(name):
        return 1.2 * 4 * FLOOR * (signs if name == "w" else signs[0])

    assert "own_value" not in kinds_of(record, params, change)


def test_the_same_factor_on_every_gradient_is_said_to_be_a_count_in_few_digits():
    """Roundings of single elements have no common factor; a count that was rounded has."""

    def reasons(change):
        one = coarse(0.0)
        for r in range(3):
            grads = {k: dict(g) for k, g in one.ranks[r].grads.items()}
            grads["precision", 0] = {n: change(n, g) for n, g in grads["precision", 0].items()}
            one = with_rank(one, r, grads=grads)
        verdict = judge(one)
        assert verdict.status == "unknown"
        return " ".join(x for t in verdict.tiers for x in t.reasons)

    def beside(g):
        """Something at right angles to a gradient, of 0.4 % of its size."""
        other = torch.arange(1.0, g.numel() + 1).view(g.shape)
        other = other - g * ((other * g).sum() / (g * g).sum())
        return other * (0.004 * g.norm() / other.norm())

    assert "every gradient is multiplied by 1.004" in reasons(lambda n, g: 1.004 * g)
    for change in (
        lambda n, g: 1.004 * g + beside(g),
        lambda n, g: (1.004 if n == "w" else 1.002) * g,
    ):
        text = reasons(change)
        assert "every gradient" not in text
        assert "no larger than their roundings" in text


def test_a_diagnosis_that_raises_takes_no_verdict_away(record, monkeypatch):
    def broken(case, left):
        raise IndexError("of ours")

    monkeypatch.setattr("sumgrad.diagnose.diagnose.EXPLAINERS", (broken,))
    assert judge(record).status == "pass"
    grads = {at: {n: 2 * g for n, g in own.items()} for at, own in record.ranks[0].grads.items()}
    verdict = judge(with_rank(record, 0, grads=grads))
    assert verdict.status == "fail"
    (found,) = verdict.diagnoses
    assert (found.kind, found.standing) == ("open", "open")
    assert "IndexError: of ours, raised at" in found.however[-1]
    assert "test_program_judge_exact.py" in found.however[-1]
    monkeypatch.setattr("sumgrad.diagnose.diagnose.EXPLAINERS", ())
    monkeypatch.setattr("sumgrad.diagnose.diagnose.LAST_RESORT", (broken,))
    (found,) = judge(with_rank(record, 0, grads=grads)).diagnoses
    assert (found.kind, found.standing) == ("broken", "open")
    assert "IndexError: of ours" in found.cause
    assert "test_program_judge_exact.py" in found.because[0]


def test_the_explainers_beside_one_that_raises_are_asked(record, monkeypatch):
    def broken(case, left):
        raise IndexError("of ours")

    every = (broken, *EXPLAINERS)
    monkeypatch.setattr("sumgrad.diagnose.diagnose.EXPLAINERS", every)
    grads = {at: {n: 2 * g for n, g in own.items()} for at, own in record.ranks[0].grads.items()}
    found = judge(with_rank(record, 0, grads=grads)).diagnoses[0]
    assert found.factor == "2"
    assert "IndexError: of ours" in found.however[-1]


def test_a_hint_that_raises_takes_no_cause_away(record, monkeypatch):
    def broken(case, cause):
        raise IndexError("of ours")

    monkeypatch.setattr("sumgrad.diagnose.diagnose.BESIDE_A_CAUSE", (broken, *BESIDE_A_CAUSE))
    grads = {at: {n: 2 * g for n, g in own.items()} for at, own in record.ranks[0].grads.items()}
    found = judge(with_rank(record, 0, grads=grads)).diagnoses[0]
    assert found.factor == "2"
    assert "IndexError: of ours" in found.however[-1]


@pytest.mark.parametrize("ranks", [3, 6])
def test_a_few_numbers_that_replicas_hold_alike_are_no_factors_of_rows(ranks):
    """Three stretches, three numbers: some factors fit whatever is held, on however many ranks."""
    record = program_record(ranks=ranks)
    for reference in record.references["structure"]:
        for held in reference.partials.values():
            held["b"] = torch.tensor([[2.0, 1, 0], [0, 1, 1], [1, 0, 3]]).double()
    record = with_references(record, "structure", intervals=((0, 3), (3, 5), (5, 8)))
    for rank in range(ranks):
        grads = {**record.ranks[rank].grads}
        grads[KEY] = {**grads[KEY], "b": torch.tensor([0.3, -1.7, 2.2]).double()}
        record = with_rank(record, rank, grads=grads)
    verdict = judge(record)
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].kind == "open"


@pytest.mark.parametrize(
    ("apart", "kind"), [(0.0, "open"), (3 * ROUNDING, "open"), (0.5, "run_to_run")]
)
def test_only_what_differs_by_more_than_a_threshold_is_unlike_each_time(apart, kind):
    """DDP rebuilds its buckets after the first step: other roundings, and nothing else."""
    record = program_record()
    wrong = torch.tensor([0.3, -1.7, 2.2])
    for rank in range(3):
        grads = {
            key: {**g, "b": wrong.to(g["b"].dtype)} for key, g in record.ranks[rank].grads.items()
        }
        again = {n: g + apart for n, g in grads["precision", 0].items()}
        record = with_rank(record, rank, grads=grads, again=again, again_tier="precision")
    verdict = judge(record)
    assert verdict.status == "fail"
    assert verdict.diagnoses[0].kind == kind


@pytest.mark.parametrize(
    ("standing", "kind"), [("proved", "not_reduced"), ("likely", "run_to_run")]
)
def test_what_explains_the_first_run_is_said_before_that_the_next_one_differs(
    standing, kind, monkeypatch
):
    def told(case, left):
        found = Diagnosis(cause="not reduced", kind="not_reduced", standing=standing)
        yield explained(case, found)

    monkeypatch.setattr("sumgrad.diagnose.explainers.last.put_together", told)
    record = program_record()
    wrong = torch.tensor([0.3, -1.7, 2.2])
    for rank in range(3):
        grads = {
            key: {**g, "b": wrong.to(g["b"].dtype)} for key, g in record.ranks[rank].grads.items()
        }
        again = {n: g + 0.5 for n, g in grads["precision", 0].items()}
        record = with_rank(record, rank, grads=grads, again=again, again_tier="precision")
    found = judge(record).diagnoses[0]
    assert found.kind == kind
    both = (found.cause, *found.however)
    assert any("gives another gradient when it is run again" in text for text in both)


def test_what_is_written_before_the_wait_fails_whatever_the_gradients(record):
    verdict = judge(with_info(with_info(record, 0, written=["a", "b"]), 2, written=["a"]))
    assert verdict.status == "fail"
    (cause,) = verdict.diagnoses
    assert (cause.kind, cause.standing, cause.ranks) == ("missing_wait", "proved", (0, 2))
    assert cause.cause == "a tensor of a is written before this is waited for"
    assert [f.split(" is a tensor of ")[0] for f in verdict.findings] == [
        "what is written on rank 0, 2",
        "what is written on rank 0",
    ]


@pytest.mark.parametrize(
    ("told", "apart", "kinds"),
    [
        ({"read_early": ["a", "b"]}, 0.5, ["missing_wait"]),
        ({"read_early": ["a", "b"]}, 0.0, []),  # no more than rounding
        ({"read_early": ["a"], "races": ["c"]}, 0.5, ["missing_wait"]),  # and that is the cause
        ({"late": ["a", "b"]}, 0.5, ["run_to_run"]),
    ],
)
def test_what_is_read_before_the_wait_fails_where_the_repeated_step_does(told, apart, kinds):
    record = program_record()
    for rank in range(3):
        again = {n: g + apart for n, g in record.ranks[rank].grads["precision", 0].items()}
        record = with_rank(record, rank, again=again, again_tier="precision")
    verdict = judge(with_info(record, 1, **told))
    assert verdict.status == ("fail" if kinds else "pass"), verdict
    assert [cause.kind for cause in verdict.diagnoses] == kinds
    early = [f for f in verdict.findings if f.startswith("something is read before")]
    assert len(early) == ("read_early" in told and "races" not in told and apart > 0)
    if early:
        assert verdict.diagnoses[0].cause.endswith("read before it is waited for: a, b")
        assert verdict.diagnoses[0].ranks == (1,)
