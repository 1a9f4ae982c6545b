"""One explanation for all ranks, in words: a factor on everything, parameters, terms or rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.clipped_groups import clipped_by_groups
from sumgrad.diagnose.explainers.rows import factor_by_rows
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.names import factor_symbols, list_rows, power_of
from sumgrad.diagnose.reductions import CLOSE, carried_by, reductions_of
from sumgrad.diagnose.row_fit import Factors, by_param, explain
from sumgrad.judge.cells import Cell
from sumgrad.judge.joint import Joint, describe, identical, prescaled, sizes_of
from sumgrad.ledger.operations import group_name
from sumgrad.record.spec import CLIP_EPS, After

CLIP_DIGITS, CLIP_NEAR = 1e-9, 1e-4
DDP_DIVIDES = (
    "DistributedDataParallel divides by its {0} ranks what it sums, unless a hook does otherwise: "
    "multiply the loss by {0}, or register a hook that sums (sumgrad.convention.ddp_sum_hook)"
)
NEITHER = "the ledger shows neither an average nor a repeated reduction of it"
MOST_FACTORS = 4  # of parameters, that are written out
MOST_NUMBERS = 3  # of terms that count otherwise
Explained = tuple[Diagnosis, list[tuple[tuple[int, ...], Factors]]]


def uniform_cause(case: Case) -> Explained | None:
    """The cause if one set of factors explains all failing ranks; None if none does."""
    failing = case.failing_cells
    found = explain(case, failing)
    if found is None:
        return None
    names = list(dict.fromkeys(cell.name for cell in failing))
    ranks = tuple(sorted({cell.rank for cell in failing}))
    if found.level == "everything":
        alone = _others_are_right(case, failing)
        diagnosis = _one_factor(case, found.values[0], found.sigmas[0], names, alone=alone)
        if diagnosis.kind == "factor" and alone:
            diagnosis = rank_scale(case, dict.fromkeys(ranks, found), names)
    elif found.level == "params":
        sizes = sizes_of(case.record)
        if None in {power_of(v, sizes) for v in found.known}:
            return None
        diagnosis = _factor_by_param(case, found)
    elif not found.known:
        return None
    elif found.level in ("terms", "cells") and all(u.rows is None for u in found.units):
        diagnosis = _factor_by_term(case, found, names)
    elif found.level == "previous":
        diagnosis = _stale(case, found, names)
    else:
        diagnosis = factor_by_rows(case, found, names)
        by_name = by_param(case, [cell for cell in failing if cell.measured.numel()])
        if diagnosis.kind == "row_factors" and by_name is not None and _is_shared(by_name):
            rows = f"the same by rows, as other rows reach each: {diagnosis.cause}"
            found, diagnosis = by_name, _factor_by_param(case, by_name)
            diagnosis = replace(diagnosis, because=(*diagnosis.because, rows))
    return replace(diagnosis, ranks=diagnosis.ranks or ranks), [(ranks, found)]


def _is_shared(found: Factors) -> bool:
    """Whether parameters come in groups of one factor each: no number of rows' makes these."""
    often = Counter(round(value, 6) for value in found.known)
    return len(found.known) == len(found.params) and min(often.values(), default=0) > 1


def factors_by_parameter(case: Case) -> Explained | None:
    """One factor for each parameter, whatever the factors are."""
    failing = case.failing_cells
    found = explain(case, failing)
    if found is None or found.level != "params":
        return None
    ranks = tuple(sorted({cell.rank for cell in failing}))
    return replace(_factor_by_param(case, found), ranks=ranks), [(ranks, found)]


def _others_are_right(case: Case, failing: Sequence[Cell]) -> bool:
    """Whether other ranks hold the same elements of the same parameters, and hold them right."""
    ranks = {cell.rank for cell in failing}
    if len(ranks) == 1 < len({cell.rank for cell in case.cells}):
        return True
    wrong = {(cell.name, _place(cell)) for cell in failing}
    return any((cell.name, _place(cell)) in wrong and cell.rank not in ranks for cell in case.cells)


def _place(cell: Cell) -> tuple[int, ...]:
    return () if cell.index is None else tuple(cell.index.reshape(-1).tolist())


def _one_factor(
    case: Case, value: float | None, sigma: float | None, names: Sequence[str], *, alone: bool
) -> Diagnosis:
    """alone: other ranks hold the same and hold it right, so no common count is to blame."""
    assert value is not None
    shown = _fraction_or_number(value, sigma)
    whole = len(names) == len(case.record.spec.params)
    what = "every gradient" if whole else some_of(names)
    fits = f"{what} is the reference's times {shown} on all ranks, within the threshold"
    own = _without_clipping(case, value) if whole and not alone else None
    if own is not None:
        part = as_fraction(own, sigma)
        before = f"{what} is the reference's before it is clipped, times {own:.9g}, on all ranks"
        found = _by_a_reduction(case, names, own, str(part or f"{own:.9g}"), before)
        if found is not None:
            return found
    if whole and not alone:
        clipped = _clipped_otherwise(case, value, shown) or _clipped(case, value, shown, what)
        if clipped is not None:
            return clipped
    found = _by_a_reduction(case, names, value, shown, fits)
    if found is not None:
        return found
    counted = None if alone else _count_counted(case, value, shown, fits)
    if counted is not None:
        return counted
    symbols = factor_symbols(case, value)
    plain = [s for s in symbols if not {*"*/"} & {*s.removeprefix("1/")}]
    # Of some parameters alone, one of several sizes says nothing.
    told = bool(symbols) and (whole or len(plain) < 2)
    others = [s for s in plain if not told or s != symbols[0]][:3] or symbols[1:4]
    named = f", which equals {symbols[0]}" if told else ""
    return Diagnosis(
        cause=f"{what} is multiplied by {shown}{named}",
        kind="factor",
        factor=shown,
        symbol=symbols[0] if told else None,
        also=tuple(symbols[1:4]),
        because=(fits, NEITHER),
        however=(f"{some_of(others)} gives the same number; unequal sizes separate them",)
        if others
        else (),
    )


def _by_a_reduction(
    case: Case, names: Sequence[str], value: float, shown: str, fits: str
) -> Diagnosis | None:
    """A reduction that carried these gradients and makes the factor: by an average, or twice."""
    record, sizes = case.record, sizes_of(case.record)
    for joint in reductions_of(case):
        if not set(carried_by(case, joint)) & set(names):
            continue
        size, words = len(joint.ranks), describe(record, joint)
        symbol = f"1/{group_name(record.spec.topology, joint.ranks)}"
        if joint.first.get("reduce") == "AVG" and abs(value * size - 1) < CLOSE:
            return _avg(f"{words} averages (AVG) where the law sums", shown, symbol, fits, joint)
        scaled = prescaled(joint, sizes)
        if scaled and abs(scaled[0] - value) < CLOSE:
            text = f"the gradients enter {words} already multiplied by {scaled[0]:.6g}"
            found = _avg(f"{text}, which makes the SUM an average", shown, symbol, fits, joint)
            by_ddp = [DDP_DIVIDES.format(size)] * any(r.ddp for r in record.ranks.values())
            return replace(found, because=(*found.because, *by_ddp))
        if identical(joint) and abs(value - size) < CLOSE * size:
            return Diagnosis(
                cause=f"{words} sums what is already whole: it is counted {size} times",
                kind="double_reduction",
                standing="proved",
                ranks=joint.ranks,
                factor=shown,
                symbol=group_name(record.spec.topology, joint.ranks),
                because=(fits, f"its inputs are the same bits on all {size} ranks"),
            )
    return None


def _clipped(case: Case, value: float, shown: str, what: str) -> Diagnosis | None:
    """A factor below 1 that leaves a norm of two digits at most: what clipping to it does.

    torch divides by the norm plus 1e-6; nobody else's factor gives such a number to nine digits.
    """
    norm = case.reference.norm
    if not 0 < value < 1 or not case.exact:
        return None
    for total in (norm + CLIP_EPS, norm):
        limit = value * total
        rounded = float(f"{limit:.1e}")
        if rounded and abs(limit / rounded - 1) < CLIP_DIGITS:
            return Diagnosis(
                cause=f"{what} is clipped inside the step: the global norm is {rounded:g}, the "
                f"reference's is {norm:.6g}",
                kind="clipped",
                factor=shown,
                symbol="max_norm/norm",
                because=(
                    f"every gradient is the reference's times {shown} = {rounded:g}/{norm:.9g} on "
                    f"all ranks, within the threshold",
                ),
                however=("gradients are compared as they are before clipping: end the step "
                         "before it",),
            )  # fmt: skip
    return None


def _declared_clip(case: Case) -> After | None:
    facts = case.record.spec.facts
    after = facts.after if facts is not None else None
    return after if after is not None and after.kind == "clip" else None


def _without_clipping(case: Case, value: float) -> float | None:
    """The factor on gradients so small by it that the declared clip leaves them as they are."""
    clip = _declared_clip(case)
    if clip is None:
        return None
    own = value * case.reference.factor
    small = 0 < own * case.reference.norm < clip.value * (1 - CLOSE)
    return own if small else None


def _clipped_otherwise(case: Case, value: float, shown: str) -> Diagnosis | None:
    """A step that says it clips, and clips by another norm than the reference's, or not at all."""
    clip = _declared_clip(case)
    if clip is None:
        return None
    norm, limit, own = case.reference.norm, clip.value, value * case.reference.factor
    if not 0 < own <= 1 + CLOSE:
        return None
    says = f"the global norm is {norm:.6g} and max_norm {limit:g}"
    if abs(own - 1) < CLOSE:
        cause, symbols = f"the step does not clip: {says}", []
    else:
        theirs = limit / own - clip.eps
        behind = limit / own - norm  # a common factor is gone behind a clip, but for its eps
        if clip.eps and behind > 0 and abs(theirs / norm - 1) < CLIP_NEAR and case.exact:
            return _factor_before_clipping(case, clip.eps, clip.eps / behind)
        cause = f"the step clips by a norm of {theirs:.6g}, where {says}"
        symbols = factor_symbols(case, (theirs / norm) ** 2)
        if symbols:
            cause += f": the sum of squares is {(theirs / norm) ** 2:.6g} times too large, which "
            cause += f"equals {symbols[0]}"
    return Diagnosis(
        cause=cause,
        kind="clipped",
        factor=shown,
        symbol=f"sqrt(1/({symbols[0]}))" if symbols else None,
        because=(f"every gradient is the declared one's times {shown}, within the threshold",),
    )


def _factor_before_clipping(case: Case, eps: float, value: float) -> Diagnosis:
    fraction, symbols = as_fraction(value, CLIP_NEAR * value), factor_symbols(case, value)
    shown = str(fraction) if fraction is not None else f"{value:.6g}"
    named = f", which equals {symbols[0]}" if symbols else ""
    return Diagnosis(
        cause=f"every gradient is multiplied by {shown}{named}, before the step clips it",
        kind="factor",
        factor=shown,
        symbol=symbols[0] if symbols else None,
        because=(f"behind the clip only its eps shows it: {eps:g} beside a norm",),
    )


def _count_counted(case: Case, value: float, shown: str, fits: str) -> Diagnosis | None:
    """A reduction of a count that all gradients are divided by: repeated, or averaged.

    By its value: what the ranks put in is a term's count, whole or in parts.
    """
    counts = [float(count) for count in case.reference.counts.values()]
    for joint in reductions_of(case):
        size, words = len(joint.ranks), describe(case.record, joint)
        scalars = [float(e["scalar"]) for e in joint.events.values() if "scalar" in e]
        if size < 2 or len(scalars) < size or carried_by(case, joint):
            continue
        axis = group_name(case.record.spec.topology, joint.ranks)
        whole = any(abs(scalars[0] - count) < CLOSE * count for count in counts)
        in_parts = any(abs(sum(scalars) - count) < CLOSE * count for count in counts)
        if whole and identical(joint) and abs(value * size - 1) < CLOSE:
            return Diagnosis(
                cause=f"{words} sums what is already whole; every gradient is divided by it",
                kind="double_reduction",
                standing="proved",
                ranks=joint.ranks,
                factor=shown,
                symbol=f"1/{axis}",
                because=(fits, f"its inputs are the same bits on all {size} ranks"),
            )
        total = sum(scalars)
        for count in counts if joint.first.get("reduce") == "SUM" and total else ():
            if abs(value * total - count) < CLOSE * count and abs(total - count) > CLOSE * count:
                return Diagnosis(
                    cause=f"every gradient is divided by {total:g}, the sum that {words} gives; "
                    f"the count of the full batch is {count:g}",
                    kind="wrong_count",
                    standing="proved",
                    ranks=joint.ranks,
                    factor=shown,
                    because=(fits,),
                )
        averaged = joint.first.get("reduce") == "AVG" and abs(value - size) < CLOSE * size
        if averaged and in_parts:
            cause = f"{words} averages a count that every gradient is divided by"
            return _avg(cause, shown, axis, fits, joint)
    return None


def _avg(cause: str, shown: str, symbol: str, fits: str, joint: Joint) -> Diagnosis:
    return Diagnosis(
        cause=cause,
        kind="avg",
        standing="proved",
        ranks=joint.ranks,
        factor=shown,
        symbol=symbol,
        because=(fits, f"the ledger shows {joint.first.get('reduce')} at {joint.site}"),
    )


def _factor_by_param(case: Case, found: Factors) -> Diagnosis:
    sizes = sizes_of(case.record)
    powers = {
        name: power_of(value, sizes)
        for name, value in zip(found.params, found.values, strict=True)
        if value is not None
    }
    bases = {base for base, _ in filter(None, powers.values())}
    alike: dict[str, list[str]] = {}
    for name, value, sigma in zip(found.params, found.values, found.sigmas, strict=True):
        if value is not None:
            alike.setdefault(_fraction_or_number(value, sigma), []).append(name)
    shown = "; ".join(
        f"{times} in {some_of(own)}" for times, own in list(alike.items())[:MOST_FACTORS]
    )
    more = len(alike) - MOST_FACTORS
    shown += f"; and {more} more factors" if more > 0 else ""
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
    clipped = clipped_by_groups(case, list(alike.values()))
    return Diagnosis(
        cause=f"parameters have factors of their own: {shown}",
        kind="param_factors",
        because=(
            *([clipped] if clipped else []),
            "with one factor for each parameter the residual is under the threshold",
            *_parts_of_a_size(found.known, sizes),
        ),
    )


def _parts_of_a_size(factors: Sequence[float], sizes: Mapping[str, int]) -> list[str]:
    """Where every factor is a size of the topology divided by a whole number, and not all alike."""
    for name, size in sizes.items():
        parts = [size / factor if factor else 0.0 for factor in factors]
        whole = [round(part) for part in parts]
        near = all(abs(a - b) < CLOSE for a, b in zip(parts, whole, strict=True))
        if near and len(set(whole)) > 2 and all(1 <= n <= size for n in whole):
            shown = ", ".join(str(n) for n in sorted(set(whole)))
            return [
                f"each is {name} = {size} divided by {shown}: as when the sum is divided by how "
                f"many ranks have a gradient of it, and not by all"
            ]
    return []


def _factor_by_term(case: Case, found: Factors, names: Sequence[str]) -> Diagnosis:
    by_size = sorted(
        (
            (unit.term, value, sigma)
            for unit, value, sigma in zip(found.units, found.values, found.sigmas, strict=True)
            if value is not None
        ),
        key=lambda item: -abs(item[1] - 1),
    )
    odd = [item for item in by_size if abs(item[1] - 1) > CLOSE] or by_size[:1]
    assert odd, found
    term, value, sigma = odd[0]
    shown, lost = _fraction_or_number(value, sigma), abs(value) < CLOSE
    symbols = [] if lost else factor_symbols(case, value)
    return Diagnosis(
        cause=_terms_in_words(case, odd, names, symbols)
        + ("; the other terms are right" if len(odd) < len(by_size) else "; no term is right"),
        kind="term_factor",
        term=term,
        factor=shown,
        symbol=symbols[0] if symbols else None,
        also=tuple(symbols[1:4]),
        because=("with one factor for each term the residual is under the threshold",),
    )


def _terms_in_words(
    case: Case,
    odd: Sequence[tuple[str | None, float, float | None]],
    names: Sequence[str],
    symbols: Sequence[str],
) -> str:
    """How often these terms count, those with one number together. symbols: of the first number."""
    groups: dict[str, list[str]] = {}
    for name, value, sigma in odd:
        number = "0" if abs(value) < CLOSE else _fraction_or_number(value, sigma)
        groups.setdefault(number, []).append(name or "all terms")
    words = []
    where = f" in {some_of(names)}" if len(names) < len(case.record.spec.params) else ""
    gone = groups.pop("0", [])
    if gone:
        one = len(gone) == 1
        words.append(
            f"{some_of(gone)} never reach{'es' if one else ''} {some_of(names)}: "
            f"{'it is' if one else 'they are'} not in the graph, or dropped"
        )
    for number, terms in list(groups.items())[:MOST_NUMBERS]:
        named = f" = {symbols[0]}" if symbols and terms[0] == (odd[0][0] or "all terms") else ""
        reverse = ", its sign is reversed" if number.startswith("-") else ""
        verb = "is" if len(terms) == 1 else "are"
        words.append(f"{some_of(terms)} {verb} counted {number}{named} times{where}{reverse}")
    more = sum(map(len, list(groups.values())[MOST_NUMBERS:]))
    return ", ".join(words) + (f" (and {more} more terms)" if more else "")


def _fraction_or_number(value: float, sigma: float | None) -> str:
    fraction = as_fraction(value, sigma)
    return str(fraction) if fraction is not None else f"{value:.9g}"


def _stale(case: Case, found: Factors, names: Sequence[str]) -> Diagnosis:
    rows = [u.rows for u in found.counted(1) if u.previous and u.rows]
    which = f"rows {list_rows(rows)}" if rows else "part"
    return Diagnosis(
        cause=f"{some_of(names)} still holds {which} of the step before: a buffer not zeroed, "
        f"not a weighting bug",
        kind="stale_buffer",
        standing="proved",
        because=(
            "the reference of this step plus those rows' partials at the previous step's weights "
            "is the measured gradient",
        ),
    )


def _times(value: float) -> str:
    return "no" if abs(value) < CLOSE else f"{value:.9g} times the"


def rank_scale(case: Case, by_rank: Mapping[int, Factors], names: Sequence[str]) -> Diagnosis:
    """Ranks that scale what they hold by numbers of their own, or some of them by one."""
    fits = "one factor for each rank leaves a residual under the threshold"
    values = [f.values[0] or 0.0 for f in by_rank.values()]
    others = sorted({cell.rank for cell in case.cells} - set(by_rank))
    one = max(values) - min(values) <= CLOSE * max(abs(v) for v in values)
    if others and one:
        who, right = spans(list(by_rank)), f"; rank {spans(others)} holds it right"
        clip, what = case.reference.factor, some_of(names)
        unclipped = _declared_clip(case) is not None and abs(values[0] * clip - 1) < CLOSE
        return Diagnosis(
            cause=f"rank {who} does not clip: {what} is there as it was before{right}"
            if unclipped
            else f"rank {who} has {_times(values[0])} gradient of {what}{right}",
            kind="rank_scale",
            standing="proved" if unclipped else "likely",
            ranks=tuple(by_rank),
            factor=f"{values[0]:.9g}",
            because=(fits,),
        )
    shown = ", ".join(f"rank {r}: {f.values[0]:.6g}" for r, f in list(by_rank.items())[:4])
    return Diagnosis(
        cause=f"each rank scales its gradients by a number of its own ({shown}), as a norm or a "
        f"clip coefficient does that is not reduced over the ranks",
        kind="rank_scale",
        ranks=tuple(by_rank),
        because=(fits,),
    )
