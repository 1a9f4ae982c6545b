"""Why a Program's gradient is wrong: recovered coefficients and the ledger, put into words.

Detecting is done; this only explains. First what a record says outright, then one explanation for
all ranks, then one for each rank, then what the ledger shows, then, if a clean run is at hand, the
first operation that differs from it. What none of them explains is called not a weighting bug.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from sumgrad.compare import TensorDiff
from sumgrad.fit import as_fraction
from sumgrad.ledger_checks import (
    Joint,
    carries,
    describe,
    fed,
    identical,
    joint_operations,
    prescaled,
    sizes_of,
)
from sumgrad.operations import REDUCTIONS, group_name
from sumgrad.outcome import spans
from sumgrad.program_compare import Cell, cells
from sumgrad.program_fit import CLOSE, Explanation, FailedStep, Unit, explain
from sumgrad.program_names import (
    block_counts,
    factor_symbols,
    list_rows,
    mean_of_means,
    own_parts,
    power_of,
)
from sumgrad.program_record import ProgramRecord
from sumgrad.trace import first_difference
from sumgrad.verdict import Diagnosis, RecoveredCoefficient

NARROW = ("bfloat16", "float16")
# Numbers without a reason: what the ledger or a clean run shows goes first.
GENERIC = (
    "factor", "row_factors", "param_factors", "term_factor", "local_count", "not_weighting",
    "skipped_collective", "unused_result",
)  # fmt: skip
MAX_NAMED = 3
Found = tuple[tuple[Diagnosis, ...], tuple[RecoveredCoefficient, ...]]


def diagnose_program(
    record: ProgramRecord,
    diffs: Sequence[TensorDiff],
    again: Sequence[TensorDiff],
    *,
    clean: ProgramRecord | None = None,
) -> Found:
    """Causes and coefficients; empty for a run that passes. clean: a stored run that passed."""
    outright = [*_other_weights(record), *_incomparable(diffs)]
    failed = [d for d in diffs if d.status == "fail"]
    if not failed:
        if any(d.status == "fail" for d in again):
            outright.append(_run_to_run(again))
        return tuple(outright), ()
    case = failed_step(record, failed)
    if outright and outright[0].kind == "other_weights":
        return tuple(outright), ()
    found = _uniform(case) or _divergent(case) or _by_parameter(case)
    coefficients = tuple(_coefficients(case, found[1])) if found else ()
    reason = _reason(case, found[0] if found else None, diffs, again, clean)
    if reason is None and outright:
        return tuple(outright), ()
    return (reason or _unexplained(case), *outright), coefficients


def _reason(
    case: FailedStep,
    found: Diagnosis | None,
    diffs: Sequence[TensorDiff],
    again: Sequence[TensorDiff],
    clean: ProgramRecord | None,
) -> Diagnosis | None:
    """The cause: what the numbers say, unless they only say how much and a ledger says why."""
    if found is not None and found.kind not in GENERIC:
        return found
    parted = first_difference(case.record, clean, case.tier, case.step) if clean else None
    why = parted.diagnosis if parted is not None and parted.structural else None
    why = why or _from_ledger(case)
    if why is None and found is None and _differs(diffs, again):
        why = _run_to_run(again)
    if why is None and found is None and parted is not None:
        why = parted.diagnosis
    if why is None and found is not None and found.kind in ("local_count", "row_factors"):
        why = parted.diagnosis if parted is not None else None
    if why is not None and found is not None:
        return replace(why, because=(*why.because, f"in the gradients: {found.cause}"))
    return why or found


def failed_step(record: ProgramRecord, failed: Sequence[TensorDiff]) -> FailedStep:
    """The first failing step of the first failing tier."""
    tier = next(t for t in record.spec.tiers if any(d.tier == t for d in failed))
    step = min(d.step for d in failed if d.tier == tier)
    references = record.references[tier]
    return FailedStep(
        record=record,
        tier=tier,
        step=step,
        reference=references[step],
        previous=references[step - 1] if step else None,
        cells=tuple(cells(record, tier, references[step])),
    )


# ---- what a record says outright -----------------------------------------------------------------


def _other_weights(record: ProgramRecord) -> Iterator[Diagnosis]:
    for (tier, step), names in _by_step(record, "other_weights").items():
        ranks = [r for r, n in names.items() if n]
        if ranks and all(record.ranks[r].built == record.spec.facts.weights for r in ranks):
            yield Diagnosis(
                cause=f"rank {spans(ranks)} starts from other weights than build() gives: the "
                f"replicas are not one model",
                kind="other_weights",
                ranks=tuple(ranks),
                because=(
                    f"before step {step} of tier {tier} its values of {names[ranks[0]][0]} are "
                    f"not the reference's, bit by bit",
                ),
            )
            return


def _by_step(record: ProgramRecord, key: str) -> dict[tuple[str, int], dict[int, list[str]]]:
    out: dict[tuple[str, int], dict[int, list[str]]] = {}
    for rank, held in record.ranks.items():
        for where, info in held.info.items():
            out.setdefault(where, {})[rank] = info[key]
    return out


def _incomparable(diffs: Sequence[TensorDiff]) -> Iterator[Diagnosis]:
    """Gradients that are missing or not finite."""
    for kind, bad in (
        ("missing", [d for d in diffs if d.status == "fail" and not d.comparable and not d.index]),
        ("not_finite", [d for d in diffs if d.status == "fail" and not d.comparable and d.index]),
    ):
        if bad:
            names = list(dict.fromkeys(d.name for d in bad))
            ranks = tuple(sorted({d.rank for d in bad}))
            yield Diagnosis(
                cause=f"{_some(names)} on rank {spans(ranks)}: {bad[0].reason}",
                kind=kind,
                ranks=ranks,
                because=(f"{len(bad)} tensors of {len(diffs)} could not be compared",),
            )


def _differs(diffs: Sequence[TensorDiff], again: Sequence[TensorDiff]) -> bool:
    """Whether the repeated step missed the reference by something else than the first."""
    if not again:
        return False
    last = max(d.step for d in again)
    first = {(d.tier, d.rank, d.name): d for d in diffs if d.step == last}
    for d in again:
        other = first.get((d.tier, d.rank, d.name))
        if other is not None and d.comparable and other.comparable:
            if abs(d.l2_rel - other.l2_rel) > 1e-6 * max(d.l2_rel, other.l2_rel, 1e-6):
                return True
    return False


def _run_to_run(again: Sequence[TensorDiff]) -> Diagnosis:
    ranks = tuple(sorted({d.rank for d in again if d.status == "fail"}))
    return Diagnosis(
        cause="the same step on the same weights and batch gives another gradient each time",
        kind="run_to_run",
        ranks=ranks,
        because=(
            "the last step was run twice in the same processes, and the two differ by more than "
            "the threshold",
        ),
        however=("random numbers drawn unseeded, a race, and state carried over look the same",),
    )


# ---- one explanation for all ranks ---------------------------------------------------------------


def _uniform(case: FailedStep) -> tuple[Diagnosis, list[tuple[tuple[int, ...], Explanation]]] | None:
    failing = case.failing()
    found = explain(case, failing)
    if found is None:
        return None
    names = list(dict.fromkeys(cell.name for cell in failing))
    ranks = tuple(sorted({cell.rank for cell in failing}))
    if found.level == "everything" and _others_are_right(case, failing):
        return _rank_scale(dict.fromkeys(ranks, found), names), [(ranks, found)]
    if found.level == "everything":
        diagnosis = _one_factor(case, found.values[0], found.sigmas[0], names)
    elif found.level == "params":
        sizes = sizes_of(case.record)
        if None in {power_of(v, sizes) for v in found.known}:
            return None
        diagnosis = _factor_by_param(case, found)
    elif found.level in ("terms", "cells") and all(u.rows is None for u in found.units):
        diagnosis = _factor_by_term(case, found, names)
    elif found.level == "previous":
        diagnosis = _stale(case, found, names)
    else:
        diagnosis = _factor_by_rows(case, found, names)
    return replace(diagnosis, ranks=diagnosis.ranks or ranks), [(ranks, found)]


def _others_are_right(case: FailedStep, failing: Sequence[Cell]) -> bool:
    """Whether other ranks hold the same elements of the same parameters, and hold them right."""
    ranks = {cell.rank for cell in failing}
    if len(ranks) == 1 < len({cell.rank for cell in case.cells}):
        return True
    wrong = {(cell.name, _place(cell)) for cell in failing}
    return any(
        (cell.name, _place(cell)) in wrong and cell.rank not in ranks for cell in case.cells
    )


def _place(cell: Cell) -> tuple[int, ...]:
    return () if cell.index is None else tuple(cell.index.reshape(-1).tolist())


def _one_factor(
    case: FailedStep, value: float | None, sigma: float | None, names: Sequence[str]
) -> Diagnosis:
    assert value is not None
    fraction = as_fraction(value, sigma)
    shown = str(fraction) if fraction is not None else f"{value:.9g}"
    whole = len(names) == len(case.record.spec.facts.params)
    what = "every gradient" if whole else _some(names)
    fits = f"{what} is the reference's times {shown} on all ranks, within the threshold"
    record, sizes = case.record, sizes_of(case.record)
    for joint in _reductions(case):
        if not set(_carried(case, joint)) & set(names):
            continue
        size, words = len(joint.ranks), describe(record, joint)
        symbol = f"1/{group_name(record.spec.topology, joint.ranks)}"
        if joint.first.get("reduce") == "AVG" and abs(value * size - 1) < CLOSE:
            return _avg(f"{words} averages (AVG) where the law sums", shown, symbol, fits, joint)
        scaled = prescaled(joint, sizes)
        if scaled and abs(scaled[0] - value) < CLOSE:
            text = f"its gradients enter {words} already multiplied by {scaled[0]:.6g}"
            return _avg(f"{text}, which makes the SUM an average", shown, symbol, fits, joint)
        if identical(joint) and abs(value - size) < CLOSE * size:
            return Diagnosis(
                cause=f"{words} sums what is already whole on every rank: it is counted {size} times",
                kind="double_reduction",
                ranks=joint.ranks,
                factor=shown,
                symbol=group_name(record.spec.topology, joint.ranks),
                because=(fits, f"its inputs are the same bits on all {size} ranks"),
            )
    counted = _count_counted(case, value, shown, fits)
    if counted is not None:
        return counted
    symbols = factor_symbols(case, value)
    named = f" = {symbols[0]}" if symbols else ""
    return Diagnosis(
        cause=f"{what} is multiplied by {shown}{named}",
        kind="factor",
        factor=shown,
        symbol=symbols[0] if symbols else None,
        also=tuple(symbols[1:4]),
        because=(fits, "the ledger shows neither an average nor a repeated reduction of it"),
        however=("other sizes give the same number; unequal sizes separate them",)
        if len(symbols) > 1
        else (),
    )


def _count_counted(case: FailedStep, value: float, shown: str, fits: str) -> Diagnosis | None:
    """A reduction of something that all gradients are divided by: repeated, or averaged."""
    for joint in _reductions(case):
        size, words = len(joint.ranks), describe(case.record, joint)
        if size < 2 or _carried(case, joint):
            continue
        axis = group_name(case.record.spec.topology, joint.ranks)
        if identical(joint) and abs(value * size - 1) < CLOSE:
            return Diagnosis(
                cause=f"{words} sums what is already whole; every gradient is divided by it",
                kind="double_reduction",
                ranks=joint.ranks,
                factor=shown,
                symbol=f"1/{axis}",
                because=(fits, f"its inputs are the same bits on all {size} ranks"),
            )
        if joint.first.get("reduce") == "AVG" and abs(value - size) < CLOSE * size:
            cause = f"{words} averages a count that every gradient is divided by"
            return _avg(cause, shown, axis, fits, joint)
    return None


def _avg(cause: str, shown: str, symbol: str, fits: str, joint: Joint) -> Diagnosis:
    return Diagnosis(
        cause=cause,
        kind="avg",
        ranks=joint.ranks,
        factor=shown,
        symbol=symbol,
        because=(fits, f"the ledger shows {joint.first.get('reduce')} at {joint.site}"),
    )


def _factor_by_param(case: FailedStep, found: Explanation) -> Diagnosis:
    sizes = sizes_of(case.record)
    powers = {
        name: power_of(value, sizes)
        for name, value in zip(found.params, found.values, strict=True)
        if value is not None
    }
    bases = {base for base, _ in filter(None, powers.values())}
    shown = ", ".join(
        f"{name} {value:.6g}" for name, value in list(zip(found.params, found.values, strict=True))[:4]
    )
    if None not in powers.values() and len(bases) == 1:
        base = bases.pop()
        depths = {name: p[1] for name, p in powers.items() if p}
        return Diagnosis(
            cause=f"gradients are multiplied by powers of {base}, by how many collectives lie "
            f"between the parameter and the loss: a backward that reduces once too often or rarely",
            kind="depth_factor",
            factor=None,
            symbol=f"{base}^k",
            because=tuple(f"{name}: {base}^{k}" for name, k in list(depths.items())[:6]),
        )
    return Diagnosis(
        cause=f"each parameter has a factor of its own: {shown}",
        kind="param_factors",
        because=("with one factor for each parameter the residual is under the threshold",),
        however=("no size of the topology and none of its powers gives these factors",),
    )


def _factor_by_term(case: FailedStep, found: Explanation, names: Sequence[str]) -> Diagnosis:
    odd = [
        (unit.term, value, sigma)
        for unit, value, sigma in zip(found.units, found.values, found.sigmas, strict=True)
        if value is not None and abs(value - 1) > CLOSE
    ]
    if not odd:
        return _unexplained(case)
    term, value, sigma = odd[0]
    fraction = as_fraction(value, sigma)
    shown = str(fraction) if fraction is not None else f"{value:.9g}"
    symbols = factor_symbols(case, value)
    lost = abs(value) < CLOSE
    more = f" (and {len(odd) - 1} more terms)" if len(odd) > 1 else ""
    named = f" = {symbols[0]}" if symbols and not lost else ""
    return Diagnosis(
        cause=f"{term} never reaches {_some(names)}: it is not in the graph, or dropped{more}"
        if lost
        else f"{term} is counted {shown}{named} times{more}; the other terms are right",
        kind="term_factor",
        term=term,
        factor=shown,
        symbol=symbols[0] if symbols and not lost else None,
        also=tuple(symbols[1:4]) if not lost else (),
        because=("with one factor for each term the residual is under the threshold",),
    )


def _stale(case: FailedStep, found: Explanation, names: Sequence[str]) -> Diagnosis:
    rows = [u.rows for u in found.counted(1) if u.previous and u.rows]
    which = f"rows {list_rows(rows)}" if rows else "part"
    return Diagnosis(
        cause=f"{_some(names)} still holds {which} of the step before: a buffer that is not zeroed, "
        f"not a weighting bug",
        kind="stale_buffer",
        because=(
            "the reference of this step plus those rows' partials at the previous step's weights "
            "is the measured gradient",
        ),
    )


def _factor_by_rows(case: FailedStep, found: Explanation, names: Sequence[str]) -> Diagnosis:
    what = _some(names)
    fits = "with one factor for each row interval the residual is under the threshold"
    means = mean_of_means(case, found)
    if means == 0:
        return Diagnosis(
            cause=f"{what} is a sum of means: every part is divided by its own count, not by the "
            f"global one",
            kind="local_count",
            symbol="N/n_part",
            because=(fits, "each part's factor times its count is the total count"),
        )
    if means is not None:
        return Diagnosis(
            cause=f"{what} is a mean of {means} means: every part is divided by its own count, and "
            f"the parts are averaged",
            kind="mean_of_means",
            symbol="N/(parts*n_part)",
            because=(
                fits,
                "each part's factor times its count is the same number, total count / parts",
            ),
        )
    lost = [u.rows for u in found.counted(0) if u.rows]
    others = [v for v in found.known if abs(v) >= CLOSE]
    if lost and all(abs(v - 1) < CLOSE for v in others):
        empty = _empty_handed(case, names)
        if empty is not None:
            return Diagnosis(
                cause=f"rank {spans(empty[0])} contributes zeros to {empty[1]}, so rows "
                f"{list_rows(lost)} never reach {what}",
                kind="lost_contribution",
                ranks=tuple(empty[0]),
                factor="0",
                because=(fits, "the ledger shows its input as zeros while the others' are not"),
            )
        calls = max((h.info[case.tier, case.step]["backwards"] for h in case.record.ranks.values()
                     if (case.tier, case.step) in h.info), default=0)  # fmt: skip
        why = f": one of {calls} backward calls was overwritten" if calls > 1 else ""
        return Diagnosis(
            cause=f"rows {list_rows(lost)} never reach {what}{why}",
            kind="lost_rows",
            factor="0",
            because=(fits, "their factor is 0 and that of all other rows is 1"),
        )
    odd = {
        u.rows: v
        for u, v in zip(found.units, found.values, strict=True)
        if v is not None and u.rows and abs(v - 1) > CLOSE
    }
    first = next(iter(odd.values()), None)
    if first is not None and all(abs(v - first) < CLOSE for v in odd.values()):
        by = _scaled_by(case, first)
        where = f", which is what rank {spans(by)} sends" if by else ""
        symbols = factor_symbols(case, first)
        named = f" = {symbols[0]}" if symbols else ""
        return Diagnosis(
            cause=f"rows {list_rows(list(odd))} are counted {first:.9g}{named} times in {what}{where}",
            kind="rank_factor",
            ranks=tuple(by),
            factor=f"{first:.9g}",
            symbol=symbols[0] if symbols else None,
            because=(fits, "all other rows are counted once"),
        )
    return Diagnosis(
        cause=f"the rows are counted differently in {what}: {block_counts(found)}",
        kind="row_factors",
        because=(fits,),
    )


# ---- one explanation for each rank ---------------------------------------------------------------


def _divergent(
    case: FailedStep,
) -> tuple[Diagnosis, list[tuple[tuple[int, ...], Explanation]]] | None:
    failing = case.failing()
    if len({cell.rank for cell in case.cells}) < 2:
        return None
    names = list(dict.fromkeys(cell.name for cell in failing))
    by_rank = _by_rank(failing, case, mixed=False)
    scales = {f.values[0] for f in by_rank.values() if f.level == "everything"}
    if len(scales) > 1 and all(f.level == "everything" for f in by_rank.values()):
        return _rank_scale(by_rank, names), [((r,), f) for r, f in by_rank.items()]
    for mixed in (False, True) if _mixed(failing) else (False,):
        by_rank = by_rank if not mixed else _by_rank(failing, case, mixed=True)
        zero_one = bool(by_rank) and all(_is_part(f) for f in by_rank.values())
        summed = own_parts(case, names, wrong_only=mixed)
        if zero_one or summed is not None:
            ranks = sorted({cell.rank for cell in failing})
            parts = by_rank if zero_one else {}
            late = _late(parts, names)
            if late is not None:
                return late, [((r,), f) for r, f in parts.items()]
            diagnosis = _missing_reduction(case, names, ranks, mixed, summed, parts)
            return diagnosis, [((r,), f) for r, f in parts.items()]
    return None


def _by_rank(failing: Sequence[Cell], case: FailedStep, *, mixed: bool) -> dict[int, Explanation]:
    """An explanation for every rank; empty if one has none. mixed: of the wrong elements only."""
    out = {}
    for rank in sorted({cell.rank for cell in failing}):
        found = explain(case, [c for c in failing if c.rank == rank], wrong_only=mixed)
        if found is None:
            return {}
        out[rank] = found
    return out


def _late(parts: dict[int, Explanation], names: Sequence[str]) -> Diagnosis | None:
    """Some rows are on every rank, others only on their own: they came after the reduction."""
    once = {r: {u.rows for u in f.counted(1) if u.rows} for r, f in parts.items()}
    if len(once) < 2 or any(f.level != "rows" for f in parts.values()):
        return None
    shared = set.intersection(*once.values())
    own = {rank: rows - shared for rank, rows in once.items()}
    if not shared or not any(own.values()):
        return None
    shown = "; ".join(f"rank {r}: {list_rows(sorted(rows))}" for r, rows in list(own.items())[:3])
    return Diagnosis(
        cause=f"part of {_some(names)} was added after its reduction: some rows are on every rank, "
        f"others only on their own",
        kind="late_gradient",
        ranks=tuple(parts),
        because=(
            f"rows {list_rows(sorted(shared))} are counted once on every rank",
            f"rows counted on one rank alone: {shown}",
        ),
    )


def _is_part(found: Explanation) -> bool:
    """Whether a rank holds some rows once and the others not at all."""
    return found.level in ("rows", "everything") and all(
        min(abs(v), abs(v - 1)) < 1e-5 for v in found.known
    )


def _by_parameter(
    case: FailedStep,
) -> tuple[Diagnosis, list[tuple[tuple[int, ...], Explanation]]] | None:
    """One factor for each parameter, whatever the factors are."""
    failing = case.failing()
    found = explain(case, failing)
    if found is None or found.level != "params":
        return None
    ranks = tuple(sorted({cell.rank for cell in failing}))
    return replace(_factor_by_param(case, found), ranks=ranks), [(ranks, found)]


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


def _rank_scale(by_rank: dict[int, Explanation], names: Sequence[str]) -> Diagnosis:
    shown = ", ".join(f"rank {r}: {f.values[0]:.6g}" for r, f in list(by_rank.items())[:4])
    return Diagnosis(
        cause=f"each rank scales its gradients by a number of its own ({shown}): a norm or a clip "
        f"coefficient that was not reduced over the ranks",
        kind="rank_scale",
        ranks=tuple(by_rank),
        because=("one factor for each rank leaves a residual under the threshold",),
    )


def _missing_reduction(
    case: FailedStep,
    names: Sequence[str],
    ranks: Sequence[int],
    mixed: bool,
    summed: str | None,
    by_rank: dict[int, Explanation],
) -> Diagnosis:
    """Every rank keeps a partial. Which step of the reduction is missing, the ledger tells."""
    what = _some(names)
    because = []
    if summed:
        because.append(f"the ranks' copies of {what} over {summed} add up to the reference")
    for rank, found in list(by_rank.items())[:2]:
        rows = [u.rows for u in found.counted(1) if u.rows]
        if rows:
            because.append(f"rank {rank} holds rows {list_rows(rows)} only")
    kind, cause, evidence = _which_step(case, names, mixed)
    return Diagnosis(
        cause=cause.format(what=what),
        kind=kind,
        ranks=tuple(ranks),
        because=(*because, evidence) if evidence else tuple(because),
        however=("half a buffer may also be one bucket of several",) if kind == "missing_wait" else (),
    )


def _which_step(case: FailedStep, names: Sequence[str], mixed: bool) -> tuple[str, str, str]:
    feeds = fed(case.record, case.tier, case.step)
    reductions = [j for j in _reductions(case) if len(j.ranks) > 1]
    carrying = [j for j in reductions if set(j.gradients()) & set(names)]
    apart = [j for j in _reductions(case) if set(j.gradients()) & set(names)]
    for joint in apart:
        others = [j for j in apart if set(j.gradients()) & set(joint.gradients())]
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
    scattered = [j for j in reductions if j.family == "reduce_scatter"]
    lost = [j for j in carrying or scattered if not _feeds_any(j, feeds)]
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
    return (
        "skipped_collective",
        "{what} is not reduced: every rank keeps its own partial",
        f"it is reduced over {group_name(case.record.spec.topology, carrying[0].ranks)} only"
        if carrying
        else "no reduction in the ledger carries it",
    )


def _left_out(case: FailedStep, names: Sequence[str], carrying: Sequence[Joint]) -> list[int]:
    """Ranks that hold one of these parameters but stand in none of the groups that reduce it."""
    for name in names:
        reached = {r for j in carrying if name in j.gradients() for r in j.ranks}
        holders = {cell.rank for cell in case.cells if cell.name == name and cell.index is None}
        if reached and holders - reached:
            return sorted(holders - reached)
    return []


def _feeds_any(joint: Joint, feeds: dict[tuple[int, int], dict[str, float]]) -> bool:
    return any((rank, event["n"]) in feeds for rank, event in joint.events.items())


# ---- the ledger, and a clean run -----------------------------------------------------------------


def _from_ledger(case: FailedStep) -> Diagnosis | None:
    """What no coefficient explains may still be written in the ledger."""
    record = case.record
    for joint in joint_operations(record, case.tier, case.step):
        words = describe(record, joint)
        if len(joint.ranks) < 2:
            if joint.family in REDUCTIONS and _odd_group(case, joint):
                return _ledger_cause(
                    "wrong_group", f"{words} has a group of one of its members", "", joint
                )
            continue
        dtypes = {str(e["dtype"]) for e in joint.events.values()}
        narrow = dtypes & set(NARROW) if record.spec.tiers[case.tier] not in NARROW else set()
        if narrow:
            return _ledger_cause(
                "low_precision",
                f"{words} runs in {narrow.pop()}",
                f"everything else of the {case.tier} tier is {record.spec.tiers[case.tier]}",
                joint,
            )
        if joint.family in REDUCTIONS:
            if _odd_group(case, joint):
                return _ledger_cause(
                    "wrong_group", f"{words} leaves members of its group out", "", joint
                )
            if joint.first.get("reduce") == "AVG":
                return _ledger_cause("avg", f"{words} averages where others sum", "", joint)
            if identical(joint) and joint.first["numel"] > 1:
                return _ledger_cause(
                    "double_reduction",
                    f"{words} sums the same bits from all its ranks: what is already whole",
                    "",
                    joint,
                )
    return None


def _odd_group(case: FailedStep, joint: Joint) -> bool:
    """Whether one process group appears in the ledger with other members elsewhere."""
    own = str(joint.first.get("pg", ""))
    return any(
        str(other.first.get("pg", "")) == own and set(joint.ranks) < set(other.ranks)
        for other in joint_operations(case.record, case.tier, case.step)
    )


def _ledger_cause(kind: str, cause: str, because: str, joint: Joint) -> Diagnosis:
    return Diagnosis(
        cause=cause,
        kind=kind,
        ranks=joint.ranks,
        because=tuple(filter(None, (f"the ledger shows it at {joint.site}", because))),
        however=("no factors on the terms' partials explain the gradient: it comes through the "
                 "values that ranks exchange",),  # fmt: skip
    )


def _unexplained(case: FailedStep) -> Diagnosis:
    failing = case.failing()
    names = list(dict.fromkeys(cell.name for cell in failing))
    right = [n for n in case.record.spec.facts.params if n not in names]
    worst = max(failing, key=lambda c: float((c.measured - c.wanted.value).abs().max()) / _of(c))
    however = [f"{_some(right)} is right on every rank"] if right else []
    if all(_is_narrow(cell) for cell in failing):
        return Diagnosis(
            cause=f"{_some(names)} has only bfloat16 digits",
            kind="low_precision",
            because=("every element of it is a bfloat16 number",),
            however=tuple(however),
        )
    return Diagnosis(
        cause=f"not a weighting bug: no factors on rows or terms explain {_some(names)}; the "
        f"largest error is in {worst.name} on rank {worst.rank}",
        kind="not_weighting",
        ranks=tuple(sorted({c.rank for c in failing})),
        because=("no fit leaves a residual under the threshold",),
        however=tuple(however),
    )


def _of(cell: Cell) -> float:
    return cell.wanted.size or 1.0


def _is_narrow(cell: Cell) -> bool:
    value = cell.measured
    return bool(torch.equal(value.to(torch.bfloat16).double(), value)) and bool(value.any())


# ---- helpers -------------------------------------------------------------------------------------


def _reductions(case: FailedStep) -> list[Joint]:
    found = joint_operations(case.record, case.tier, case.step)
    return [joint for joint in found if joint.family in REDUCTIONS]


def _carried(case: FailedStep, joint: Joint) -> list[str]:
    return carries(joint, fed(case.record, case.tier, case.step))


def _empty_handed(case: FailedStep, names: Sequence[str]) -> tuple[list[int], str] | None:
    """Ranks whose input to a reduction of these gradients is zeros, while others' is not."""
    for joint in _reductions(case):
        idle = [r for r, e in joint.events.items() if e.get("nonzero") is False]
        if idle and len(idle) < len(joint.events):
            return idle, describe(case.record, joint)
    return None


def _scaled_by(case: FailedStep, factor: float) -> list[int]:
    """Ranks whose own gradients enter a reduction with this factor."""
    out = set()
    for joint in _reductions(case):
        for by_rank in joint.gradients().values():
            out |= {r for r, c in by_rank.items() if abs(c - factor) < CLOSE}
    return sorted(out) if len(out) < len(case.record.ranks) else []


def _coefficients(
    case: FailedStep, found: Sequence[tuple[tuple[int, ...], Explanation]]
) -> Iterator[RecoveredCoefficient]:
    for ranks, explanation in found:
        for i, (unit, value, sigma) in enumerate(
            zip(explanation.units, explanation.values, explanation.sigmas, strict=True)
        ):
            fraction = as_fraction(value, sigma)
            expected = "0" if unit.previous else "1"
            params = explanation.params[i] if explanation.params else "failing"
            yield RecoveredCoefficient(
                params=params,
                ranks=ranks,
                term=_term(unit),
                producer="program",
                rows=unit.rows,
                expected=expected,
                recovered=value,
                sigma=sigma,
                fraction=str(fraction) if fraction is not None else None,
                identifiable=value is not None,
            )


def _term(unit: Unit) -> str:
    name = unit.term or "all terms"
    return f"{name}, previous step" if unit.previous else name


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


