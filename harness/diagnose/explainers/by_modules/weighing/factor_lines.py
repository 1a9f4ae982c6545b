"""Which line gives the factors with which shares of a loss count, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.in_code.run_between import made_in_words
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    line_and_code,
    looked_by_rows,
    predicts,
    traces_looked_at,
    unless_it_fails,
)
from sumgrad.diagnose.explainers.by_modules.weighing.losses import ddp_divides_by
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.modules.in_code.factor_lines import (
    FactorLines,
    Key,
    OtherNumber,
    Scaling,
    lines_with_factors,
    lines_with_other_numbers,
    numbers_in,
)
from sumgrad.diagnose.modules.where.loss_weights import (
    Share,
    row_weights,
    same,
    shares_at_the_loss,
    shares_of_term,
)

MOST_LINES = 2
MOST_NUMBERS = 6
MOST_RANKS = 8
AT_THE_LOSS = ("loss_weights", "local_count", "term_factor", "term_by_rows")
IN_THE_GRADIENTS = ("factor", "row_factors", "rank_factor", "micro_batches", "mean_of_means",
                    "weights_of_ranks", "rank_scale", "wrong_count")  # fmt: skip


def with_the_factors_line(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that tells how shares count, and the line that gives them these factors."""
    found = _lines(case, diagnosis)
    if found is None:
        return diagnosis
    lines, is_all = found
    because = (*lines, *diagnosis.because) if is_all else (*diagnosis.because, *lines)
    return replace(diagnosis, because=because)


@unless_it_fails
def _lines(case: Case, diagnosis: Diagnosis) -> tuple[list[str], bool] | None:
    """In words, and whether they make the measured factors alone: what follows the loss may
    multiply, too. None where nothing is to be told.

    Ranks may weigh theirs and put that right again afterwards: what is told of gradients alone has
    to be what these factors make.
    """
    if diagnosis.kind not in (*AT_THE_LOSS, *IN_THE_GRADIENTS):
        return None
    look, traces = looked_by_rows(case), traces_looked_at(case)
    term = diagnosis.term
    if look is None or traces is None:
        return None
    found = shares_of_term(look, term) if term in look.terms else shares_at_the_loss(look)
    if found is None:
        return None
    module, shares = found
    if diagnosis.kind not in AT_THE_LOSS and not _make_the_gradient(case, shares):
        return None
    made = lines_with_other_numbers(traces, module, shares)[:MOST_LINES]
    if made:
        return [_of_another_number(one) for one in made], True
    lines = lines_with_factors(traces, module, shares)[:MOST_LINES]
    factors = [s.factor for s in shares if s.factor is not None]
    if not same(factors):
        ddp = ddp_divides_by(case)
        by_line = ([_in_words(one, shares, ddp), *_of_the_odd(case, one)] for one in lines)
        return [text for own in by_line for text in own], True
    total = factors[0] if diagnosis.factor is None else float(Fraction(diagnosis.factor))
    counts = case.reference.counts
    own = [n for t, n in counts.items() if term in (None, t)]
    # What divides by another term's count is on that one's way, unless its own were the right one.
    others = [
        n for n in counts.values() if n not in own and not any(same([n * total, o]) for o in own)
    ]
    kept = [without for one in lines if (without := _but_for(one, [*own, *others])).lines]
    said = [_of_one_factor(one, factors[0], total) for one in kept if len(one.lines) < 3]
    return said, same([factors[0], total])


def _of_another_number(one: OtherNumber) -> str:
    verb = "divides by" if one.mine.divides else "multiplies by"
    return (
        f"{fraction_of(one.factor)} times is what this line makes of it: "
        f"{expression(one.mine.mine)} {verb} {fraction_of(one.mine.by)} on rank "
        f"{spans(one.ranks)}, and in the single process by {fraction_of(one.there)}"
    )


def _but_for(found: FactorLines, counts: Collection[float]) -> FactorLines:
    """Without those that divide by a count of the whole batch: the right gradient does, too."""
    pairs = [
        (line, by)
        for line, by in zip(found.lines, found.by, strict=True)
        if found.just or not line.divides or not any(same([line.by, c]) for c in counts)
    ]
    lines, by = zip(*pairs, strict=True) if pairs else ((), ())
    return replace(found, lines=lines, by=by)


def _make_the_gradient(case: Case, shares: Sequence[Share]) -> bool:
    facts = case.record.spec.facts
    weights = None if facts is None else row_weights(shares, facts.num_rows)
    return weights is not None and predicts(case, weights)


def _in_words(found: FactorLines, shares: Sequence[Share], ddp: int = 0) -> str:
    """ddp: by what DDP divides later, which is then the right factor."""
    several = len({s.number for s in shares}) > 1
    each = [_of_one(line, by, several=several)
            for line, by in zip(found.lines, found.by, strict=True)]  # fmt: skip
    if len(each) > 1:
        return f"the factors go with two lines together: {'; and '.join(each)}"
    factor, right = max(ddp, 1), found.right or 0.0
    right = right / factor if found.lines[0].divides else right * factor
    later = f", and DDP divides by {ddp} later" if ddp > 1 else ""
    end = f"; were it {fraction_of(right)} in all, each factor there were {factor}{later}"
    end = "" if found.lines[0].beside else end
    return f"the factors go with this line: {each[0]}{end}"


def _of_the_odd(case: Case, found: FactorLines) -> list[str]:
    """How what a line multiplies by is made where it is another than there, and which one it is."""
    if found.odd is None:
        return []
    (rank, call), line = found.odd
    number = line.mine.takes[line.at] if line.at is not None else ""
    which = []
    if line.theirs:
        element, beside = line.theirs
        which = [f"on rank {rank} in call {call} it is element {element} of the single process's, "
                 f"beside what stands at {beside} there"]  # fmt: skip
    return [*which, *(made_in_words(case, rank, number) if isinstance(number, int) else [])]


def _of_one_factor(found: FactorLines, factor: float, total: float) -> str:
    """total: with which factor the gradient came out. What follows the loss may multiply, too, as
    an average does."""
    told = []
    for line, by in zip(found.lines, found.by, strict=True):
        number = next(iter(by.values()))
        right = number * total if line.divides else number / total
        told_by = as_fraction(right, 1e-9) if not line.beside else None
        end = "" if told_by is None else f" (were it {told_by}, the gradient were right)"
        told.append(f"{_of_one(line, by, several=False)}{end}")
    if found.just and same([factor, total]):
        return f"by just this factor {told[0]}"
    start = "" if same([factor, total]) else "what follows the loss multiplies, too; "
    on_the_way = "on the way to the loss, and nowhere in the single process, "
    return f"{start}{on_the_way}{'; and '.join(told)}"


def _of_one(line: Scaling, by: Mapping[Key, float], *, several: bool) -> str:
    verb = "divides by" if line.divides else "multiplies by"
    made = ""
    if line.at is not None and line.mine.made_at[line.at][0] not in ("", line.mine.line):
        made = f"what is made at {line_and_code(*line.mine.made_at[line.at])}, "
    if line.at is None:
        made = "the number it takes the mean over, "
    numbers = [*numbers_in(by).items()]
    of = " times the single process's" if line.beside else ""
    shown = [f"{fraction_of(number)}{of}"
             + (f" {_where(keys, several=several)}" if len(numbers) > 1 else "")
             for number, keys in numbers[:MOST_NUMBERS]]  # fmt: skip
    more = sum(len(keys) for _, keys in numbers[MOST_NUMBERS:])
    shown += [f"others in {more} more calls"] if more else []
    return f"{expression(line.mine)} {verb} {made}{', '.join(shown)}"


def _where(keys: Sequence[Key], *, several: bool) -> str:
    if not several:
        return f"(on rank {spans(sorted({rank for rank, _ in keys}))})"
    by_rank: dict[int, list[int]] = {}
    for rank, number in keys:
        by_rank.setdefault(rank, []).append(number)
    told = [f"rank {rank} call {spans(sorted(own))}" for rank, own in sorted(by_rank.items())]
    more = [f"{len(told) - MOST_RANKS} more ranks"] if len(told) > MOST_RANKS else []
    return f"(on {', '.join([*told[:MOST_RANKS], *more])})"
