"""One explanation for all ranks, in words: a factor on everything, parameters, terms or rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from sumgrad.base.outcome import in_digits, some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.rows import factor_by_rows
from sumgrad.diagnose.explainers.of_ledgers.clipped import (
    clipped,
    clipped_otherwise,
    declared_clip,
    without_clipping,
)
from sumgrad.diagnose.explainers.of_ledgers.clipped_groups import clipped_by_groups
from sumgrad.diagnose.explainers.of_ledgers.reduced_otherwise import (
    by_a_counts_reduction,
    by_a_reduction,
)
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.names import factor_symbols, list_rows, power_of
from sumgrad.diagnose.own_gradients import columns_of, given_by_ranks, lines_of_backwards, near
from sumgrad.diagnose.reductions import CLOSE
from sumgrad.diagnose.row_fit import Factors, by_param, explain
from sumgrad.judge.cells import Cell
from sumgrad.judge.joint import sizes_of

NEITHER = "the ledger shows neither an average nor a repeated reduction of it"
ALL_RANKS = ("world", "1/world")
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
        elif diagnosis.kind == "factor":
            diagnosis = _unless_later_steps_differ(case, found.values[0], diagnosis)
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


def _unless_later_steps_differ(case: Case, value: float | None, diagnosis: Diagnosis) -> Diagnosis:
    """What one factor explains at one step alone is no factor: it looks so there."""
    steps = range(case.step + 1, case.record.spec.steps) if value is not None else ()
    other = [s for s in steps if not _is_times(replace(case, step=s, known={}), value or 0.0)]
    if not other:
        return diagnosis
    here = f"; at step {spans(other)} it is another, or none that all share"
    return replace(diagnosis, cause=f"at step {case.step} {diagnosis.cause}{here}", standing="open")


def _is_times(case: Case, value: float) -> bool:
    """Whether what is wrong is so many times what it should be; or nothing is."""
    return all(
        float((cell.measured - value * cell.wanted.value).abs().max())
        <= max(abs(value), 1.0) * cell.wanted.threshold
        for cell in case.failing_cells
        if cell.measured.numel()
    )


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


def _too_small_to_clip(case: Case, own: float, told: str, before: str) -> Diagnosis | None:
    """A factor that is a size, and so small that no clip acts on what is left."""
    symbols = factor_symbols(case, own)
    if not symbols or abs(own - 1) < CLOSE:
        return None
    return Diagnosis(
        cause=f"every gradient is multiplied by {told}, which equals {symbols[0]}, before it is "
        f"clipped, and is too small then for the clip to act",
        kind="factor",
        factor=told,
        symbol=symbols[0],
        because=(before,),
    )


def _one_factor(
    case: Case, value: float | None, sigma: float | None, names: Sequence[str], *, alone: bool
) -> Diagnosis:
    """alone: other ranks hold the same and hold it right, so no common count is to blame."""
    assert value is not None
    shown = _fraction_or_number(value, sigma)
    whole = _is_every_gradient(case, names)
    what = "every gradient" if whole else some_of(names)
    fits = f"{what} is the reference's times {shown} on all ranks, within the threshold"
    own = without_clipping(case, value) if whole and not alone else None
    if own is not None:
        part = as_fraction(own, sigma)
        before = f"{what} is the reference's before it is clipped, times {own:.9g}, on all ranks"
        shown_own = str(part or f"{own:.9g}")
        found = by_a_reduction(case, names, own, shown_own, before) or _too_small_to_clip(
            case, own, shown_own, before
        )
        if found is not None:
            return found
    if whole and not alone:
        by_clip = clipped_otherwise(case, value, shown) or clipped(case, value, shown, what)
        if by_clip is not None:
            return by_clip
    found = by_a_reduction(case, names, value, shown, fits)
    if found is not None:
        return found
    counted = None if alone else by_a_counts_reduction(case, value, shown, fits)
    if counted is not None:
        return counted
    again = _all_of_it_each_time(case, value, what, fits)
    if again is not None:
        return again
    symbols = factor_symbols(case, value)
    plain = _plain(symbols)
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


def _is_every_gradient(case: Case, names: Sequence[str]) -> bool:
    """Whether all others are zero within the noise, and so as much times it as well."""
    others = [cell.wanted for cell in case.cells if cell.name not in names]
    return all(wanted.size <= wanted.threshold for wanted in others)


def _all_of_it_each_time(case: Case, value: float, what: str, fits: str) -> Diagnosis | None:
    """Where each of a rank's backwards gives the whole gradient, and they are added up."""
    given, lines = given_by_ranks(case), dict[str, None]()
    for cell in case.failing_cells if given is not None else ():
        columns = columns_of(cell, given or {})
        if columns is None or columns.passes < 2 or abs(columns.passes - value) > CLOSE:
            return None
        if not near(columns.own, columns.wanted.expand_as(columns.own)):
            return None
        lines |= dict.fromkeys(lines_of_backwards(case, cell.rank, cell.name))
    if given is None:
        return None
    where = f", called at {', '.join(filter(None, lines))}" if any(lines) else ""
    return Diagnosis(
        cause=f"{what} is counted {round(value)} times: each of the {round(value)} backwards of a "
        f"rank{where}, gives all of it, and they are added up",
        kind="factor",
        factor=str(round(value)),
        because=(fits, "what each backward of each rank gave it is the reference's by itself"),
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
    several = [s for s in _plain(symbols) if s not in ALL_RANKS]  # which are those of one axis
    also = f"{some_of(several)} are all that number; unequal sizes separate them"
    symbols = [] if len(several) > 1 else symbols
    return Diagnosis(
        cause=_terms_in_words(case, odd, names, symbols)
        + ("; the other terms are right" if len(odd) < len(by_size) else "; no term is right"),
        kind="term_factor",
        term=term,
        factor=shown,
        symbol=symbols[0] if symbols else None,
        also=tuple(symbols[1:4]),
        because=("with one factor for each term the residual is under the threshold",),
        however=(also,) if len(several) > 1 else (),
    )


def _plain(symbols: Sequence[str]) -> list[str]:
    """Those that are one size or count, or one over it."""
    return [s for s in symbols if not {*"*/"} & {*s.removeprefix("1/")}]


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
    return str(fraction) if fraction is not None else in_digits(value)


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
    others = sorted({c.rank for c in case.cells if c.name in names} - set(by_rank))
    one = max(values) - min(values) <= CLOSE * max(abs(v) for v in values)
    if one and (others or len(by_rank) == 1):
        who = spans(list(by_rank))
        right = f"; rank {spans(others)} holds it right" if others else ""
        clip, what = case.reference.factor, some_of(names)
        unclipped = declared_clip(case) is not None and abs(values[0] * clip - 1) < CLOSE
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
        cause=f"each rank's gradients are the right ones times a number of its own ({shown}), as "
        f"by a norm or a clip coefficient that is not reduced over the ranks",
        kind="rank_scale",
        ranks=tuple(by_rank),
        because=(fits,),
    )
