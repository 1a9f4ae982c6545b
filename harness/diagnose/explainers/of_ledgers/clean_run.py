"""The first operation of a failed step that differs from a run that passed.

Ledgers hold digests of what goes into an operation and of what comes out. Walked side by side with
those of a clean run of the same Program, topology, seed and weights, they show where the two part:
at an operation that is missing, repeated or of another kind, at one rank's input, or between an
operation whose result is right and a later one that did not get it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sumgrad.base.outcome import describe_operation, some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained, fitted, in_the_gradients
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.reductions import reductions_of
from sumgrad.judge.joint import describe, fed
from sumgrad.ledger.operations import Operation, members, number_operations
from sumgrad.record.directory import Record

FIELDS = {"dtype": "low_precision", "group": "wrong_group", "reduce": "avg"}  # -> kind of cause
PARTLY_REDUCED = ("skipped_collective", "late_gradient")  # kinds of cause that numbers alone give
ORDER = {"missing": 0, "repeated": 0, "dtype": 1, "group": 1, "reduce": 1, "input": 2, "output": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where one rank's ledger first differs from the clean one.

    what: missing, repeated, a field, input or output; now, then: the operation here and there;
    before: the last one that is the same.
    """

    rank: int
    place: int
    what: str
    now: Operation | None
    then: Operation | None
    before: Operation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A cause from the ledgers. structural: an operation itself differs, or one rank's input does;
    otherwise only what flows between operations, which any fault upstream may have changed."""

    diagnosis: Diagnosis
    structural: bool


def changed_operation(case: Case, left: Left) -> Iterator[Explanation]:
    """An operation that is not as in a run that passed."""
    parted = _parted(case)
    if parted is not None and parted.structural:
        yield _explained(case, parted)


def zeros_put_in(case: Case, left: Left) -> Iterator[Explanation]:
    """A rank that puts zeros in where it put numbers in a run that passed: before its rows, which
    count on no rank then, are told for themselves."""
    parted = _parted(case)
    if parted is not None and parted.diagnosis.kind == "lost_contribution":
        yield _explained(case, parted)


def which_step_it_is(case: Case, left: Left) -> Iterator[Explanation]:
    """Which operation is not as in a run that passed, where the numbers alone say that a reduction
    is missing, partial or late: they are the same of one that is issued and of no use."""
    found = fitted(case)
    if found is None or found[0].kind not in PARTLY_REDUCED:
        return
    parted = _parted(case)
    if parted is not None and (parted.structural or parted.diagnosis.kind == "unused_result"):
        yield _explained(case, parted)


def _given_up(case: Case, clean: Record) -> Difference | None:
    """Reductions that are as in a run that passed, and that made there what is wrong here and do
    not make it now: nothing comes after them whose input would tell."""
    wrong = {(cell.rank, cell.name) for cell in case.failing_cells}
    made = _made_by_place(clean, case)
    makes = _made_by_place(case.record, case)
    lost = {at: (names - makes.get(at, set())) & {n for rank, n in wrong if rank == at[0]}
            for at, names in made.items()}  # fmt: skip
    if {(rank, name) for (rank, _), names in lost.items() for name in names} != wrong:
        return None
    operations = _operations(case.record, case.tier, case.step)
    numbers = {(r, operations[r][place].event["n"]) for (r, place), names in lost.items() if names}
    given = {
        describe(case.record, joint): None
        for joint in reductions_of(case)
        if numbers & {(rank, event["n"]) for rank, event in joint.events.items()}
    }
    what = some_of(list(dict.fromkeys(cell.name for cell in case.failing_cells)))
    diagnosis = Diagnosis(
        cause=f"what {some_of([*given])} {'give' if len(given) > 1 else 'gives'} is right, and the "
        f"step does not end with it in {what}: it is not used, read too early or changed later",
        kind="unused_result",
        ranks=tuple(sorted({rank for rank, _ in wrong})),
        because=("every operation is as in a run that passed, where the gradient is its result",),
    )
    return Difference(structural=False, diagnosis=diagnosis)


def _made_by_place(record: Record, case: Case) -> dict[tuple[int, int], set[str]]:
    """(rank, place in its ledger of the step) -> the gradients that are that operation's result.

    Not by its number, which counts those of other tiers too, and these may differ."""
    feeds = fed(record, case.tier, case.step)
    return {
        (rank, place): set(feeds.get((rank, operation.event["n"]), ()))
        for rank, operations in _operations(record, case.tier, case.step).items()
        for place, operation in enumerate(operations)
    }


def changed_values(case: Case, left: Left) -> Iterator[Explanation]:
    """Values that are not as in a run that passed, whatever changed them."""
    parted = _parted(case)
    if parted is not None:
        yield _explained(case, parted)


def _parted(case: Case) -> Difference | None:
    if "parted" not in case.known:
        case.known["parted"] = (
            None
            if case.has_plan or case.clean is None
            else first_difference(case.record, case.clean, case.tier, case.step)
            or _given_up(case, case.clean)
        )
    found: Difference | None = case.known["parted"]
    return found


def _explained(case: Case, parted: Difference) -> Explanation:
    found = parted.diagnosis
    return explained(case, replace(found, because=(*found.because, *in_the_gradients(case))))


def first_difference(record: Record, clean: Record, tier: str, step: int) -> Difference | None:
    """The first parting of the ledgers, in words; None if they are the same."""
    now, then = _operations(record, tier, step), _operations(clean, tier, step)
    found = [
        parting
        for rank in sorted(set(now) & set(then))
        for parting in [_part(now[rank], then[rank], rank)]
        if parting is not None
    ]
    if not found:
        return None
    first = min(found, key=lambda p: (ORDER.get(p.what, 9), p.place, p.rank))
    same = [p for p in found if (p.what, p.place) == (first.what, first.place)]
    return _words(first, same, step)


def _operations(record: Record, tier: str, step: int) -> dict[int, list[Operation]]:
    topology = record.spec.topology
    return {
        rank: number_operations(topology, rank, held.events.get((tier, step), []))
        for rank, held in record.ranks.items()
    }


def _part(now: Sequence[Operation], then: Sequence[Operation], rank: int) -> Parting | None:
    counts = [_count(ops) for ops in (now, then)]
    for stream in dict.fromkeys([*counts[1], *counts[0]]):
        here, there = counts[0].get(stream, 0), counts[1].get(stream, 0)
        if here == there or _moved(stream, counts):
            continue
        place = next((i for i, (a, b) in enumerate(zip(now, then, strict=False))
                      if _unlike(a, b)), min(len(now), len(then)))  # fmt: skip
        longer = now if here > there else then
        of_it = [o for o in longer if o.stream == stream]
        at = next((o for o in longer[place:] if o.stream == stream), of_it[-1])
        return Parting(
            rank=rank,
            place=place,
            what="missing" if here < there else "repeated",
            now=at,
            then=at,
            before=None,
        )
    before: Operation | None = None
    for i, (a, b) in enumerate(zip(now, then, strict=False)):
        what = _unlike(a, b)
        if what is not None:
            return Parting(rank=rank, place=i, what=what, now=a, then=b, before=before)
        before = a
    return None


def _count(operations: Sequence[Operation]) -> dict[str, int]:
    out: dict[str, int] = {}
    for operation in operations:
        out[operation.stream] = out.get(operation.stream, 0) + 1
    return out


def _moved(stream: str, counts: Sequence[Mapping[str, int]]) -> bool:
    """Whether as many of its family were issued over other groups: the group differs, no number."""
    family = stream.partition("@")[0]
    totals = [sum(n for s, n in c.items() if s.partition("@")[0] == family) for c in counts]
    return totals[0] == totals[1]


def _unlike(a: Operation, b: Operation) -> str | None:
    for key in (*FIELDS, "input", "output"):
        if a.event.get(key) != b.event.get(key):
            return key
    return None


def _words(first: Parting, same: Sequence[Parting], step: int) -> Difference:
    ranks = tuple(p.rank for p in same)
    op = first.now or first.then
    assert op is not None
    shown = describe_operation(op.event)
    because: tuple[str, ...] = (
        f"everything before it on rank {spans(ranks)} is as in a run that passed",
    )
    if first.what == "missing":
        kind, cause = "skipped_collective", f"one {op.stream} is missing: {shown}"
    elif first.what == "repeated":
        kind, cause = "double_reduction", f"one {op.stream} is issued once more: {shown}"
    elif first.what in FIELDS:
        assert first.then is not None
        kind = FIELDS[first.what]
        cause = f"{shown}; a run that passed has {describe_operation(first.then.event)}"
    elif first.what == "input" and _some_members(first, same):
        kind, cause = "changed_input", f"rank {spans(ranks)} puts other values into {shown}"
        if step:
            kind, cause = "stale_buffer", f"{cause}; step 0 was right: something is carried over"
        elif op.event.get("nonzero") is False:
            kind, cause = "lost_contribution", f"rank {spans(ranks)} puts zeros into {shown}"
        else:
            because = (*because, *_or_not_received(first))
    elif first.what == "input" and first.before is not None:
        before = describe_operation(first.before.event)
        return Difference(
            structural=False,
            diagnosis=Diagnosis(
                cause=f"the result of {before} is right and does not reach what follows: it is "
                f"not used, or read too early",
                kind="unused_result",
                ranks=ranks,
                because=(*because, f"the next operation gets other values: {shown}"),
            ),
        )
    else:
        return Difference(
            structural=False,
            diagnosis=Diagnosis(
                cause=f"other values go through {shown} than in a run that passed",
                kind="wrong_result" if first.what == "output" else "unused_result",
                ranks=ranks,
                because=because,
            ),
        )
    return Difference(
        structural=True, diagnosis=Diagnosis(cause=cause, kind=kind, ranks=ranks, because=because)
    )


def _or_not_received(first: Parting) -> tuple[str, ...]:
    """The other way to these values, where the operation before gave something to use."""
    before = first.before
    if before is None or before.event.get("output") is None:
        return ()
    shown = describe_operation(before.event)
    return (f"or the result of {shown}, which is right, is not used there, or read too early",)


def _some_members(first: Parting, same: Sequence[Parting]) -> bool:
    """Whether, in every group, one member alone puts other values into this collective.

    What a rank sends is always its own, and says nothing.
    """
    op = first.now
    if op is None or op.family == "send":
        return False
    groups: dict[tuple[int, ...], set[int]] = {}
    for parting in same:
        if parting.now is not None:
            groups.setdefault(members(parting.now.event), set()).add(parting.rank)
    return all(len(mine) == 1 < len(ranks) for ranks, mine in groups.items())
