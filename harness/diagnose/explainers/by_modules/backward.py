"""Where the backward of a user's own step goes wrong: a module, what lies between two, the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.handed_in_parts import handed_in_parts
from sumgrad.diagnose.explainers.by_modules.backwards.missing_sum import lacking_sum
from sumgrad.diagnose.explainers.by_modules.backwards.passed import (
    only_function_between,
    wrong_functions_between,
)
from sumgrad.diagnose.explainers.by_modules.backwards.way_back import in_some_calls, terms_there
from sumgrad.diagnose.explainers.by_modules.backwards.way_shown import (
    evidence,
    handed,
    product_of_another_call,
    right_ends,
    starts_there,
)
from sumgrad.diagnose.explainers.by_modules.between import is_in, listed, places, told_of
from sumgrad.diagnose.explainers.by_modules.forwards.other_weights import (
    weights_in_words,
    weights_there,
)
from sumgrad.diagnose.explainers.by_modules.forwards.surplus import too_much_back
from sumgrad.diagnose.explainers.by_modules.in_code.brought import right_as_a_sum
from sumgrad.diagnose.explainers.by_modules.in_code.called_from import (
    called_from,
    without_modules_not_entered,
)
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    looked,
    named,
    ordinals,
    owners,
)
from sumgrad.diagnose.explainers.by_modules.over_ranks.exchanged import collective_at_fault
from sumgrad.diagnose.explainers.by_modules.rows.rows_used import uneven_rows
from sumgrad.diagnose.explainers.of_factors.factors import (
    explained,
    fitted,
    only_terms_weigh_otherwise,
)
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.values.seen import COARSE, TOLERANCES, Seen, constant
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.diagnose.modules.where.first_wrong import (
    FirstWrong,
    first_wrong_backward,
    first_wrong_forward,
)
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.modules.where.loss_weights import same
from sumgrad.diagnose.names import group_symbols


def backward_goes_wrong(case: Case, left: Left) -> Iterator[Explanation]:
    """A gradient that is not right any more at some module, and at none further down."""
    look = looked(case)
    if look is None or first_wrong_forward(look) is not None:
        return
    found = first_wrong_backward(look, owners(case))
    if found is None or _is_made_up_for(case, look, found):
        return
    uneven = None if found.modules else uneven_rows(case)
    if not found.modules and only_terms_weigh_otherwise(case):
        return  # that says all of it
    found = without_modules_not_entered(case, found)
    yield explained(case, uneven[0] if uneven else _backward(case, look, found))


def _is_made_up_for(case: Case, look: Look, found: FirstWrong) -> bool:
    """Whether what is off by one factor in all calls ends in gradients of which those of some rows
    are right, others are not, and none has that factor: the ranks multiply elsewhere, as by hooks
    of parameters."""
    ratio = _factor(found)
    factors = None if ratio is None else fitted(case)
    calls = [s for s in look.seen[found.wrong] if s.rank in found.ranks]
    if ratio is None or factors is None or len(calls) > len(found.seen):
        return False
    values = [v for _, one in factors[1] for v in one.known]
    none = not any(same([v, ratio]) for v in values)
    return none and not same([*values, 1.0]) and any(same([v, 1.0]) for v in values)


def _backward(case: Case, look: Look, found: FirstWrong) -> Diagnosis:
    above = _listed_by_output(look, found.modules)
    factor = _factor(found)
    shown = None if factor is None else fraction_of(factor)
    symbols = [] if factor is None else group_symbols(case, factor)
    cause = _what_is_wrong(look, found, above)
    cause += f", which equals {symbols[0]}" if symbols else ""
    weights = weights_there(case, found.modules, "backward")
    ends = right_ends(case, look, found)
    only = only_function_between(case, found, ends)
    functions = wrong_functions_between(case, found, ends)
    if functions and functions.said:
        cause += f": {functions.said}"
    elif only and found.ratio is None:
        cause += f": nothing computes between the two but {only}"
    in_parts = "" if weights else handed_in_parts(case, look, found)
    known = bool(in_parts) or bool(functions and functions.said)
    kind, ranks = "backward", found.ranks
    if weights:
        kind = "gathered_weights"
        held, how_they_are = weights_in_words(weights)
        cause += f"; in the backward {held} is not the model's"
        because = [
            *how_they_are,
            "look at what changes it, or gathers it again, before the backward",
        ]
    else:
        because = [
            *called_from(case, look, found, back=True),
            *handed(case, found),
            *product_of_another_call(case, look, found),
            *(functions.because if functions else ()),
            *evidence(case, look, found, above, known=known),
        ]
    text = _what_is_right(look, found, above) + cause + terms_there(look, found)
    if not weights and (lacking := lacking_sum(case, look, found)):
        kind, text = "skipped_collective", f"{text}: {lacking.cause}"
        return Diagnosis(cause=text, kind=kind, ranks=ranks, because=lacking.because)
    if not weights and (parts := _sent_in_parts(case, found)):
        kind, text = "skipped_collective", f"{text}: {parts[0]}"
    elif in_parts:
        kind, text = "skipped_collective", f"{text}: {in_parts}"
    elif not weights and found.ratio is None and (more := too_much_back(case, look, found)):
        text = f"{text}: {more}"
    accused = None if weights else collective_at_fault(case, found, back=True)
    if accused is not None:
        told = found.ratio is None and not found.over_all and not found.lost
        seen = [f"wrong there: {places(found.seen)}"] if told else []
        because = [*accused.because, f"as seen from modules: {text}", *seen]
        kind, text, ranks = accused.kind, accused.cause, accused.ranks
    return Diagnosis(
        cause=text,
        kind=kind,
        ranks=ranks,
        factor=shown,
        symbol=symbols[0] if symbols else None,
        because=tuple(because),
    )


def _factor(found: FirstWrong) -> float | None:
    """What it is off by, where that is all."""
    return None if found.over_all or found.lost or found.emptied else found.ratio


def _what_is_wrong(look: Look, found: FirstWrong, above: str) -> str:
    """The gradient of what is wrong first, in words, and whether it is off by one factor."""
    at, ranks = named(look, found.wrong), f"on rank {spans(found.ranks)}"
    what = f"the gradient that reaches the output of {at}"
    what += ", which goes into it," if above else ""
    arrivals = {s.call.arrivals for s in found.seen}
    if max(arrivals) > 1:
        what += "" if above else ","
        often = f"the {max(arrivals)}" if len(arrivals) == 1 else "all"
        what += f" summed over {often} backwards that reach it,"
    if found.over_all:
        return f"{what.removesuffix(',')}, summed over all ranks and calls, is wrong"
    if found.lost:
        return f"no gradient reaches the output of {at} {ranks}{in_some_calls(look, found)}"
    if found.emptied:
        return f"no gradient reaches a part of the output of {at} {ranks}"
    names = some_of([module or "the model itself" for module in found.modules])
    measured = f", measured by what reaches {names}," if above else ""
    if found.by_vector:
        return (f"{what} is{measured} that of the single process but for a factor of its own in "
                f"each vector {ranks}")  # fmt: skip
    if found.ratio is None:
        return f"{what} is wrong {ranks}"
    times = fraction_of(found.ratio)
    return f"{what} is{measured} {times} times that of the single process {ranks}"


def _sent_in_parts(case: Case, found: FirstWrong) -> list[str]:
    """Of such a gradient, that what was sent is a part, if it is."""
    s, traces = told_of(found.seen), case.traces
    if traces is None or starts_there(case, found) is None:
        return []
    whole = by_module(traces.single, found.wrong.__eq__).get((found.wrong, s.call.part))
    tolerance = TOLERANCES.get(case.record.spec.tiers[case.tier], COARSE)
    if whole is None:
        return []
    return right_as_a_sum(
        case, s.rank, traces.ranks[s.rank].gradient_of(s.call), whole.gradients, tolerance
    )


def _listed_by_output(look: Look, modules: Sequence[str]) -> str:
    """As `listed`, with which outputs are right where not all of several could be compared."""
    text = listed(look, modules)
    for module in (m for m in modules if m and not any(is_in(other, m) for other in modules)):
        parts = {s.call.part for s in look.seen[module]}
        right = {s.call.part for s in look.seen[module] if s.backward == "right"}
        if right and right < parts:
            text += (f" (of {module}'s {len(parts)} outputs the "
                     f"{ordinals(right)} alone could be compared)")  # fmt: skip
    return text


def _what_is_right(look: Look, found: FirstWrong, above: str) -> str:
    """The forward, and the backward down to the modules `above`."""
    told = sum(look.forward(module) == "right" for module in look.modules)
    head = f"the forward is right in all {told} modules that could be compared; "
    if look.lacking:
        head = (
            f"some of what {named(look, look.lacking[0])} gives the single process is on no "
            f"rank (padding that is cut off, or a pass that is missing or another); "
        )
    if above:
        return f"{head}the backward is right{_but_for_factors(look, found)} down to {above}; "
    return f"{head}what follows them, up to the loss, is another or has another gradient: "


def _but_for_factors(look: Look, found: FirstWrong) -> str:
    """Where vectors of one call have factors of their own there, which nothing explains, or all
    calls of a rank one that others do not have."""
    right = [s for m in found.modules for s in look.seen[m]
             if s.backward == "right" and s.factors is not None]  # fmt: skip
    one = next((s for s in right if constant(s.factors) is None), None)
    told = None if one is None or one.factors is None else one.factors[~one.factors.isnan()]
    if one is None:
        return _but_for_ranks(right)
    if told is None or not len(told):
        return ""
    low, high = fraction_of(float(told.min())), fraction_of(float(told.max()))
    where = f"on rank {one.rank} in call {one.call.number}"
    return f" but for factors of single vectors, of {low} to {high} {where},"


def _but_for_ranks(right: Sequence[Seen]) -> str:
    of_ranks: dict[int, list[float]] = {}
    for s in right:
        factor = constant(s.factors)
        if factor is not None:
            of_ranks.setdefault(s.rank, []).append(factor)
    if any(not same(own) for own in of_ranks.values()):
        return ""  # micro-batches may have some, too
    by_factor: dict[str, list[int]] = {}
    for rank, own in sorted(of_ranks.items()):
        by_factor.setdefault(fraction_of(own[0]), []).append(rank)
    if len(by_factor) < 2:
        return ""
    told = ", ".join(f"{factor} on rank {spans(ranks)}" for factor, ranks in by_factor.items())
    return f" but for one factor on each rank, {told},"
