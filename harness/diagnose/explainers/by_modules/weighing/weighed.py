"""How shares of a loss are weighed, in words: by rank, call, row, token or output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of, ordinal
from sumgrad.diagnose.modules.where.loss_weights import (
    Share,
    counts_of_groups,
    geometric,
    own_counts,
    own_positions,
    places_of,
    same,
    usual_factor,
)
from sumgrad.diagnose.names import factor_symbols
from torch import Tensor

MOST_VALUES = 6  # of rows, that are written out
MOST_SHARES = 8
MOST_CALLS = 4  # of ranks, that are written out


def shares_in_words(case: Case, shares: Sequence[Share], term: str | None = None) -> str | None:
    """None where every row has one factor."""
    factors = [s.factor for s in shares]
    known = [f for f in factors if f is not None]
    several = len({s.number for s in shares}) > 1
    parts = {s.part: s.factor for s in shares if s.factor is not None}
    alike = all(s.factor is not None and same([s.factor, parts[s.part]]) for s in shares)
    if len(parts) > 1 and alike:
        listed = ", ".join(f"{part + 1}: {fraction_of(f)}" for part, f in parts.items())
        return f"the model's outputs enter the loss with factors of their own: {listed}"
    odd = _odd_part(shares)
    if odd is not None:
        words = shares_in_words(case, odd, term)
        every = len({s.part for s in shares})
        alone = f"of {every} outputs the {ordinal(odd[0].part)} alone, every other has one factor"
        return None if words is None else f"{alone}: {words}"
    if len(known) == len(factors):
        if same(known):
            return None
        return _by_part(case, shares, several, term)
    by_row = [f for s in shares for f in s.by_row.values()]
    told = [f for f in by_row if f is not None]
    if len(told) > 1 and len(told) == len(by_row) and all(s.by_row for s in shares):
        counts = _row_counts(case, term)
        if counts is not None:
            products = [f * float(counts[row]) for s in shares for row, f in s.by_row.items() if f]
            if products and same(products) and not same(told):
                return "every row is divided by its own count, not all rows by the global one"
        return f"the rows' gradients at the loss have factors of their own: {_rows(shares)}"
    return _tokens_in_words(shares)


def _rows(shares: Sequence[Share]) -> str:
    """Each row's factor, rank by rank where a row is on several with factors of their own."""
    by_rank: dict[int, dict[int, float]] = {}
    for s in shares:
        known = {row: f for row, f in s.by_row.items() if f is not None}
        by_rank.setdefault(s.rank, {}).update(known)
    together = {row: f for own in by_rank.values() for row, f in own.items()}
    if all(same([f, together[row]]) for own in by_rank.values() for row, f in own.items()):
        return _list(together)
    told = [f"on rank {rank} {_list(own)}" for rank, own in by_rank.items()]
    more = [f"and on {len(told) - MOST_CALLS} more ranks"] if len(told) > MOST_CALLS else []
    return "; ".join([*told[:MOST_CALLS], *more])


def _odd_part(shares: Sequence[Share]) -> list[Share] | None:
    """Those of the one part of an output that has several factors, where every other has one."""
    by_part: dict[int, list[Share]] = {}
    for s in shares:
        by_part.setdefault(s.part, []).append(s)
    odd = [
        own
        for own in by_part.values()
        if any(s.factor is None for s in own) or not same([s.factor or 0.0 for s in own])
    ]
    return odd[0] if len(odd) == 1 < len(by_part) else None


def _tokens_in_words(shares: Sequence[Share]) -> str:
    """Which positions of which ranks have which factor."""
    words = []
    common, several = usual_factor(shares), len({s.number for s in shares}) > 1
    for s in shares:
        places: dict[str, list[int]] = {}
        for at, factor in s.vectors.items():
            places.setdefault(fraction_of(factor), []).append(at)
        usual = None if common is None else fraction_of(common)
        odd = [
            ("never" if value == "0" else f"{value} times") + f" at {places_of(s, at)}"
            for value, at in places.items()
            if value != usual
        ]
        if odd:
            others = f", {usual} times at all others" if usual in places else ""
            call = f" in call {s.number}" if several else ""
            words.append(f"on rank {s.rank}{call} {', '.join(odd)}{others}")
    words = list(dict.fromkeys(words))
    more = [f"and {len(words) - MOST_CALLS} more such calls"] if len(words) > MOST_CALLS else []
    shown = "; ".join([*words[:MOST_CALLS], *more])
    if any("never" in text for text in words):
        return f"gradients of tokens are lost on the way from the loss: {shown}"
    return f"tokens count in the gradient of the loss with factors of their own: {shown}"


def _by_part(case: Case, shares: Sequence[Share], several: bool, term: str | None) -> str:
    facts = case.record.spec.facts
    ones = torch.ones(facts.num_rows if facts else 0, dtype=torch.float64)
    counts = _row_counts(case, term)
    for level in ("call", "rank") if several else ("rank",):
        unit = _unit(case, shares) if level == "call" else "rank"
        for kind, numbers in (("own count", counts), ("own number of rows", ones)):
            c = None if numbers is None else own_counts(shares, numbers, level=level)
            if c is None or numbers is None:
                continue
            share = c / float(numbers.sum())
            symbols = factor_symbols(case, share)
            text = f"every {unit} divides by its {kind}, not by that of all"
            if abs(share - 1) > 1e-6:
                text += f" (a mean of means: the parts are weighed by {fraction_of(share)}"
                text += f", which equals {symbols[0]})" if symbols else ")"
            return text
        if own_positions(shares, level=level):
            return (
                f"every {unit} divides by its own number of positions that enter the loss, not by "
                f"that of all"
            )
    groups = None if counts is None else counts_of_groups(shares, counts)
    if groups is not None:
        shown = ", ".join(f"rank {spans(list(ranks))}" for ranks in groups)
        return f"each rank divides by the count of some ranks, not by that of all: {shown} together"
    ratio = geometric(shares)
    if ratio is not None:
        times = fraction_of(ratio)
        return f"each {_unit(case, shares)} weighs {times} times what the one before it does"
    by_rank = {s.rank: s.factor for s in shares}
    if not several or all(by_rank[s.rank] == s.factor for s in shares):
        known = {r: f for r, f in by_rank.items() if f is not None}
        odd = _odd_rank(known)
        if odd is not None:
            return odd
        shown = _list(known)
        return f"each rank's loss has a factor of its own, of rank {shown}"
    by_call: dict[int, float] = {s.number: s.factor for s in shares if s.factor is not None}
    if all(s.factor is not None and same([s.factor, by_call[s.number]]) for s in shares):
        return f"each {_unit(case, shares)} has a factor of its own, of number {_list(by_call)}"
    parts, unit = {s.part for s in shares}, _unit(case, shares)
    told = [
        f"rank {s.rank} {unit} {s.number}"
        + (f" output {s.part + 1}" if len(parts) > 1 else "")
        + f": {s.factor:.6g}"
        for s in shares
        if s.factor is not None
    ]
    more = f" and {len(told) - MOST_SHARES} more" if len(told) > MOST_SHARES else ""
    first = ", ".join(told[:MOST_SHARES])
    units = "micro-batches" if unit == "micro-batch" else "calls"
    return f"ranks and {units} have factors of their own: {first}{more}"


def _unit(case: Case, shares: Sequence[Share]) -> str:
    """What a call of the module is: a micro-batch where each rank has as many losses."""
    calls: dict[int, set[int]] = {}
    for s in shares:
        calls.setdefault(s.rank, set()).add(s.number)
    ranks = case.traces.ranks if case.traces is not None else {}
    losses = {rank: len(ranks[rank].losses) for rank in calls if rank in ranks}
    known = all(losses.get(rank, 0) in (0, len(own)) for rank, own in calls.items())
    return "micro-batch" if known else "call"


def _odd_rank(factors: dict[int, float]) -> str | None:
    """All ranks but one have the same factor."""
    for rank, own in factors.items():
        others = [f for r, f in factors.items() if r != rank]
        if len(others) > 1 and same(others) and others[0] and not same([own, others[0]]):
            usual = fraction_of(others[0])
            text = f"the loss of rank {rank} has the factor {fraction_of(own)}, that of all other "
            return (
                text + f"ranks {usual}: its rows count {fraction_of(own / others[0])} times as much"
            )
    return None


def _list(pairs: dict[int, float]) -> str:
    by_value: dict[str, list[int]] = {}
    for key, value in pairs.items():
        by_value.setdefault(f"{value:.6g}", []).append(key)
    shown = [f"{spans(keys)}: {value}" for value, keys in list(by_value.items())[:MOST_VALUES]]
    more = sum(map(len, list(by_value.values())[MOST_VALUES:]))
    return "; ".join(shown) + (f"; and {more} more with others" if more else "")


def _row_counts(case: Case, term: str | None = None) -> Tensor | None:
    """(rows,) the count of each, where it is known row by row."""
    held = case.reference.row_counts
    chosen = held.get(term) if term else next(iter(held.values())) if len(held) == 1 else None
    one = chosen is not None and all(b - a == 1 for a, b in case.reference.intervals)
    return torch.tensor(chosen, dtype=torch.float64) if one else None
