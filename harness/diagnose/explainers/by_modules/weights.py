"""How rows, tokens and terms are weighed where the loss meets the last module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

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
from sumgrad.diagnose.explainers.by_modules.passed import (
    has_functions_between,
    own_functions_between,
)
from sumgrad.diagnose.explainers.factors import (
    explained,
    fitted,
    in_the_gradients,
    only_terms_weigh_otherwise,
)
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.first_wrong import FirstWrong, first_wrong_backward
from sumgrad.diagnose.modules.look import Look
from sumgrad.diagnose.modules.loss_weights import (
    Share,
    behind_few_directions,
    counts_of_groups,
    geometric,
    never_enters,
    odd_vectors,
    own_counts,
    own_positions,
    places_of,
    row_weights,
    same,
    shares_at_the_loss,
    shares_of_term,
    usual_factor,
)
from sumgrad.diagnose.names import factor_symbols
from sumgrad.record.trace import LOSS
from torch import Tensor

LOCAL_COUNTS = ("every rank divides by its own ", "each rank divides by the count of some")
MOST_VALUES = 6  # of rows, that are written out
MOST_WEIGHTS = 4
MOST_SHARES = 8


def tokens_weighed_otherwise(case: Case, left: Left) -> Iterator[Explanation]:
    """Tokens of one row that enter the loss with factors of their own, or not at all."""
    look = looked_by_rows(case)
    found = None if look is None else shares_at_the_loss(look)
    if look is None or found is None:
        return
    tokens = any(s.factor is None and None in s.by_row.values() for s in found[1])
    # Where ranks or rows weigh differently, what mixes them is wrong in the backward as well.
    wrong = first_wrong_backward(look, owners(case))
    if (
        wrong is not None
        and wrong.wrong in look.paths.all_above(found[0])
        and _fit_by_chance(found[1])
    ):
        return
    if tokens or wrong is not None:
        yield from rows_weighed_otherwise(case, left)


def terms_weighed_otherwise(case: Case, left: Left) -> Iterator[Explanation]:
    """Terms of a loss of several that enter with factors that others do not have."""
    look = looked_by_rows(case)
    if look is None or len(look.terms) < 2 or only_terms_weigh_otherwise(case):
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
    if only_terms_weigh_otherwise(case):
        return
    module, shares = found
    narrow = _single_numbers(look, module, shares)
    if narrow is not None:
        own = _own_functions(case, look, module)
        yield explained(case, replace(narrow, because=(*narrow.because, *own)))
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
            kind="local_count" if words.startswith(LOCAL_COUNTS) else "loss_weights",
            standing="proved" if proved else "likely",
            ranks=tuple(sorted({s.rank for s in shares})),
            because=(
                f"so weighed is the gradient that reaches {named(look, module)}",
                "the rows' gradients with these weights add up to what was measured, up to one "
                "factor on all of them"
                if proved
                else "whether these weights alone make the measured gradient is not known",
                *in_the_gradients(case),
            ),
        ),
    )


def _fit_by_chance(shares: Sequence[Share]) -> bool:
    """Whether there are about as many factors as vectors, or a few for each: the loss reaches them
    by one number each."""
    factors = [f for s in shares for f in s.vectors.values()]
    return len({f"{f:.4g}" for f in factors}) > max(MOST_SHARES, len(factors) / 8)


def _own_functions(case: Case, look: Look, module: str) -> list[str]:
    """Functions of the user's with a backward of their own between a module and the loss."""
    found = FirstWrong(wrong=module, seen=tuple(look.seen[module]))
    if not has_functions_between(case, found, LOSS):
        return []
    return own_functions_between(case, found, [LOSS])[:1]


def _single_numbers(
    look: Look, module: str, shares: Sequence[Share], term: str | None = None
) -> Diagnosis | None:
    """Vectors with factors that are no weights: many, or below a head of single numbers."""
    head = behind_few_directions(look, module)
    several = any(s.factor is None and len(s.vectors) > 1 for s in shares)
    by_rows = [s.by_row and None not in s.by_row.values() for s in shares]
    regular = all(s.factor is not None or told for s, told in zip(shares, by_rows, strict=True))
    if not several or regular or (head is None and not any(_many_factors(s) for s in shares)):
        return None
    usual = usual_factor(shares)
    odd = _odd_in_words(shares, usual)
    right = sorted({s.rank for s in shares} - odd.keys())
    shown = "; ".join(f"on rank {rank} {words}" for rank, words in list(odd.items())[:4])
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
    if usual is not None:
        because.append("at all other places its gradient is right, up to one factor")
    if right:
        because.append(f"on rank {spans(right)} it has that one factor everywhere")
    return Diagnosis(
        cause=cause,
        kind="loss_at_tokens",
        term=term,
        ranks=tuple(sorted(odd)),
        because=tuple(because),
    )


def _odd_in_words(shares: Sequence[Share], usual: float | None) -> dict[int, str]:
    """Rank -> which of its vectors do not have the usual factor; all where there is none."""
    out: dict[int, str] = {}
    several = len({s.number for s in shares}) > 1
    for s in shares:
        odd = list(s.vectors) if usual is None else odd_vectors(s, usual)
        if not odd:
            continue
        if usual is None:
            factors = [s.vectors[at] for at in odd]
            words = f"factors from {min(factors):.6g} to {max(factors):.6g}"
        else:
            words = f"at {places_of(s, odd)}"
        if s.rank not in out:
            out[s.rank] = words + (f" in call {s.number}" if several else "")
    return out


def _many_factors(share: Share) -> bool:
    """Whether its vectors have more factors than people give weights."""
    return share.factor is None and len({fraction_of(f) for f in share.vectors.values()}) > (
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
    odd = _odd_part(shares)
    if odd is not None:
        words = _weights_in_words(case, odd, term)
        number, every = odd[0].part + 1, len({s.part for s in shares})
        alone = f"of {every} outputs number {number} alone, every other has one factor"
        return None if words is None else f"{alone}: {words}"
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
        return f"the rows' gradients at the loss have factors of their own: {_list(pairs)}"
    return _tokens_in_words(shares)


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
    shown = "; ".join(list(dict.fromkeys(words))[:4])
    if any("never" in text for text in words):
        return f"tokens are lost from the loss: {shown}"
    return f"tokens count in the gradient of the loss with factors of their own: {shown}"


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
    parts = {s.part for s in shares}
    told = [
        f"rank {s.rank} micro-batch {s.number}"
        + (f" output {s.part + 1}" if len(parts) > 1 else "")
        + f": {s.factor:.6g}"
        for s in shares
        if s.factor is not None
    ]
    more = f" and {len(told) - MOST_SHARES} more" if len(told) > MOST_SHARES else ""
    first = ", ".join(told[:MOST_SHARES])
    return f"ranks and micro-batches have factors of their own: {first}{more}"


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
    return ", ".join(shown) + (f", and {more} more with others" if more else "")


def _row_counts(case: Case, term: str | None = None) -> Tensor | None:
    """(rows,) the count of each, where it is known row by row."""
    held = case.reference.row_counts
    chosen = held.get(term) if term else next(iter(held.values())) if len(held) == 1 else None
    one = chosen is not None and all(b - a == 1 for a, b in case.reference.intervals)
    return torch.tensor(chosen, dtype=torch.float64) if one else None
