"""One explanation for each rank, in words: a reduction that is missing, partial, late or unused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import looked
from sumgrad.diagnose.explainers.of_factors.uniform import Explained, rank_scale
from sumgrad.diagnose.names import list_rows, own_parts
from sumgrad.diagnose.own_gradients import given_by_ranks
from sumgrad.diagnose.reductions import entered_by, reductions_of
from sumgrad.diagnose.row_fit import Factors, explain_rank
from sumgrad.judge.cells import Cell
from sumgrad.judge.joint import Joint, describe, fed
from sumgrad.ledger.operations import group_name


def divergent_cause(case: Case) -> Explained | None:
    """The cause if each rank holds a part or a multiple of its own; None if not."""
    failing = case.failing_cells
    if len({cell.rank for cell in case.cells}) < 2:
        return None
    names = list(dict.fromkeys(cell.name for cell in failing))
    by_rank = _by_rank(failing, case, mixed=False)
    scales = {f.values[0] for f in by_rank.values() if f.level == "everything"}
    if len(scales) > 1 and all(f.level == "everything" for f in by_rank.values()):
        return rank_scale(case, by_rank, names), [((r,), f) for r, f in by_rank.items()]
    for mixed in (False, True) if _mixed(failing) else (False,):
        by_rank = by_rank if not mixed else _by_rank(failing, case, mixed=True)
        zero_one = bool(by_rank) and all(_is_part(f) for f in by_rank.values())
        summed = own_parts(case, names, wrong_only=mixed)
        if zero_one or summed is not None:
            ranks = sorted({cell.rank for cell in failing})
            parts = by_rank if zero_one else {}
            diagnosis = (
                _lost_everywhere(case, parts, names)
                or _lost_alone(case, parts)
                or _late(parts, names)
            )
            if diagnosis is None:
                if mixed and _are_alike(failing):
                    break  # what is wrong in some elements on all ranks alike is no part of a sum
                whole = _add_up(summed)
                diagnosis = _missing_reduction(case, names, ranks, mixed, whole, parts)
            return diagnosis, [((r,), f) for r, f in parts.items()]
    if case.record.spec.script is not None and _are_given(case, names):
        return None  # what its ranks' own backwards gave tells more
    meant = own_parts(case, names, mean=True)
    if meant is None:
        return None
    # Of losses that are scaled for an average that DDP, or whoever reduces, takes.
    ranks = sorted({cell.rank for cell in failing})
    together = f"have over {meant} the mean that is the reference"
    return _missing_reduction(case, names, ranks, False, (meant, together), {}), []


def _are_given(case: Case, names: Sequence[str]) -> bool:
    """Whether what the ranks' own backwards gave of these was kept, as it is not of parameters that
    were frozen when the watch began."""
    given = given_by_ranks(case)
    return given is not None and any(name in own for own, _ in given.values() for name in names)


def _add_up(over: str | None) -> tuple[str, str] | None:
    return (over, f"over {over} add up to the reference") if over else None


def _lost_everywhere(
    case: Case, parts: Mapping[int, Factors], names: Sequence[str]
) -> Diagnosis | None:
    """Rows that count on no rank, where all ranks hold the same others: no reduction is missing."""
    held = {tuple(sorted(u.rows for u in f.counted(1) if u.rows)) for f in parts.values()}
    everywhere = len(parts) > 1 and {*parts} == {cell.rank for cell in case.cells}
    if not everywhere or len(held) != 1 or not any(held):
        return None
    (kept,) = held
    never = [rows for rows in case.reference.intervals
             if not any(a <= rows[0] and rows[1] <= b for a, b in kept)]  # fmt: skip
    return Diagnosis(
        cause=f"rows {list_rows(never)} count on no rank: {some_of(names)} is the gradient of rows "
        f"{list_rows(kept)} alone",
        kind="lost_rows",
        standing="proved",
        ranks=tuple(parts),
        factor="0",
        because=("every rank holds the same rows once, so it is no reduction that is missing",),
    )


def _by_rank(failing: Sequence[Cell], case: Case, *, mixed: bool) -> dict[int, Factors]:
    """An explanation for every rank; empty if one has none. mixed: of the wrong elements only."""
    out = {}
    for rank in sorted({cell.rank for cell in failing}):
        found = explain_rank(case, [c for c in failing if c.rank == rank], wrong_only=mixed)
        if found is None:
            return {}
        out[rank] = found
    return out


def _lost_alone(case: Case, parts: Mapping[int, Factors]) -> Diagnosis | None:
    """Rows that do not reach parameters that no other rank holds: nothing is to be reduced."""
    failing = case.failing_cells
    holders = Counter(name for _, name in {(c.rank, c.name) for c in case.cells})
    if not parts or any(holders[c.name] > 1 for c in failing):
        return None
    lost = {rank: [u.rows for u in f.counted(0) if u.rows] for rank, f in parts.items()}
    if not all(lost.values()):
        return None
    shown = [
        f"rows {list_rows(rows)} are not in the gradient of "
        f"{some_of([c.name for c in failing if c.rank == rank])}"
        f" on rank {rank}"
        for rank, rows in list(lost.items())[:3]
    ]
    return Diagnosis(
        cause="; ".join(shown),
        kind="lost_rows",
        standing="proved",
        ranks=tuple(parts),
        factor="0",
        because=("all other rows are counted once", "no other rank holds these parameters"),
    )


def _late(parts: dict[int, Factors], names: Sequence[str]) -> Diagnosis | None:
    """Some rows are on every rank, others only on their own: they came after the reduction."""
    once = {r: {u.rows for u in f.counted(1) if u.rows} for r, f in parts.items()}
    if len(once) < 2 or any(f.level != "rows" for f in parts.values()):
        return None
    shared = set.intersection(*once.values())
    own = {rank: rows - shared for rank, rows in once.items()}
    if not shared or not any(own.values()):
        return None
    held: dict[str, list[int]] = {}
    for rank, rows in own.items():
        held.setdefault(list_rows(sorted(rows)), []).append(rank)
    shown = "; ".join(f"rank {spans(ranks)}: {rows}" for rows, ranks in list(held.items())[:3])
    alone = all(len(ranks) == 1 for ranks in held.values())
    how = "was added after its reduction" if alone else "is reduced over fewer ranks than the rest"
    return Diagnosis(
        cause=f"part of {some_of(names)} {how}: some rows are on every rank, others only on "
        f"{'their own' if alone else 'some'}",
        kind="late_gradient",
        standing="proved",
        ranks=tuple(parts),
        because=(
            f"rows {list_rows(sorted(shared))} are counted once on every rank",
            f"rows counted on {'one rank alone' if alone else 'some ranks only'}: {shown}",
        ),
    )


def _is_part(found: Factors) -> bool:
    """Whether a rank holds some rows once and the others not at all."""
    return found.level in ("rows", "everything") and all(
        min(abs(v), abs(v - 1)) < 1e-5 for v in found.known
    )


def _mixed(failing: Sequence[Cell]) -> bool:
    """Whether whole stretches of elements are right beside others that are wrong.

    Zeros that are right on both sides say nothing.
    """
    right = wrong = 0
    for cell in failing:
        error = (cell.measured - cell.wanted.value).abs()
        bad = error > cell.wanted.threshold
        telling = cell.wanted.value.abs() > cell.wanted.threshold
        right += int((~bad & telling).sum())
        wrong += int(bad.sum())
    return right > max(2, wrong // 20)


def _are_alike(failing: Sequence[Cell]) -> bool:
    """Whether every gradient that is wrong is on several ranks, and the same on all of them."""
    by_name: dict[str, list[Cell]] = {}
    for cell in failing:
        by_name.setdefault(cell.name, []).append(cell)
    return all(
        len(cells) > 1
        and all(c.index is None and torch.equal(c.measured, cells[0].measured) for c in cells)
        for cells in by_name.values()
    )


def _missing_reduction(
    case: Case,
    names: Sequence[str],
    ranks: Sequence[int],
    mixed: bool,
    whole: tuple[str, str] | None,
    by_rank: dict[int, Factors],
) -> Diagnosis:
    """Every rank keeps a partial. Which step of the reduction is missing, the ledger tells. whole:
    over which axis the ranks' copies together are the gradient, and how."""
    what = some_of(names)
    because = []
    if whole:
        where = "where they are wrong, " if mixed else ""
        because.append(f"{where}the ranks' copies of {what} {whole[1]}")
    for rank, found in list(by_rank.items())[:2]:
        rows = [u.rows for u in found.counted(1) if u.rows]
        if rows:
            there = "where it is wrong, " if mixed else ""
            because.append(f"{there}rank {rank} holds rows {list_rows(rows)} only")
    if mixed:
        because.append("only some of its elements are wrong: " + _wrong_elements(case, names[0]))
    kind, cause, evidence = which_step(case, names, mixed)
    if kind == "skipped_collective" and whole and not mixed:
        cause = f"{{what}} is not reduced over {whole[0]}: its ranks keep their own partials"
    return Diagnosis(
        cause=cause.format(what=what),
        kind=kind,
        ranks=tuple(ranks),
        because=(*because, evidence) if evidence else tuple(because),
        standing="proved",
        however=("half a buffer may also be one bucket of several",)
        if kind == "missing_wait"
        else (),
    )


def _wrong_elements(case: Case, name: str) -> str:
    cell = next(c for c in case.failing_cells if c.name == name)
    error = (cell.measured - cell.wanted.value).abs().reshape(-1)
    wrong = (error > cell.wanted.threshold).nonzero()[:, 0].tolist()
    return f"{spans(wrong)} of {error.numel()} of {name} on rank {cell.rank}"


def which_step(case: Case, names: Sequence[str], mixed: bool) -> tuple[str, str, str]:
    """Kind, cause and evidence: which step of the reduction of these is missing, by the ledger."""
    feeds = fed(case.record, case.tier, case.step)
    reductions = [j for j in reductions_of(case) if len(j.ranks) > 1]
    carrying = [j for j in reductions if entered_by(case, j) & set(names)]
    apart = [j for j in reductions_of(case) if set(j.gradients()) & set(names)]
    for joint in apart:
        others = [
            j for j in apart if j.site == joint.site and set(j.gradients()) & set(joint.gradients())
        ]
        uneven = len({len(j.ranks) for j in others}) > 1 or len(joint.ranks) == 1
        if uneven and not mixed:
            return (
                "wrong_group",
                f"{{what}} is reduced over ranks {spans(joint.ranks)} only: the group lacks others "
                f"that hold it",
                f"the ledger shows {describe(case.record, joint)}",
            )
    left_out = _left_out(case, names, apart)
    if left_out and not mixed:
        return (
            "wrong_group",
            f"{{what}} is not reduced over rank {spans(left_out)}, which holds it too",
            f"the ledger shows {describe(case.record, apart[0])}",
        )
    topology = case.record.spec.topology
    made = [j for j in reductions if _makes(j, feeds, names)]
    over = group_name(topology, made[0].ranks) if made else ""
    lost = [j for j in carrying if not _makes(j, feeds, names)]
    if mixed and lost:
        return (
            "missing_wait",
            "part of {what} was read before its reduction was done: some elements are reduced, the "
            "others are still the rank's own",
            f"{describe(case.record, lost[0])} carries them, and its result is not what the step "
            f"ends with",
        )
    if lost and not mixed:
        return (
            "unused_result",
            "{what} is reduced, but the step ends with what went in: the result of the collective "
            "is not used",
            f"{describe(case.record, lost[0])} carries it; no gradient is its result",
        )
    if mixed:
        return (
            "skipped_collective",
            "some elements of {what} are not reduced: of these every rank keeps its own partial, "
            "and the others are right",
            f"others are reduced over {over}" if over else _no_reduction(case, reductions, feeds),
        )
    return (
        "skipped_collective",
        "{what} is not reduced over all its ranks: each keeps a part of the sum"
        if over
        else "{what} is not reduced: every rank keeps its own partial",
        f"it is reduced over {over} only" if over else _no_reduction(case, reductions, feeds),
    )


def _no_reduction(
    case: Case, reductions: Sequence[Joint], feeds: Mapping[tuple[int, int], Mapping[str, float]]
) -> str:
    """What the ledger has instead of the reduction of a gradient that nobody reduces."""
    events = [event for joint in reductions for event in joint.events.values()]
    wrong = {cell.name for cell in case.failing_cells}
    made: dict[str, dict[str, None]] = {}
    for joint in reductions:
        for rank, event in joint.events.items():
            right = [name for name in feeds.get((rank, event["n"]), ()) if name not in wrong]
            made.setdefault(describe(case.record, joint), {}).update(dict.fromkeys(right))
    others = {where: names for where, names in made.items() if names}
    if len(others) == 1 and not _come_in_parts(case):
        where, names = next(iter(others.items()))
        return (f"no reduction in the ledger makes it; {where} makes {some_of([*names])}, which "
                f"{'are' if len(names) > 1 else 'is'} right: look at what goes into that, and what "
                f"is left out")  # fmt: skip
    if any(event.get("grads") != [] for event in events):
        return "no reduction in the ledger makes it"
    issued = "none carries that of a parameter" if events else "none is issued"
    return (
        f"no reduction in the ledger makes it, and of all in the step {issued}: if the model is "
        f"wrapped, is its wrapper's own forward called?"
    )


def _come_in_parts(case: Case) -> bool:
    """Whether what reaches some module is right only as a sum over ranks: then its parameters may
    be right to be summed by nobody."""
    look = looked(case)
    return look is not None and any(look.backward(m) == "part" for m in look.modules)


def _left_out(case: Case, names: Sequence[str], carrying: Sequence[Joint]) -> list[int]:
    """Ranks that hold one of these parameters but stand in none of the groups that reduce it."""
    for name in names:
        reached = {r for j in carrying if name in j.gradients() for r in j.ranks}
        holders = {cell.rank for cell in case.cells if cell.name == name and cell.index is None}
        if reached and holders - reached:
            return sorted(holders - reached)
    return []


def _makes(
    joint: Joint, feeds: Mapping[tuple[int, int], Mapping[str, float]], names: Sequence[str]
) -> bool:
    """Whether the step ends with its result as the gradient of one of these."""
    made = {name for rank, e in joint.events.items() for name in feeds.get((rank, e["n"]), ())}
    return not made.isdisjoint(names)
