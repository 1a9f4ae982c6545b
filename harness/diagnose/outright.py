"""Causes that a record names by itself, without any fit: weights, counts, waits, missing values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import ledger_against
from sumgrad.diagnose.explainers.by_modules.forwards.never_called import never_called
from sumgrad.diagnose.explainers.of_plans.hypotheses import hypotheses
from sumgrad.judge.comparison import TensorDiff
from sumgrad.judge.knowledge import known_plan, plan_of
from sumgrad.plan.edges import Count
from sumgrad.plan.schedule import Mismatch
from sumgrad.record.directory import Record

MOST_GROUPS = 3  # of tensors that are missing on the same ranks


def law_only(record: Record, mismatches: Sequence[Mismatch]) -> Diagnosis:
    """The values are right but the ledger is not the plan's: find the plan that it is."""
    first = mismatches[0]
    tier = next(iter(record.spec.tiers))
    known = hypotheses(known_plan(record), with_stale=False)
    for hypothesis in sorted(known, key=lambda h: (h.kind != "compensated", h.rank)):
        if not any(
            ledger_against(record, hypothesis.plan, tier, step) for step in range(record.spec.steps)
        ):
            because = [f"the ledger shows {first}", "it is the ledger that this plan would leave"]
            if hypothesis.kind == "compensated":
                because[1] = "every gradient is right, so something multiplies by the size first"
            return hypothesis.diagnosis(
                because=tuple(because),
                however=("the comparison with the reference passes on this topology",),
            )
    return Diagnosis(
        cause=f"the step does not execute its plan: {first}",
        kind="ledger",
        standing="proved",
        ranks=tuple(sorted({m.rank for m in mismatches})),
        because=tuple(str(m) for m in mismatches[:3]),
        however=("every gradient that was compared is right",),
    )


def wrong_counts(record: Record) -> Iterator[Diagnosis]:
    """Ranks that divide by another number than the data's; their own record says so."""
    plan = plan_of(record)
    for tier, references in record.references.items() if plan else ():
        assert plan is not None
        for edge in plan.select(Count):
            pool = plan.topology.pool(edge.pool)
            for term in edge.terms:
                wanted = references[0].counts[term] if references else None
                used = {
                    rank: record.ranks[rank].info[tier, 0]["counts"].get(term)
                    for rank in pool.ranks
                    if rank in record.ranks and (tier, 0) in record.ranks[rank].info
                }
                wrong = {rank: count for rank, count in used.items() if count != wanted}
                if wanted is not None and wrong:
                    numbers = ", ".join(str(count) for count in list(wrong.values())[:8])
                    yield Diagnosis(
                        cause=f"{pool.name} divides {term} by {numbers}; the global count is "
                        f"{wanted}",
                        kind="count",
                        standing="proved",
                        term=term,
                        ranks=tuple(wrong),
                        because=(f"the ranks' own records of tier {tier} name these counts",),
                    )
        return


def other_weights(record: Record) -> Iterator[Diagnosis]:
    for (tier, step), names in _by_step(record, "other_weights").items():
        ranks = [r for r, n in names.items() if n]
        if ranks and _built_alike(record, ranks):
            yield Diagnosis(
                cause=f"rank {spans(ranks)} starts from other weights than build() gives: the "
                f"replicas are not one model",
                kind="other_weights",
                standing="proved",
                ranks=tuple(ranks),
                because=(
                    f"before step {step} of tier {tier} its values of {names[ranks[0]][0]} are "
                    f"not the reference's, bit by bit",
                ),
            )
            return


def _built_alike(record: Record, ranks: Sequence[int]) -> bool:
    facts = record.spec.facts
    return facts is not None and all(record.ranks[r].built == facts.weights for r in ranks)


def _by_step(record: Record, key: str) -> dict[tuple[str, int], dict[int, list[str]]]:
    out: dict[tuple[str, int], dict[int, list[str]]] = {}
    for rank, held in record.ranks.items():
        for where, info in held.info.items():
            out.setdefault(where, {})[rank] = info.get(key, [])
    return out


def missing_wait(record: Record, *, failed_again: bool) -> Diagnosis | None:
    """An operation that the step ended without waiting for, or whose tensors it touches before.
    failed_again: whether the repeated step, whose operations were late, gave wrong gradients."""
    told = {key: _said_first(record, key) for key in ("races", "written", "read_early")}
    if (found := told["races"]) is not None:
        ranks, (text, *_) = found
        cause = f"nobody waits for {text} before the step ends: what it gives may not be there yet"
        why = "the step ended while this operation was neither waited for nor a future of anybody"
    elif (found := told["written"]) is not None:
        ranks, (text, *_) = found
        cause = f"a tensor of {text} is written before this is waited for"
        why = (
            "what it takes or gives was another when it was waited for than when it was issued, "
            "and the operation was carried out on copies"
        )
    elif failed_again and (found := told["read_early"]) is not None:
        ranks, texts = found
        of_several = "what one of these gives" if len(texts) > 1 else "what it gives"
        cause = f"{of_several} is read before it is waited for: {some_of(texts)}"
        why = (
            "the last step was run again: with what operations give at their wait, and no "
            "sooner, its gradients are others; and as it is, twice the same as before, bit by bit"
        )
    else:
        return None
    return Diagnosis(
        cause=cause, kind="missing_wait", standing="proved", ranks=ranks, because=(why,)
    )


def _said_first(record: Record, key: str) -> tuple[tuple[int, ...], list[str]] | None:
    """What the first rank that says so of operations says of which, and all ranks that say so."""
    said = {
        rank: [text for info in held.info.values() for text in info.get(key, ())]
        for rank, held in record.ranks.items()
    }
    ranks = tuple(rank for rank, texts in said.items() if texts)
    return (ranks, list(dict.fromkeys(said[ranks[0]]))) if ranks else None


def run_to_run(again: Sequence[TensorDiff]) -> Diagnosis:
    """The repeated step gave something else."""
    other = [d for d in again if d.status == "fail"]
    names = {d.name for d in other}
    alike = {d.name for d in again} - names
    because = ["the last step was run twice in the same processes, and the two differ by more than "
               "the threshold"]  # fmt: skip
    if alike:
        because.append(f"{some_of(sorted(alike))} is the same both times")
    return Diagnosis(
        cause=f"the same step on the same weights and batch gives another gradient when it is run "
        f"again: {_on_which_ranks(other)}",
        kind="run_to_run",
        standing="proved",
        ranks=tuple(sorted({d.rank for d in other})),
        because=tuple(because),
        however=(
            "random numbers drawn unseeded, a race, memory that is not filled (torch.empty) and "
            "state carried over, as in a buffer of gradients that is not zeroed, look the same",
        ),
    )


def incomparable(record: Record, diffs: Sequence[TensorDiff]) -> Iterator[Diagnosis]:
    """Gradients that are missing or not finite, and contributions that were so already."""
    bad = [d for d in diffs if d.status == "fail" and not d.comparable]
    for kind, mine in (
        ("missing", [d for d in bad if not d.index]),
        ("not_finite", [d for d in bad if d.index]),
    ):
        if mine:
            ranks, names = tuple(sorted({d.rank for d in mine})), [d.name for d in mine]
            yield Diagnosis(
                cause=f"{_on_which_ranks(mine)}: {mine[0].reason}",
                kind=kind,
                standing="proved",
                ranks=ranks,
                because=(
                    f"{len(mine)} tensors of {len(diffs)} could not be compared",
                    *_sources(record, mine[0]),
                    *(never_called(record, names) if kind == "missing" else ()),
                    *(_own_backwards(record, mine) if kind == "missing" else ()),
                ),
            )


def _on_which_ranks(bad: Sequence[TensorDiff]) -> str:
    """`a.weight, a.bias on rank 1; b.weight on rank 0`."""
    ranks: dict[str, set[int]] = {}
    for d in bad:
        ranks.setdefault(d.name, set()).add(d.rank)
    names: dict[tuple[int, ...], list[str]] = {}
    for name, own in ranks.items():
        names.setdefault(tuple(sorted(own)), []).append(name)
    told = [f"{some_of(held)} on rank {spans(own)}" for own, held in names.items()]
    more = [f"{len(told) - MOST_GROUPS} more such groups"] if len(told) > MOST_GROUPS else []
    return "; ".join([*told[:MOST_GROUPS], *more])


def _own_backwards(record: Record, bad: Sequence[TensorDiff]) -> list[str]:
    """On which ranks the backward gave it one, where it did on some."""
    traces = record.traces.ranks if record.traces is not None else {}
    for d in bad:
        gave = [rank for rank, trace in traces.items() if d.name in trace.own]
        if gave and d.rank not in gave:
            return [f"the backward of rank {spans(gave)} gives {d.name} one, that of rank {d.rank} "
                    f"gives it none: what a rank does not use must still take part in what is "
                    f"summed over ranks"]  # fmt: skip
    return []


def _sources(record: Record, diff: TensorDiff) -> list[str]:
    """Contributions that were not finite before their reduction."""
    return [
        f"the contribution {digest['edge']} on rank {rank} (unit {digest['unit']}) is not finite "
        f"before its reduction"
        for rank, held in sorted(record.ranks.items())
        for digest in held.info.get((diff.tier, diff.step), {}).get("digests", ())
        if not math.isfinite(digest["norm"])
    ][:3]
