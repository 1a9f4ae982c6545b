"""Where the forward of a user's own step goes wrong: the first module, or what goes into it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import (
    between,
    issued_between,
    listed,
    places,
    right_up_to,
)
from sumgrad.diagnose.explainers.by_modules.computed import lines_that_differ
from sumgrad.diagnose.explainers.by_modules.exchanged import collective_at_fault
from sumgrad.diagnose.explainers.by_modules.handed import handed_otherwise
from sumgrad.diagnose.explainers.by_modules.lines import first_lines, in_words
from sumgrad.diagnose.explainers.by_modules.looked import gone_into, looked, named, traces_looked_at
from sumgrad.diagnose.explainers.by_modules.misplaced import misplaced_in_words
from sumgrad.diagnose.explainers.by_modules.odd_data import odd_data
from sumgrad.diagnose.explainers.by_modules.passed import lines_between
from sumgrad.diagnose.explainers.by_modules.rows_used import reading
from sumgrad.diagnose.explainers.factors import explained, only_terms_weigh_otherwise
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.elsewhere import numbers_elsewhere
from sumgrad.diagnose.modules.features import wrong_features
from sumgrad.diagnose.modules.first_wrong import FirstWrong, first_wrong_forward
from sumgrad.diagnose.modules.look import Look
from sumgrad.diagnose.modules.matching import match, vectors
from sumgrad.diagnose.modules.picked import picked_otherwise
from sumgrad.diagnose.modules.seen import TOLERANCES, Seen, State
from sumgrad.diagnose.modules.sequences import joined_rows
from sumgrad.diagnose.modules.whole import Whole, by_module
from sumgrad.record.trace import INTO, Traces

SUMS = ("allreduce", "reduce_scatter", "_reduce_scatter")


def forward_goes_wrong(case: Case, left: Left) -> Iterator[Explanation]:
    """An output that is no slice of the single process's, and nothing right after it."""
    look = looked(case)
    found = None if look is None else first_wrong_forward(look)
    if look is not None and found is not None and not only_terms_weigh_otherwise(case):
        yield explained(case, _forward(case, look, found))


def _forward(case: Case, look: Look, found: FirstWrong) -> Diagnosis:
    told = any(s.forward == "right" for m in look.modules for s in look.seen[m])
    found, entered_right = _where_it_enters_wrong(case, found)
    text, look_at = _start_of_forward(case, look, found)
    because = [*_of_other_classes(case, look, found), *_in_another_mode(case, found)]
    because += [*_right_again(look, found), *handed_otherwise(case, look, found)]
    of, odd = odd_data(case, look, found)
    because += _joined(case, found)
    lacking = _lacking_below(look, found)
    because += [*odd, *lacking, *_without_a_graph(look, found)]
    if of != found.wrong:
        because += [_no_slice(look, found), *_another_output(case, found)]
        because += _picked_otherwise(case, look, found)
        because += [] if lacking or lines_that_differ(case) else look_at
        because += [*_features(case, found), *_of_other_places(case, found)]
    below = look.paths.next_below(found.wrong, lambda m: look.forward(m) == "right")
    shared = [m for m in below if look.shared(m) and not look.paths.all_below(m)]
    if shared:
        because.append(
            f"whether what {some_of(shared)} gives is what belongs to this rank's rows is not known"
        )
    calls = [s for s in look.seen[found.wrong] if not s.call.recomputed]
    whole = sorted({s.rank for s in calls}
                   - {s.rank for s in calls if s.forward != "right" or not s.in_order})  # fmt: skip
    if entered_right:
        because.append(f"on rank {spans(entered_right)} what goes into it is right")
    elif whole:
        because.append(f"on rank {spans(whole)} it is right")
    entered = _entered_wrong(case, found)
    lines = first_lines(case, found, back=False)
    because += in_words(lines)
    parts, missing = _parts_below(case, look, found)
    if not lines_that_differ(case) and not (lines and all(one.told for one in lines)):
        because += lines_between(case, found, f"{INTO}{found.wrong}" if entered else found.wrong)
    because += parts or between(case, replace(found, seen=entered or found.seen), back=False)
    because += reading(case)
    if missing:
        text += f": {missing}"
    text += "" if told else "; no module's output is the single process's"
    kind, ranks = "skipped_collective" if missing else "forward", found.ranks
    accused = None if missing else collective_at_fault(case, found, back=False)
    if accused is not None:
        because = [*accused.because, f"as seen from modules: {text}", _no_slice(look, found)]
        kind, text, ranks = accused.kind, accused.cause, accused.ranks
    elif misplaced := misplaced_in_words(case, found):
        because = [f"as seen from modules: {text}", _no_slice(look, found)]
        text = misplaced[0]
    elif of is not None and of != found.wrong:
        because = odd  # what is seen further on follows from it
        text = f"in the forward what enters {named(look, of)} is another already on some ranks"
    return Diagnosis(cause=text, kind=kind, ranks=ranks, because=tuple(because))


def _no_slice(look: Look, found: FirstWrong) -> str:
    """Which vectors of the output are wrong, or are of two rows."""
    parts = {s.call.part for s in look.seen[found.wrong]}
    wrong = sorted({s.call.part for s in found.seen})
    which = f" number {spans([p + 1 for p in wrong])} of {len(parts)}" if len(parts) > 1 else ""
    output = f"the output{which} of {found.wrong or 'the model'}"
    mixed = next((s for s in found.seen if s.mixed), None)
    if mixed is None:
        return f"{output} is no slice of the single process's: {places(found.seen)}"
    one = mixed.mixed[0]
    (first, second), (here, there) = one.of, one.at
    more = f", and so in {len(mixed.mixed) - 1} more" if len(mixed.mixed) > 1 else ""
    return (f"all vectors of {output} are the single process's, and some rows of it, of "
            f"{mixed.shape[-2]} vectors each, are put together of two rows there: on rank "
            f"{mixed.rank} row {one.row} in call {mixed.call.number} has at places {spans(here)} "
            f"those of row {first}, at {spans(there)} those of row {second}{more}")  # fmt: skip


def _another_output(case: Case, found: FirstWrong) -> list[str]:
    """Where what is wrong is, all of it, another output of the module in the single process."""
    traces, tolerance = traces_looked_at(case), TOLERANCES.get(case.record.spec.tiers[case.tier])
    if traces is None or tolerance is None:
        return []
    there = by_module(traces.single, found.wrong.__eq__)
    for (_, part), whole in there.items():
        if all(part != s.call.part and _is_of(traces, s, whole, tolerance) for s in found.seen):
            return [f"it is output number {part + 1} of the single process that stands there"]
    return []


def _joined(case: Case, found: FirstWrong) -> list[str]:
    """Rows of what goes in that are put together of several, where all its vectors are right."""
    if case.traces is None or what_goes_into(case, found) != "right":
        return []
    calls = {(s.rank, s.call.number) for s in found.seen}
    into = [s for s in gone_into(case, found.wrong) if (s.rank, s.call.number) in calls
            and not s.call.recomputed]  # fmt: skip
    told = joined_rows(case.traces.single, into)
    if not told:
        return []
    one = told[0]
    more = f", and so in {len(told) - 1} more" if len(told) > 1 else ""
    shown = [f"places {spans(list(places))}" for places in one.places]
    return [f"on rank {one.rank} in call {one.call} row {one.row} of what goes into it is put "
            f"together of vectors that stand in {len(one.places)} rows of the single process: "
            f"{' and '.join(shown)}{more}: look at how rows are cut, packed or folded"]  # fmt: skip


def _picked_otherwise(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Rows that are taken at another place of what a right module gives; of the first, and how many
    there are more."""
    traces, seen = traces_looked_at(case), _entered_wrong(case, found) or found.seen
    if traces is None or case.record.spec.tiers[case.tier] != "float64":
        return []
    told = list(picked_otherwise(traces, look, seen, found.modules))
    if told:
        one = told[0]
        what = "goes in" if seen[0].call.module.startswith(INTO) else "it gives"
        (place, wanted), (here, there) = one.places, one.of
        more = f", and so in {len(told) - 1} more rows" if len(told) > 1 else ""
        return [f"on rank {one.rank} in call {one.call} what {what} for row {one.row} is what "
                f"{one.module} gives at place {place} of {here}, and in the single process what "
                f"that gives at place {wanted} of {there}{more}: look at how the place is "
                f"found"]  # fmt: skip
    return []


def _is_of(traces: Traces, s: Seen, whole: Whole, tolerance: float) -> bool:
    trace = traces.ranks[s.rank]
    got = vectors(trace.outputs[trace.calls.index(s.call)])
    where = match(got, whole.outputs, tolerance)
    return where is not None and bool(where.found.any(1).all())


def _features(case: Case, found: FirstWrong) -> list[str]:
    """Which features of the wrong vectors, where some are right."""
    traces = traces_looked_at(case)
    seen = _entered_wrong(case, found) or found.seen
    told = traces and wrong_features(traces, seen, case.record.spec.tiers[case.tier])
    if not told or any(s.mixed for s in seen):
        return []
    wrong, width = told
    what = "what goes in" if seen[0].call.module.startswith(INTO) else "its output"
    return [f"of each such vector of {what} elements {spans(wrong)} of {width} are wrong, the "
            f"others are right"]  # fmt: skip


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


def _lacking_below(look: Look, found: FirstWrong) -> list[str]:
    """The first of the modules before it that gives the single process more than all ranks
    together: what they gave is right, and it is not all."""
    below = look.paths.all_below(found.wrong)
    module = next((m for m in look.modules if m in below and m in look.lacking), None)
    if module is None:
        return []
    return [
        f"before it, some of what {named(look, module)} gives the single process was found on no "
        f"rank: look at what is handed to it, which rows or parts of them"
    ]


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


def _of_other_places(case: Case, found: FirstWrong) -> list[str]:
    """Numbers that are right, and in another order."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    if traces is None:
        return []
    calls = {(s.rank, s.call.number) for s in found.seen}
    into = [s for s in gone_into(case, found.wrong) if (s.rank, s.call.number) in calls
            and s.forward == "wrong"]  # fmt: skip
    for seen, what in ((into, "what goes into it"), (found.seen, "its output")):
        if numbers_elsewhere(traces, seen, dtype):
            return [f"all numbers of {what} are there in the single process, and stand in other "
                    f"places: look at what orders them (a split, a reshape, a transpose, an "
                    f"index)"]  # fmt: skip
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
        extra = ["these may be halos, ghosts or padding that are right to differ: then they must "
                 "not count in the loss, and what follows from them is wrong"]  # fmt: skip
        if into == "wrong":
            return (f"some of what goes into {at} is nothing that goes into it in the single "
                    f"process {ranks}", extra)  # fmt: skip
    start = right_up_to(look, found)
    if into == "right":
        text = f"{start} it" if start.endswith(";") else "the forward"
        text += f" goes wrong in {at} {ranks}"
        where = ("all that goes into it is found in what goes into it in the single process: look "
                 "at its forward, or at what belongs where in what it is given")  # fmt: skip
    elif into == "wrong":
        text = f"{start} what goes into {at} is wrong already {ranks}"
        where = (f"look between the output of {near} and the call of {called}" if near
                 else f"look at what is handed to {called}")  # fmt: skip
    else:
        text, where = f"{start} the output of {at} is wrong {ranks}", ""
    if not near:
        text += "; no module whose output could be compared leads to it"
    return text, [line for line in (where, *extra) if line]


def _where_it_enters_wrong(case: Case, found: FirstWrong) -> tuple[FirstWrong, list[int]]:
    """The same of those ranks alone where what goes into it is wrong already, if some are; and the
    ranks where it is right: what such a rank gives may be its part of a sum."""
    calls = {(s.rank, s.call.number) for s in found.seen}
    into = [s for s in gone_into(case, found.wrong) if (s.rank, s.call.number) in calls]
    wrong = {s.rank for s in into if s.forward == "wrong"}
    right = {*found.ranks} - wrong
    if (
        not wrong
        or not right
        or any(s.forward != "right" or not s.in_order for s in into if s.rank in right)
    ):
        return found, []
    return replace(found, seen=tuple(s for s in found.seen if s.rank in wrong)), sorted(right)


def _entered_wrong(case: Case, found: FirstWrong) -> tuple[Seen, ...]:
    """What is wrong already as it goes in, of the calls whose outputs are: what a module issues
    itself comes after it."""
    if what_goes_into(case, found) != "wrong":
        return ()
    calls = {(s.rank, s.call.number) for s in found.seen}
    return tuple(s for s in gone_into(case, found.wrong)
                 if (s.rank, s.call.number) in calls and s.forward == "wrong")  # fmt: skip


def what_goes_into(case: Case, found: FirstWrong) -> State:
    """Of the calls whose outputs are wrong, on their ranks."""
    calls = {(s.rank, s.call.number) for s in found.seen}
    into = [
        s
        for s in gone_into(case, found.wrong)
        if (s.rank, s.call.number) in calls and not s.call.recomputed
    ]
    if any(s.forward == "wrong" for s in into):
        return "wrong"
    told = {(s.rank, s.call.number) for s in into if s.forward == "right"}
    return "right" if told == calls and all(s.forward == "right" for s in into) else "untold"


def _is_the_lesser_part(seen: Sequence[Seen]) -> bool:
    """Of each call's vectors less than all are wrong."""
    return all(s.wrong is not None and len(s.wrong) < math.prod(s.shape[:-1]) for s in seen)
