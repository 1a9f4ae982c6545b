"""How rows, tokens and terms are weighed where the loss meets the last module."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    looked_by_rows,
    named,
    owners,
    predicts,
)
from sumgrad.diagnose.explainers.factors import explained, fitted, in_the_gradients
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.first_wrong import first_wrong_backward
from sumgrad.diagnose.modules.look import Look
from sumgrad.diagnose.modules.loss_weights import (
    Share,
    behind_few_directions,
    geometric,
    never_enters,
    own_counts,
    own_positions,
    row_weights,
    same,
    shares_at_the_loss,
    shares_of_term,
)
from sumgrad.diagnose.names import factor_symbols
from torch import Tensor

MOST_WEIGHTS = 4


def tokens_weighed_otherwise(case: Case, left: Left) -> Iterator[Explanation]:
    """Tokens of one row that enter the loss with factors of their own, or not at all."""
    look = looked_by_rows(case)
    found = None if look is None else shares_at_the_loss(look)
    if look is None or found is None:
        return
    tokens = any(s.factor is None and None in s.by_row.values() for s in found[1])
    # Where ranks or rows weigh differently, what mixes them is wrong in the backward as well.
    if tokens or first_wrong_backward(look, owners(case)) is not None:
        yield from rows_weighed_otherwise(case, left)


def terms_weighed_otherwise(case: Case, left: Left) -> Iterator[Explanation]:
    """Terms of a loss of several that enter with factors that others do not have."""
    look = looked_by_rows(case)
    if look is None or len(look.terms) < 2:
        return
    found = {t: held for t in look.terms if (held := shares_of_term(look, t)) is not None}
    usual = [s.factor for _, shares in found.values() for s in shares if s.factor is not None]
    if not usual:
        return
    often = {f: sum(same([f, other]) for other in usual) for f in usual}
    common = max(usual, key=lambda f: often[f])
    if any(often[f] == often[common] and not same([f, common]) for f in usual):
        return  # of two terms nobody knows which is the odd one
    odd = {
        term: (module, shares)
        for term, (module, shares) in found.items()
        if any(s.factor is None or not same([s.factor, common]) for s in shares)
    }
    if not odd or len(odd) == len(found) > 1:
        return
    term, (module, shares) = next(iter(odd.items()))
    lost = never_enters(shares)
    narrow = None if lost else _single_numbers(look, module, shares, term)
    if narrow is not None:
        yield explained(case, narrow)
        return
    words = "it never enters it" if lost else _weights_in_words(case, shares, term)
    if words is None:
        if fitted(case) is not None:
            return  # the gradients say which term is counted otherwise, these only that one is
        factor = next(s.factor for s in shares if s.factor is not None) / common
        symbols = factor_symbols(case, factor)
        words = f"it counts {fraction_of(factor)} times" + (f" = {symbols[0]}" if symbols else "")
    right = [t for t in found if t not in odd]
    yield explained(
        case,
        Diagnosis(
            cause=f"{term} enters the loss otherwise than the other terms: {words}",
            kind="loss_weights",
            term=term,
            ranks=tuple(sorted({s.rank for s in shares})),
            because=(
                f"no gradient of it reaches {named(look, module)}"
                if lost
                else f"so weighed is its gradient where it reaches {named(look, module)}",
                f"{some_of(right)} has one factor on all ranks",
                *in_the_gradients(case),
            ),
        ),
    )


def rows_weighed_otherwise(case: Case, left: Left) -> Iterator[Explanation]:
    """Rows that enter the loss with factors of their own."""
    look = looked_by_rows(case)
    found = None if look is None else shares_at_the_loss(look)
    if look is None or found is None or case.record.spec.facts is None:
        return
    module, shares = found
    narrow = _single_numbers(look, module, shares)
    if narrow is not None:
        yield explained(case, narrow)
        return
    words = _weights_in_words(case, shares)
    if words is None:
        return
    weights = row_weights(shares, case.record.spec.facts.num_rows)
    proved = weights is not None and predicts(case, weights)
    yield explained(
        case,
        Diagnosis(
            cause=words,
            kind="loss_weights",
            standing="proved" if proved else "likely",
            ranks=tuple(sorted({s.rank for s in shares})),
            because=(
                f"so weighed is the gradient that reaches {named(look, module)}, the last module",
                "the rows' gradients with these weights add up to what was measured, up to one "
                "factor on all of them"
                if proved
                else "whether these weights alone make the measured gradient is not known",
                *in_the_gradients(case),
            ),
        ),
    )


def _single_numbers(
    look: Look, module: str, shares: Sequence[Share], term: str | None = None
) -> Diagnosis | None:
    """Vectors with factors that are no weights: many, or below a head of single numbers."""
    head = behind_few_directions(look, module)
    odd = {s.rank: s.odd for s in shares if s.factor is None and s.odd}
    regular = all(s.factor is not None or None not in s.by_row.values() for s in shares)
    if not odd or regular or (head is None and not any(_many_factors(s) for s in shares)):
        return None
    right = sorted({s.rank for s in shares} - odd.keys())
    shown = "; ".join(f"on rank {rank} at {places}" for rank, places in list(odd.items())[:4])
    if head is None:
        width = look.seen[module][0].shape[-1:]
        cause = (
            f"the gradient {f'of {term} ' if term else ''}that reaches {named(look, module)} is "
            f"wrong, by a factor of its own in each vector of {width[0] if width else 1} numbers: "
            f"{shown}"
        )
        because = [
            "the forward is right; what follows this module, up to the loss, has another gradient "
            "there, or gives a part of it only"
        ]
    else:
        cause = (
            f"{term or 'the loss'} has another gradient than in loss_sum at some tokens: {shown}"
        )
        because = [
            f"the forward is right; what {named(look, head)} gives is a number or two a token, so "
            f"a wrong target, a weight and a second path into the loss all look like a factor there"
        ]
    if all(_most_are_alike(s) for s in shares if s.rank in odd):
        because.append("at all other places its gradient is right, up to one factor")
    if right:
        because.append(f"on rank {spans(right)} it is right everywhere")
    return Diagnosis(
        cause=cause,
        kind="loss_at_tokens",
        term=term,
        ranks=tuple(sorted(odd)),
        because=tuple(because),
    )


def _most_are_alike(share: Share) -> bool:
    """Whether there is a usual factor that others can be told from."""
    factors = list(share.places.values())
    usual = statistics.median(factors)
    return 2 * sum(same([f, usual]) for f in factors) > len(factors)


def _many_factors(share: Share) -> bool:
    """Whether its vectors have more factors than people give weights."""
    return share.factor is None and len({fraction_of(f) for f in share.places.values()}) > (
        MOST_WEIGHTS
    )


def _weights_in_words(case: Case, shares: Sequence[Share], term: str | None = None) -> str | None:
    """None where every row has one factor."""
    factors = [s.factor for s in shares]
    known = [f for f in factors if f is not None]
    several = len({s.number for s in shares}) > 1
    parts = {s.part: s.factor for s in shares if s.factor is not None}
    alike = all(s.factor is not None and same([s.factor, parts[s.part]]) for s in shares)
    if len(parts) > 1 and alike:
        listed = ", ".join(f"{part + 1}: {fraction_of(f)}" for part, f in parts.items())
        return f"the model's outputs enter the loss with factors of their own: {listed}"
    if len(known) == len(factors):
        if same(known):
            return None
        return _by_part(case, shares, several, term)
    by_row = [f for s in shares for f in s.by_row.values()]
    told = [f for f in by_row if f is not None]
    if by_row and len(told) == len(by_row):
        counts = _row_counts(case, term)
        if counts is not None:
            products = [f * float(counts[row]) for s in shares for row, f in s.by_row.items() if f]
            if products and same(products):
                return "every row is divided by its own count, not all rows by the global one"
        pairs = {row: f for s in shares for row, f in s.by_row.items() if f is not None}
        return f"rows enter the loss with different factors: {_list(pairs)}"
    return _tokens_in_words(shares)


def _tokens_in_words(shares: Sequence[Share]) -> str:
    """Which positions of which ranks have which factor."""
    words = []
    for s in shares:
        places: dict[str, list[int]] = {}
        for place, factor in s.places.items():
            places.setdefault(fraction_of(factor), []).append(place)
        if len(places) < 2:
            continue
        usual = max(places, key=lambda value: len(places[value]))
        odd = [
            f"{s.place} {spans(at)} " + ("never enters it" if value == "0" else f"{value} times")
            for value, at in places.items()
            if value != usual
        ]
        words.append(f"on rank {s.rank} {', '.join(odd)}, all others {usual} times")
    shown = "; ".join(list(dict.fromkeys(words))[:4])
    if any("never" in text for text in words):
        return f"tokens are lost from the loss: {shown}"
    return f"tokens enter the loss with factors that loss_sum does not give them: {shown}"


def _by_part(case: Case, shares: Sequence[Share], several: bool, term: str | None) -> str:
    facts = case.record.spec.facts
    ones = torch.ones(facts.num_rows if facts else 0, dtype=torch.float64)
    counts = _row_counts(case, term)
    for level in ("call", "rank") if several else ("rank",):
        unit = "micro-batch" if level == "call" else "rank"
        for kind, numbers in (("own count", counts), ("own number of rows", ones)):
            c = None if numbers is None else own_counts(shares, numbers, level=level)
            if c is None or numbers is None:
                continue
            share = c / float(numbers.sum())
            symbols = factor_symbols(case, share)
            text = f"every {unit} divides by its {kind}, not by that of all"
            if abs(share - 1) > 1e-6:
                text += f" (a mean of means: the parts are weighed by {fraction_of(share)}"
                text += f" = {symbols[0]})" if symbols else ")"
            return text
        if own_positions(shares, level=level):
            return (
                f"every {unit} divides by its own number of positions that enter the loss, not by "
                f"that of all"
            )
    ratio = geometric(shares)
    if ratio is not None:
        return f"each micro-batch weighs {fraction_of(ratio)} times what the one before it does"
    by_rank = {s.rank: s.factor for s in shares}
    if not several or all(by_rank[s.rank] == s.factor for s in shares):
        known = {r: f for r, f in by_rank.items() if f is not None}
        odd = _odd_rank(known)
        if odd is not None:
            return odd
        shown = _list(known)
        return f"each rank's loss has a factor of its own, by rank: {shown}"
    by_call: dict[int, float] = {s.number: s.factor for s in shares if s.factor is not None}
    if all(s.factor is not None and same([s.factor, by_call[s.number]]) for s in shares):
        return f"each micro-batch has a factor of its own, by number: {_list(by_call)}"
    pairs = {i: s.factor for i, s in enumerate(shares) if s.factor is not None}
    return f"ranks and micro-batches have factors of their own: {_list(pairs)}"


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
    shown = [f"{spans(keys)}: {value}" for value, keys in list(by_value.items())[:6]]
    return ", ".join(shown)


def _row_counts(case: Case, term: str | None = None) -> Tensor | None:
    """(rows,) the count of each, where it is known row by row."""
    held = case.reference.row_counts
    chosen = held.get(term) if term else next(iter(held.values())) if len(held) == 1 else None
    one = chosen is not None and all(b - a == 1 for a, b in case.reference.intervals)
    return torch.tensor(chosen, dtype=torch.float64) if one else None
