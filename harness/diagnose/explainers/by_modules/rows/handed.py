"""Arguments that a module is handed in its wrong calls, and in none that is right."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code
from sumgrad.diagnose.modules.inputs.rows_handed import Handed as HandedForRows
from sumgrad.diagnose.modules.inputs.rows_handed import handed_for_wrong_rows
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.computed import Computation
from sumgrad.record.trace import A_GROUP

Handed = Mapping[str, str]
ROWS_ALONE = "for rows that come out wrong, and for none that comes out right"


def handed_otherwise(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Of the outermost module around what is wrong, or of that itself: which argument all wrong
    calls have otherwise than the single process, and than most of those that are right."""
    traces = case.traces
    if traces is None:
        return []
    around = [m for m in look.modules if m == found.wrong or is_in(found.wrong, m)]
    for module in sorted(around, key=lambda m: m.count(".") + bool(m)):
        there = traces.single.handed.get(module, ())
        wrong, right = _calls(case, look, found, module)
        if not wrong or not there:
            continue
        for name in dict.fromkeys(n for call in (*wrong.values(), *there) for n in call):
            has = {call.get(name, "nothing") for call in wrong.values()}
            others = {call.get(name, "nothing") for call in there}
            given = [call.get(name, "nothing") for call in right]
            too = [one in has for one in given]
            if A_GROUP in has | others:
                continue  # a rank has groups, by right
            known = (right or "nothing" in has | others) and {*given} <= has | others
            if len(has) == 1 and not has & others and known and sum(too) * 2 <= len(too):
                if _has_another_name([*wrong.values()], there, name):
                    continue
                if _is_right_elsewhere(case, look, module, name, *has):
                    continue
                return [_in_words(found.wrong, module, name, has.pop(), others, wrong, too)]
    return []


def _has_another_name(here: Sequence[Handed], there: Sequence[Handed], name: str) -> bool:
    """Whether an argument that the ranks' calls, or the single process's alone, have by this name
    goes by another one in the others, as where another forward stands in for a module's own."""
    ours, theirs = ({n for call in calls for n in call} for calls in (here, there))
    if name in ours & theirs:
        return False
    mine, other = (here, there) if name in ours else (there, here)
    alone = (theirs - ours) if name in ours else (ours - theirs)
    what = {call[name] for call in mine if name in call}
    return any({call[n] for call in other if n in call} == what for n in alone)


def _is_right_elsewhere(case: Case, look: Look, module: str, name: str, has: str) -> bool:
    """Whether another module of that class, which comes out right, is handed the same."""
    source = look.sources.get(module)
    alike = [m for m in look.modules if m != module and source and look.sources.get(m) == source
             and look.forward(m) == "right"]  # fmt: skip
    traces = case.traces
    return traces is not None and any(
        call.get(name, "nothing") == has
        for m in alike
        for trace in traces.ranks.values()
        for call in trace.handed.get(m, ())
    )


@as_a_hint
def handed_for_wrong_rows_in_words(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """What a module around what is wrong, or that itself, is handed otherwise for its wrong rows,
    and for no other."""
    one = _for_wrong_rows(case, look, found)
    if one is None:
        return []
    rank, call, row = one.places[0]
    more = f", and so in {len(one.places) - 1} more" if one.places[1:] else ""
    made = f", made at {line_and_code(*one.made)}," if one.made[0] else ""
    what = f"what {one.module or 'the model'} is handed as {one.name}{made}"
    return [
        f"{what} is another than in the single process {ROWS_ALONE}: row {row} on rank {rank} in "
        f"call {call}{more}"
    ]


def is_handed_before(case: Case, look: Look, found: FirstWrong, line: Computation) -> bool:
    """Whether a line is inside of the module that is handed something else for its wrong rows."""
    one = _for_wrong_rows(case, look, found)
    return one is not None and one.module in line.inside


def _for_wrong_rows(case: Case, look: Look, found: FirstWrong) -> HandedForRows | None:
    traces = case.traces
    if traces is None:
        return None
    around = [m for m in look.modules if m == found.wrong or is_in(found.wrong, m)]
    return handed_for_wrong_rows(traces, look, found, sorted(around, key=len))


def _calls(
    case: Case, look: Look, found: FirstWrong, module: str
) -> tuple[dict[tuple[int, int], Handed], list[Handed]]:
    """What a module was handed in the calls with what is wrong, by rank and number, and in those
    that gave what is right on all ranks."""
    wrong: dict[tuple[int, int], Handed] = {}
    right: list[Handed] = []
    numbers = {(s.rank, s.call.number) for s in found.seen}
    told = {(s.rank, s.call.number): s.forward for s in look.seen[found.wrong]}
    for rank, calls, handed in _of_ranks(case, found.wrong, module):
        if len(calls) != len(handed):
            continue  # it is called more or less often than what is wrong
        for number, given in zip(calls, handed, strict=True):
            if (rank, number) in numbers:
                wrong[rank, number] = given
            elif told.get((rank, number)) == "right":
                right.append(given)
    return wrong, right


def _of_ranks(
    case: Case, inner: str, module: str
) -> Iterator[tuple[int, Sequence[int], Sequence[Handed]]]:
    """Rank, the numbers of the calls of what is wrong, and what the module was handed."""
    traces = case.traces
    for rank, trace in traces.ranks.items() if traces is not None else ():
        numbers = {c.number for c in trace.calls if c.module == inner and not c.recomputed}
        yield rank, sorted(numbers), trace.handed.get(module, ())


def _in_words(
    what: str,
    module: str,
    name: str,
    has: str,
    others: Collection[str],
    wrong: Mapping[tuple[int, int], Handed],
    too: Sequence[bool],
) -> str:
    calls: dict[int, list[int]] = {}
    for rank, number in wrong:
        calls.setdefault(rank, []).append(number)
    where = "; ".join(f"call {spans(own)} on rank {rank}" for rank, own in calls.items())
    gives = "it" if module == what else f"what {what} gives"
    text = f"{module or 'the model'} is handed {has} as {name} where {gives} is wrong ({where})"
    if too:
        text += f", and in {sum(too)} of {len(too)} calls where that is right"
    return f"{text}; in the single process it is {some_of(sorted(others))}"
