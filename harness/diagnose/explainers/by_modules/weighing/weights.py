"""How rows, tokens and terms are weighed where the loss meets the last module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.passed import (
    has_functions_between,
    own_functions_between,
)
from sumgrad.diagnose.explainers.by_modules.in_code.called_from import odd_calls_come_from
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    fraction_of,
    line_and_code,
    line_in_its_function,
    looked_by_rows,
    named,
    owners,
    predicts,
)
from sumgrad.diagnose.explainers.by_modules.weighing.losses import ddp_divides_by
from sumgrad.diagnose.explainers.by_modules.weighing.of_the_batch import field_with_these
from sumgrad.diagnose.explainers.by_modules.weighing.weighed import shares_in_words
from sumgrad.diagnose.explainers.of_factors.factors import (
    explained,
    fitted,
    in_the_gradients,
    only_terms_weigh_otherwise,
)
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.in_code.factor_tensors import ROOT, SQUARE, lines_with_these_factors
from sumgrad.diagnose.modules.in_code.lost_by import line_that_leaves_out
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong, first_wrong_backward
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.modules.where.loss_weights import (
    Share,
    behind_few_directions,
    never_enters,
    odd_vectors,
    places_of,
    row_weights,
    same,
    shares_at_the_loss,
    shares_of_term,
    usual_factor,
)
from sumgrad.diagnose.names import factor_symbols
from sumgrad.record.trace import LOSS

LOCAL_COUNTS = ("every rank divides by its own ", "each rank divides by the count of some")
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
    words = "it never enters it" if lost else shares_in_words(case, shares, term)
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
                else f"so weighed is its gradient where it reaches {named(look, module)}"
                f"{_before_ddp(case)}",
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
        size = ddp_divides_by(case)
        later = [f"DDP divides by {size} later"] if size > 1 else []
        yield explained(case, replace(narrow, because=(*narrow.because, *later, *own)))
        return
    words = shares_in_words(case, shares)
    if words is None or _is_made_good(case, look, shares):
        return
    weights = row_weights(shares, case.record.spec.facts.num_rows)
    proved = weights is not None and predicts(case, weights)
    yield explained(
        case,
        Diagnosis(
            cause=words,
            kind="local_count" if words.startswith(LOCAL_COUNTS) else "loss_weights",
            standing="proved" if proved else "likely",
            ranks=_odd_ranks(shares),
            because=(
                *_as_a_field(case, shares),
                *_left_out_by(case, shares),
                *_as_lines_give(case, shares),
                *_whence(case, look, module, shares),
                f"so weighed is the gradient that reaches {named(look, module)}{_before_ddp(case)}",
                "the rows' gradients with these weights add up to what was measured, up to one "
                "factor on all of them"
                if proved
                else "whether these weights alone make the measured gradient is not known",
                *in_the_gradients(case),
            ),
        ),
    )


def _as_a_field(case: Case, shares: Sequence[Share]) -> list[str]:
    traces = case.traces
    field = None if traces is None else field_with_these(traces.single.batch, shares)
    return [field] if field else []


@as_a_hint
def _left_out_by(case: Case, shares: Sequence[Share]) -> list[str]:
    """Of tokens whose gradient is lost, the line that leaves them out."""
    c = None if case.traces is None else line_that_leaves_out(case.traces, shares)
    if c is None:
        return []
    where = line_in_its_function(c.line, c.code, c.within)
    return [f"what {where} gives is zero, or False, for those that are lost, and not for any other"]


@as_a_hint
def _as_lines_give(case: Case, shares: Sequence[Share]) -> list[str]:
    """What a line gives by which these factors are told."""
    found = None if case.traces is None else lines_with_these_factors(case.traces, shares)
    if found is None:
        return []
    parts = [(found.mine, found.up, ""), (found.theirs, found.theirs_up, " in the single process")]
    told = [(f"what {line_and_code(c.line, c.code)} gives{where}", up)
            for c, up, where in parts if c is not None]  # fmt: skip
    above, below = (" times ".join(t for t, up in told if up is way) for way in (True, False))
    made = f"{above or 'one'} over {below}" if below else above
    of = {ROOT: "the square root of ", SQUARE: "the square of "}.get(found.power, "")
    return [f"but for one number that all have, these factors are {of}{made}, at the same rows and "
            f"places: look at how that enters the loss"]  # fmt: skip


def _is_made_good(case: Case, look: Look, shares: Sequence[Share]) -> bool:
    """Whether the last module that has parameters of its own, and gets a gradient from calls that
    all have other factors, has them right: what follows makes up for these, as a running mean."""
    factors = [s.factor for s in shares]
    if None in factors or len({s.rank for s in shares}) < 2 or same([f or 0.0 for f in factors]):
        return False
    wrong = {cell.name for cell in case.failing_cells}
    for module in reversed(look.modules):
        own = [c for c in case.cells if c.name.rpartition(".")[0] == module and module]
        if own:
            seen = {(s.rank, s.call.number) for s in look.seen[module] if not s.call.recomputed}
            every = {(s.rank, s.number) for s in shares} <= seen
            live = [c for c in own if bool(c.measured.any())]
            return every and bool(live) and not any(c.name in wrong for c in own)
    return False


def _whence(case: Case, look: Look, module: str, shares: Sequence[Share]) -> list[str]:
    """The line that the calls come from which have another factor than most."""
    usual = usual_factor(shares)
    if usual is None or any(s.factor is None for s in shares):
        return []
    odd = {(s.rank, s.number) for s in shares if not same([s.factor or 0.0, usual])}
    calls = [s for s in look.seen[module] if not s.call.recomputed]
    mine = [s for s in calls if (s.rank, s.call.number) in odd]
    others = [s for s in calls if (s.rank, s.call.number) not in odd]
    found = odd_calls_come_from(case, mine, others)
    return [f"all calls with another factor than {fraction_of(usual)} {text}" for text in found]


def _before_ddp(case: Case) -> str:
    """A right loss has the factor of its ranks there, where DDP divides by them later."""
    size = ddp_divides_by(case)
    return f", before DDP divides by {size}" if size > 1 else ""


def _odd_ranks(shares: Sequence[Share]) -> tuple[int, ...]:
    """Those where not all rows or tokens have the usual factor; all where there is none."""
    usual = usual_factor(shares)
    differ = any(s.factor is None for s in shares)  # within one call
    odd = {s.rank for s in shares if usual is not None and differ and odd_vectors(s, usual)}
    return tuple(sorted(odd or {s.rank for s in shares}))


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
            f"what {module or 'the model'} gives in those calls is right; what follows it, up to "
            f"the loss, has another gradient there, or gives a part of it only"
        ]
    else:
        cause = (
            f"{term or 'the loss'} has another gradient than in loss_sum at some tokens: {shown}"
        )
        because = [
            f"what {named(look, head)} gives in those calls is right, and a number or two a token: "
            f"a wrong target, a weight and a second path into the loss all look like a factor there"
        ]
    if usual is not None:
        because.append("at all other places of these calls its gradient is right, up to one factor")
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
    others: dict[int, list[int]] = {}  # calls with such vectors, beside the one that is told
    several = len({s.number for s in shares}) > 1
    for s in shares:
        odd = odd_vectors(s, 1.0 if usual is None else usual)
        if not odd:
            continue
        if usual is None:
            factors = [*s.vectors.values()]
            words = f"factors such as {min(factors):.6g} and {max(factors):.6g}"
        else:
            words = f"at {places_of(s, odd)}"
        if s.rank not in out:
            out[s.rank] = words + (f" in call {s.number}" if several else "")
        else:
            others.setdefault(s.rank, []).append(s.number)
    for rank, calls in others.items():
        out[rank] += f", and others in call {spans(sorted(calls))}"
    return out


def _many_factors(share: Share) -> bool:
    """Whether its vectors have more factors than people give weights."""
    return share.factor is None and len({fraction_of(f) for f in share.vectors.values()}) > (
        MOST_WEIGHTS
    )
