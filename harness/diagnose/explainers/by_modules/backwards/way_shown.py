"""What shows where a backward goes wrong, and what lies on the way: where to look, in words."""

from __future__ import annotations

from collections.abc import Iterator

from sumgrad.base.outcome import some_of
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.gathered_twice import vectors_twice
from sumgrad.diagnose.explainers.by_modules.backwards.gradient_of_others import (
    has_none_there,
    is_zero,
    lost_on_the_way,
    of_other_places,
    of_other_targets,
)
from sumgrad.diagnose.explainers.by_modules.backwards.how_it_is_off import (
    off_at_a_line,
    off_at_a_module,
)
from sumgrad.diagnose.explainers.by_modules.backwards.others_there import the_others, zero_on_others
from sumgrad.diagnose.explainers.by_modules.backwards.own_backward import saved_in_words
from sumgrad.diagnose.explainers.by_modules.backwards.passed import (
    has_functions_between,
    lacking_there,
    own_functions_between,
)
from sumgrad.diagnose.explainers.by_modules.backwards.way_back import (
    outputs_used_otherwise,
    parts_between,
    parts_of_output,
    untold_between,
)
from sumgrad.diagnose.explainers.by_modules.between import between, listed, places, told_of
from sumgrad.diagnose.explainers.by_modules.forwards.never_called import never_called
from sumgrad.diagnose.explainers.by_modules.in_code.brought import made_on_another_rank
from sumgrad.diagnose.explainers.by_modules.in_code.called_from import line_of_wrong_calls
from sumgrad.diagnose.explainers.by_modules.in_code.computed import lines_that_differ
from sumgrad.diagnose.explainers.by_modules.in_code.lines import (
    first_lines,
    in_words,
    into_the_loss,
    known_lines,
)
from sumgrad.diagnose.explainers.by_modules.in_code.recomputed import (
    is_computed_again,
    without_a_first_graph,
)
from sumgrad.diagnose.explainers.by_modules.looked import gone_into, line_and_code, named, owners
from sumgrad.diagnose.explainers.by_modules.over_ranks.same_put_in import same_put_in
from sumgrad.diagnose.explainers.by_modules.weighing.losses import (
    ddp_divides_by,
    losses_beside,
    options_of_losses,
)
from sumgrad.diagnose.explainers.of_factors.factors import in_the_gradients
from sumgrad.diagnose.modules.values.seen import State, constant
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.modules.where.loss_weights import same
from sumgrad.record.trace import INTO, LOSS, Started


def evidence(
    case: Case, look: Look, found: FirstWrong, above: str, *, known: bool
) -> Iterator[str]:
    """Which vectors, where to look, and what lies there. known: the cause says where."""
    beside = parts_between(look, found, near=True)
    right = [m for m in look.modules if look.forward(m) == "right"]
    wrong = () if above else [c.name for c in case.failing_cells]
    yield from never_called(case.record, wrong, right=right)
    if lost := lost_on_the_way(case, look, found):
        yield from lost  # in full: no line and no collective between the modules is at fault
        yield from parts_of_output(look, found)
        return
    yield from () if case.traces is None else outputs_used_otherwise(case.traces, found)
    yield from () if above else options_of_losses(case)
    # A line says where to look by itself; what else may lie between the two is no news then.
    lines = first_lines(case, found, back=True)
    twice = [] if above else vectors_twice(case, found.ranks)
    yield from twice
    is_told = known or bool(twice) or bool(lines) or (not above and bool(lines_that_differ(case)))
    yield from in_words(lines)
    yield from off_at_a_line(known_lines(case), [one for one in lines if one.back])
    yield from beside
    again, unwanted = is_computed_again(look, found), has_none_there(case, found)
    yield from () if is_told else without_a_first_graph(look, found)
    yield from () if again else lacking_there(case, found, right_ends(case, look, found))
    if not found.lost and not found.ratio and not found.over_all:
        least = "at least " if len(look.terms) > 1 else ""  # the rest fits factors of several terms
        what = "without one" if found.emptied else "seen to be wrong by more than a factor"
        yield _factors(found) if found.by_vector else f"{what}: {least}{places(found.seen)}"
        if not found.emptied and is_zero(case, found):
            yield "there it is zero, as where none is sent or received, or a buffer is not filled"
        elif unwanted:
            yield "there the single process has no gradient"
        yield from of_other_places(case, look, found)
        yield from off_at_a_module(case, found)
        yield from the_others(found, ddp_divides_by(case)) if len(look.terms) < 2 else ()
        yield from zero_on_others(look, found)
        if not above:
            yield from of_other_targets(case, look, found)
    if max(s.call.arrivals for s in found.seen) > 1:
        yield ("where a step discards or overwrites what one of these backwards gives, it is right "
               "to have more there: then look at what is kept")  # fmt: skip
    yield from parts_of_output(look, found)
    yield from _walked_again(look, found)
    if not is_told:
        yield from _where_to_look(case, look, found, above, again=again, unwanted=unwanted)
        yield from () if beside else parts_between(look, found)
    yield from in_the_gradients(case)


def _factors(found: FirstWrong) -> str:
    """Of the first call where vectors have factors of their own."""
    s = found.seen[0]
    assert s.factors is not None
    told = s.factors[~s.factors.isnan()]
    low, high = (f"{float(end):.6g}" for end in (told.min(), told.max()))
    return f"for one, from {low} to {high} on rank {s.rank} in call {s.call.number}"


def _where_to_look(
    case: Case, look: Look, found: FirstWrong, above: str, *, again: bool, unwanted: bool
) -> Iterator[str]:
    """What lies between what is right and what is wrong, where no line is known. unwanted: it is
    wrong where the single process has no gradient."""
    if handed(case, found):
        yield f"look at how it is brought there from the backward of {above or 'the loss'}"
        yield from between(case, found, back=True)
        return
    yield from same_put_in(case, found)
    towards = _towards(case, look, found) if above else (
        f"what follows {named(look, found.wrong)}: the loss, and its backward")  # fmt: skip
    yield from () if above else into_the_loss(case, found)
    loss = above and len(found.modules) < len(found.beside)
    yield f"look at {towards}" + (", and at what else uses it, up to the loss" if loss else "")
    ends = right_ends(case, look, found)
    if not line_of_wrong_calls(case, look, found, back=True):  # the way is that of other calls, too
        yield from own_functions_between(case, found, ends, again=again, unwanted=unwanted)
    if not above:
        yield from losses_beside(case)
    yield from _own_gradients(case, look, found)
    yield from untold_between(look, found)
    yield from between(case, found, back=True)


def handed(case: Case, found: FirstWrong) -> list[str]:
    """Where the gradient of the call that is told of is not autograd's: a line hands it on."""
    s, at = told_of(found.seen), starts_there(case, found)
    if case.traces is None or at is None:
        return []
    gradient = case.traces.ranks[s.rank].gradient_of(s.call)
    made = "" if at.made == at.line else f", made at {line_and_code(*at.made)}"
    return [f"on rank {s.rank} in call {s.call.number} {line_and_code(*at.line)} hands this "
            f"gradient to autograd{made}",
            *made_on_another_rank(case.traces, s.rank, gradient)]  # fmt: skip


def starts_there(case: Case, found: FirstWrong) -> Started | None:
    """The backward that starts at the call that is told of."""
    s, traces = told_of(found.seen), case.traces
    trace = None if traces is None else traces.ranks[s.rank]
    started = () if trace is None else trace.started
    return next((one for one in started if trace and trace.calls[one.call] == s.call), None)


def _walked_again(look: Look, found: FirstWrong) -> list[str]:
    """Where it is a whole number of times what it should be, and what it is made from was walked
    through so often."""
    times = round(found.ratio) if found.ratio is not None else 0
    again = [m for m in found.modules if any(s.call.again == times - 1 for s in look.seen[m])]
    if times < 2 or not again:
        return []
    return [f"the same gradient came {times} times to the output of {some_of(again)}: a second "
            f"backward through the same graph adds all of it again"]  # fmt: skip


def _own_gradients(case: Case, look: Look, found: FirstWrong) -> Iterator[str]:
    odd = _with_own_wrong(case, look, found)
    if odd and max(s.call.arrivals for s in found.seen) < 2:
        names = [c.name for c in case.failing_cells if c.name.rpartition(".")[0] in odd]
        yield (f"what reaches {some_of(odd)} is right where it is called, and the gradient of "
               f"{some_of(list(dict.fromkeys(names)))} is wrong: look at what its backward uses, "
               f"and at other uses of the parameter")  # fmt: skip


def product_of_another_call(case: Case, look: Look, found: FirstWrong) -> list[str]:
    odd = _with_own_wrong(case, look, found)
    return list(saved_in_words(case, [f"{m}.weight" for m in odd]))


def _with_own_wrong(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Modules of torch's own that are right at their outputs, and whose parameters are not."""
    wrong = {*owners(case)}
    return [m for m in found.modules if m in wrong and " at " not in look.sources.get(m, " at ")
            and {s.backward for s in look.seen[m]} == {"right"}
            and not any(s.call.again for s in look.seen[m])]  # fmt: skip


def _towards(case: Case, look: Look, found: FirstWrong) -> str:
    """Where to look: in the backward of the right modules, or between them and the wrong one."""
    at, above = named(look, found.wrong), listed(look, found.modules)
    states = {m: _gradient_that_leaves(case, look, found, m) for m in found.modules}
    if all(state == "right" for state in states.values()):
        return (f"what runs between {at} and {above}: the gradient of what goes into "
                f"{some_of(list(states))} is right")  # fmt: skip
    wrong = [m for m, state in states.items() if state == "wrong"]
    if len(wrong) < len(states):
        return f"the backward of {above}, and of what runs between {at} and there"
    text = f"the backward of {above}"
    if not any(" at " in look.sources.get(m, "") for m in wrong):
        text += ", which is torch's own, and at what else uses what goes into it"
    return text


def right_ends(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Where the gradient is right still, on every way."""
    states = {m: _gradient_that_leaves(case, look, found, m) for m in found.modules}
    ends = [f"{INTO}{m}" if state == "right" else m for m, state in states.items()]
    return [*ends, LOSS] if len(ends) < len(found.beside) or not ends else ends


def _gradient_that_leaves(case: Case, look: Look, found: FirstWrong, module: str) -> State:
    """Whether what goes into a module ends up with the right gradient, on the wrong ranks."""
    into = [s for s in gone_into(case, module) if s.rank in found.ranks and s.backward != "untold"]
    if not into or {s.rank for s in into} != {*found.ranks}:
        return "untold"
    if any(s.backward == "wrong" for s in into):
        # What another function made of it may have its gradient in parts, as beside a halo.
        return "untold" if has_functions_between(case, found, f"{INTO}{module}") else "wrong"
    if found.ratio is None and all(s.backward == "right" for s in into):
        return "right"
    here = {constant(s.factors) for s in into}
    there = {constant(s.factors) for s in look.seen[module] if s.rank in found.ranks
             and s.backward == "right"}  # fmt: skip
    if any(s.backward == "part" for s in into) or None in here or len(here | there) > 2:
        return "untold"
    values = [f for f in (*here, *there) if f is not None]
    return "right" if values and same(values) else "untold"
