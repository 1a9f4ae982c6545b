"""Where the forward of a user's own step goes wrong: the first module, or what goes into it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import (
    SUMS,
    between,
    is_told_in_part,
    issued_between,
    listed,
    places,
    right_up_to,
)
from sumgrad.diagnose.explainers.by_modules.forwards.entering import (
    what_goes_into,
    where_it_enters_wrong,
)
from sumgrad.diagnose.explainers.by_modules.forwards.hooked import changed_by_hooks
from sumgrad.diagnose.explainers.by_modules.forwards.in_between import in_between
from sumgrad.diagnose.explainers.by_modules.forwards.in_place_of import in_place_of_in_words
from sumgrad.diagnose.explainers.by_modules.forwards.misplaced import misplaced_in_words
from sumgrad.diagnose.explainers.by_modules.forwards.never_called import called_on_ranks_alone
from sumgrad.diagnose.explainers.by_modules.forwards.other_weights import (
    handed_other_weights,
    held_beside,
)
from sumgrad.diagnose.explainers.by_modules.forwards.scaled_outside import scaled_outside
from sumgrad.diagnose.explainers.by_modules.forwards.settings import is_set_otherwise
from sumgrad.diagnose.explainers.by_modules.forwards.surplus import too_much, whole_on_each
from sumgrad.diagnose.explainers.by_modules.forwards.wrong_outputs import (
    another_output,
    beyond_in_words,
    changed_in_place,
    cut_in_words,
    features_in_words,
    in_other_places,
    joined_in_words,
    no_slice,
    part_of_each_vector,
    picked_in_words,
    scaled_in_words,
)
from sumgrad.diagnose.explainers.by_modules.in_code.branches import lines_are_left_out
from sumgrad.diagnose.explainers.by_modules.in_code.called_from import called_from
from sumgrad.diagnose.explainers.by_modules.in_code.computed import lines_that_differ
from sumgrad.diagnose.explainers.by_modules.in_code.lines_of_ranks import lines_of_right_ranks
from sumgrad.diagnose.explainers.by_modules.in_code.solved import solved_in_words
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code, looked, named
from sumgrad.diagnose.explainers.by_modules.over_ranks.exchanged import collective_at_fault
from sumgrad.diagnose.explainers.by_modules.rows.handed import (
    handed_for_wrong_rows_in_words,
    handed_otherwise,
)
from sumgrad.diagnose.explainers.by_modules.rows.odd_data import OddData, odd_data
from sumgrad.diagnose.explainers.by_modules.rows.reordered import reordered_in_words
from sumgrad.diagnose.explainers.by_modules.rows.rows_used import reading
from sumgrad.diagnose.explainers.of_factors.factors import explained, only_terms_weigh_otherwise
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.inputs.lacking_data import lacking_data
from sumgrad.diagnose.modules.inputs.looked_up import rows_looked_up_there_alone
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import (
    FirstWrong,
    first_wrong_elsewhere,
    first_wrong_forward,
)
from sumgrad.diagnose.modules.where.look import Look


def forward_goes_wrong(case: Case, left: Left) -> Iterator[Explanation]:
    """An output that is no slice of the single process's, and nothing right after it."""
    look = looked(case)
    found = None if look is None else first_wrong_forward(look)
    if look is not None and found is not None and not only_terms_weigh_otherwise(case):
        yield explained(case, _with_others(look, found, _forward(case, look, found)))


def _with_others(look: Look, found: FirstWrong, diagnosis: Diagnosis) -> Diagnosis:
    """And what is wrong first on ranks where that is not."""
    others = first_wrong_elsewhere(look, found)
    if not others:
        return diagnosis
    shown = [f"{m or 'the model'} on rank {spans(ranks)}" for m, ranks in others.items()]
    ranks = tuple(sorted({*diagnosis.ranks}.union(*others.values())))
    line = f"where that is not wrong, {some_of(shown)} is: nothing wrong leads to it"
    return replace(diagnosis, ranks=ranks, because=(*diagnosis.because, line))


def _forward(case: Case, look: Look, found: FirstWrong) -> Diagnosis:
    told = any(s.forward == "right" for m in look.modules for s in look.seen[m])
    found, entered_right = where_it_enters_wrong(case, found)
    text, look_at = _start_of_forward(case, look, found)
    parts, missing = _parts_below(case, look, found)
    text += f": {missing}" if missing else ""
    text += "" if told else "; no module's output is the single process's"
    accused = None if missing else collective_at_fault(case, found, back=False)
    seen = (f"as seen from modules: {text}", no_slice(look, found))
    if accused is not None:
        because = (*accused.because, *seen)
        return Diagnosis(
            cause=accused.cause, kind=accused.kind, ranks=accused.ranks, because=because
        )
    kind = "skipped_collective" if missing else "forward"
    said = partial(Diagnosis, kind=kind, ranks=found.ranks)
    called = tuple(called_from(case, look, found, back=False))
    odd = odd_data(case, look, found)
    if _lacking_below(case, look, found) and (lacking := _lacking_data(case)):
        text = f"{text}: {lacking[0]}"
    known = next(
        _known_causes(case, look, found, text=text, seen=seen, called=called, odd=odd), None
    )
    if known is not None:
        return said(cause=known[0], because=known[1])
    joined = joined_in_words(case, look, found)
    solved = () if lines_that_differ(case) else tuple(solved_in_words(case, found))
    # What leads the report is enough to look at; a line that does, to say of lines.
    line_leads = (
        bool(solved)
        or bool(lines_that_differ(case))
        or (case.traces is not None and lines_are_left_out(case, found))
    )
    leads = line_leads or is_set_otherwise(case, found)
    because = (
        *_of_other_classes(case, look, found),
        *_in_another_mode(case, found),
        *_right_again(look, found),
        *called_on_ranks_alone(case, found),
        *handed_otherwise(case, look, found),
        *joined,
        *called,
        *(odd.said if odd else ()),
        *_output(case, look, found, () if joined or leads else look_at, enters=odd is not None),
        *held_beside(case, found.ranks),
        *_ranks_that_are_right(case, look, found, entered_right),
        *(() if joined else in_between(case, look, found, parts, leads=line_leads)),
        *reading(case),
    )
    if solved:
        return said(cause=solved[0], because=(*solved[1:], seen[0], *because))
    return said(cause=text, because=because)


def _known_causes(
    case: Case,
    look: Look,
    found: FirstWrong,
    *,
    text: str,
    seen: tuple[str, str],
    called: tuple[str, ...],
    odd: OddData | None,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Of what says by what it goes wrong, and not only where: the cause, and what shows it; the
    surest first. text: where it goes wrong; seen: as modules show it; called: from which line;
    odd: data that are others."""
    where, output = seen
    if misplaced := misplaced_in_words(case, found):
        yield misplaced[0], seen
    if moved := reordered_in_words(case, look, found):
        yield moved[0], (*called, output)
    if odd is not None and (odd.module != found.wrong or odd.is_sure):
        # What is seen further on follows from it.
        here = (*called, output) if odd.module == found.wrong else ()
        entered = f"in the forward what enters {named(look, odd.module)} is another already on some"
        yield f"{entered} ranks", (*odd.said, *here)
    if scaled := scaled_outside(case, look, found):
        yield scaled[0], seen
    if hooked := changed_by_hooks(case, look, found):
        yield hooked[0], (where, *called, output)
    if more := too_much(case, found):
        otherwise = handed_otherwise(case, look, found)
        yield f"{text}: {more.cause}", (*more.because, *otherwise, *called, output)
    other = in_place_of_in_words(case, found) or whole_on_each(case, found)
    if other := other or handed_other_weights(case, found):
        yield f"{text}: {other}", (*called, output)
    if handed := handed_for_wrong_rows_in_words(case, look, found):
        yield handed[0], (where, *called, output)


def _output(
    case: Case, look: Look, found: FirstWrong, look_at: Sequence[str], *, enters: bool
) -> Iterator[str]:
    """What the output is, and what led to it. enters: odd data enter it, which says it."""
    lacking = _lacking_below(case, look, found)
    yield from lacking
    yield from _without_a_graph(look, found)
    if not enters:
        yield no_slice(look, found)
        yield from changed_in_place(case, look, found)
        yield from another_output(case, found)
        yield from picked_in_words(case, look, found)
        yield from () if lacking else look_at
        yield from cut_in_words(case, look, found)
        yield from scaled_in_words(case, found)
        yield from features_in_words(case, found)
        yield from beyond_in_words(case, found)
        yield from in_other_places(case, found)
    below = look.paths.next_below(found.wrong, lambda m: look.forward(m) == "right")
    shared = [m for m in below if look.shared(m) and not look.paths.all_below(m)]
    if shared:
        what = some_of(shared)
        yield f"whether what {what} gives is what belongs to this rank's rows is not known"
    yield from part_of_each_vector(case, look, below)


def _ranks_that_are_right(
    case: Case, look: Look, found: FirstWrong, entered_right: Sequence[int]
) -> Iterator[str]:
    """Ranks where it, or else what goes into it, is right in every call, row by row."""
    calls = [s for s in look.seen[found.wrong] if not s.call.recomputed]
    wrong = {s.rank for s in calls if s.forward != "right" or not s.in_order}
    whole = sorted({s.rank for s in calls} - wrong)
    if entered_right:
        yield f"on rank {spans(entered_right)} what goes into it is right"
    elif whole:
        in_part = any(is_told_in_part(s) for s in calls if s.rank in whole)
        reached = ", where a gradient reaches it" if in_part else ""
        yield f"on rank {spans(whole)} it is right{reached}"
        yield from lines_of_right_ranks(case, whole, found.ranks)


def _of_other_classes(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """The first module on the way that is another thing on the wrong ranks than on others:
    something put it there."""
    traces = case.traces
    if traces is None:
        return []
    there = traces.single.classes
    wrong = [traces.ranks[rank].classes for rank in found.ranks]
    others = [trace.classes for rank, trace in traces.ranks.items() if rank not in found.ranks]
    known = {*found.beside}.union(*(look.paths.all_below(m) for m in found.modules))
    way = ({found.wrong} | look.paths.all_below(found.wrong)) - known
    for name, cls in ((n, c) for n, c in there.items() if n in way):
        own = {classes.get(name, cls) for classes in wrong}
        if cls not in own and any(classes.get(name) == cls for classes in others):
            return [f"{name or 'the model'} is a {some_of(sorted(own))} on rank "
                    f"{spans(found.ranks)}, and a {cls} in the single process: something puts "
                    f"another module there"]  # fmt: skip
    return []


def _in_another_mode(case: Case, found: FirstWrong) -> list[str]:
    """Where what goes into a module is right, and it is called in another mode."""
    traces = case.traces
    if traces is None or what_goes_into(case, found) != "right":
        return []
    here = {mode for rank in found.ranks for mode in traces.ranks[rank].modes.get(found.wrong, ())}
    there = {*traces.single.modes.get(found.wrong, ())}
    if not here or not there or here <= there:
        return []
    return [f"it is in {' and in '.join(sorted(here))} mode there, and in "
            f"{' and in '.join(sorted(there))} mode in the single process"]  # fmt: skip


def _right_again(look: Look, found: FirstWrong) -> list[str]:
    """Where a checkpoint computes it again, and then it is right."""
    again = [s for s in look.seen[found.wrong] if s.rank in found.ranks and s.call.recomputed]
    if not again or any(s.forward != "right" for s in again):
        return []
    ranks = sorted({s.rank for s in again})
    return [f"on rank {spans(ranks)} it is computed again in the backward, and is right then: look "
            f"at what differs between the two (no_grad, a mode, a state)"]  # fmt: skip


def _lacking_below(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """The first of the modules before it that gives the single process more than all ranks
    together: what they gave is right, and it is not all."""
    below = look.paths.all_below(found.wrong)
    module = next((m for m in look.modules if m in below and m in look.lacking), None)
    if module is None:
        return []
    rows = rows_looked_up_there_alone(case.traces, module) if case.traces is not None else None
    these = f" (rows {spans(rows)} of {module}.weight)" if rows else ""
    return [
        f"before it, some of what {named(look, module)} gives the single process was found on no "
        f"rank{these}: look at what is handed to it, which rows or parts of them"
    ]


@as_a_hint
def _lacking_data(case: Case) -> list[str]:
    """Which data these may be, of the first call that lacks some."""
    found = [] if case.traces is None else [*lacking_data(case.traces)]
    if not found:
        return []
    one = found[0]
    made = f", made at {line_and_code(*one.made)}" if one.made[0] else ""
    more = sum((o.module, o.argument) == (one.module, one.argument) for o in found[1:])
    also = f", and so in {more} more call{'s' if more > 1 else ''}" if more else ""
    what = one.module or "the model"
    return [f"of what {what} is handed as {one.argument}, a part on each rank{made}, {one.missing} "
            f"of {one.of} are on no rank in call {one.call}{also}"]  # fmt: skip


def _without_a_graph(look: Look, found: FirstWrong) -> list[str]:
    """The first module before it that is wrong, too, and that no gradient passes, as one that makes
    positions: no way leads from it to what is right."""
    for module in look.modules[: look.modules.index(found.wrong)]:
        calls = [s for s in look.seen[module] if not s.call.recomputed]
        wrong = tuple(s for s in calls if s.forward == "wrong")
        if wrong and all(s.call.operation_back is None for s in calls):
            return [
                f"{named(look, module)}, which runs before it and no gradient passes, gives what "
                f"it gives nowhere in the single process, too: {places(wrong)}"
            ]
    return []


def _parts_below(case: Case, look: Look, found: FirstWrong) -> tuple[list[str], str]:
    """What it is made from that is there in parts, and what is issued next; and which sum is
    missing, if nothing is."""
    near = look.paths.next_below(found.wrong, lambda m: look.forward(m) in ("right", "part"))
    parts = sorted((m for m in near if look.forward(m) == "part"), key=look.modules.index)
    if not parts:
        return [], ""
    last = parts[-1]
    axis = next(s.axis for s in look.seen[last] if s.forward == "part")
    told = f"what {some_of(parts)} gives is a part on each rank, whole only when summed over {axis}"
    # A wrapper's own sum is issued before the hooks see what its module gives.
    before = look.paths.next_below(last, lambda m: look.forward(m) == "right") or (last,)
    since = replace(found, beside=tuple(sorted(before, key=look.modules.index)))
    issued = issued_between(case, since, back=False)
    words = [told, *between(case, since, back=False)]
    if issued is not None and not issued:
        later = _summed_later(case, look, found)
        if not later:
            return words, f"the sum over {axis} of what {named(look, last)} gives is missing"
        words.append(f"only after it rank {found.seen[0].rank} issues {later}: what is added to a "
                     f"part before it is summed counts on every rank")  # fmt: skip
    if issued:
        words.append(
            "look whether their result is what goes on, whether it is there in time, and whether "
            "something whole, as a bias, is added to the parts before"
        )
    return words, ""


def _summed_later(case: Case, look: Look, found: FirstWrong) -> str:
    """The first sum that a rank issues between what is wrong and what is made from it, in words."""
    s, traces = found.seen[0], case.traces
    above = look.paths.next_above(found.wrong, look.seen.__contains__)
    then = [x.call.operation for m in above for x in look.seen.get(m, ())
            if x.rank == s.rank and x.call.number == s.call.number]  # fmt: skip
    end = min(then) if then else s.call.operation_back
    issued = () if traces is None else traces.ranks[s.rank].operations[s.call.operation : end]
    return next((words for words in issued if words.startswith(SUMS)), "")


def _start_of_forward(case: Case, look: Look, found: FirstWrong) -> tuple[str, list[str]]:
    """In words: the module, or what goes into it, and where to look."""
    near, at = listed(look, found.beside), named(look, found.wrong)
    called, ranks = found.wrong or "the model", f"on rank {spans(found.ranks)}"
    into = what_goes_into(case, found)
    extra: list[str] = []
    if not near and _is_the_lesser_part(found.seen):
        reached = all(s.call.operation_back is not None for s in found.seen)
        extra = [] if reached else [
            "these may be halos, ghosts or padding that are right to differ: then they must not "
            "count in the loss, and what follows from them is wrong"
        ]  # fmt: skip
        if into == "wrong":
            return (f"some of what goes into {at} is nothing that goes into it in the single "
                    f"process {ranks}", extra)  # fmt: skip
    known = right_up_to(look, found)
    start = f"{known};" if known else "in the forward"
    if into == "right":
        text = f"{start} it" if known else "the forward"
        text += f" goes wrong in {at} {ranks}"
        handed = case.traces is not None and any(
            found.wrong in case.traces.ranks[rank].entered for rank in found.ranks
        )
        given = ", at whole numbers that it is given" if handed else ""
        where = (f"all vectors of other than whole numbers that go into it are found in what goes "
                 f"into it in the single process: look at its forward{given}, or at what belongs "
                 f"where in that")  # fmt: skip
    elif into == "wrong":
        text = f"{start} what goes into {at} is wrong already {ranks}"
        where = (f"look between the output of {near} and the call of {called}" if near
                 else f"look at what is handed to {called}")  # fmt: skip
    else:
        text, where = f"{start} the output of {at} is wrong {ranks}", ""
    if not near and not look.paths.next_below(found.wrong, lambda m: look.forward(m) == "right"):
        text += "; no module that leads to it is known to be right"
    return text, [line for line in (where, *extra) if line]


def _is_the_lesser_part(seen: Sequence[Seen]) -> bool:
    """Of each call's vectors less than all are wrong."""
    return all(s.wrong is not None and len(s.wrong) < math.prod(s.shape[:-1]) for s in seen)
