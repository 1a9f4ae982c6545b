"""What the output of the first wrong module is, and what goes into it, in words: which vectors are
wrong, and what they are instead."""

from __future__ import annotations

from collections.abc import Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import places, told_of
from sumgrad.diagnose.explainers.by_modules.forwards.entering import (
    entered_wrong,
    into_the_calls,
    what_goes_into,
)
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    fraction_of,
    gone_into,
    line_and_code,
    named,
    ordinal,
    ordinals,
    traces_looked_at,
)
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.modules.how_wrong.elsewhere import numbers_elsewhere, zeroed
from sumgrad.diagnose.modules.inputs.picked import picked_otherwise
from sumgrad.diagnose.modules.inputs.sequences import joined_rows
from sumgrad.diagnose.modules.values.beyond import beyond_the_ends
from sumgrad.diagnose.modules.values.features import wrong_features
from sumgrad.diagnose.modules.values.matching import match, vectors
from sumgrad.diagnose.modules.values.scaled import SAME, one_factor
from sumgrad.diagnose.modules.values.seen import TOLERANCES, Seen
from sumgrad.diagnose.modules.values.whole import Whole, by_module
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import INTO, Traces


def no_slice(look: Look, found: FirstWrong) -> str:
    """Which vectors of the output are wrong, or are of two rows."""
    parts = {s.call.part for s in look.seen[found.wrong]}
    wrong = sorted({s.call.part for s in found.seen})
    which = f"the {ordinals(wrong)} of the {len(parts)} outputs" if len(parts) > 1 else "the output"
    output = f"{which} of {found.wrong or 'the model'}"
    told_by = found.seen[0].told_by
    if told_by is not None and all(s.told_by is not None for s in found.seen):
        other = f"its {ordinal(told_by.part)} output" if told_by.module == found.wrong else (
            f"what {named(look, told_by.module)} gives")  # fmt: skip
        return (f"all vectors of {output} are the single process's, and some are not those of the "
                f"rows and places where they stand, which {other} tells: "
                f"{places(found.seen)}")  # fmt: skip
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


def another_output(case: Case, found: FirstWrong) -> list[str]:
    """Where what is wrong is, all of it, another output of the module in the single process."""
    traces, tolerance = traces_looked_at(case), TOLERANCES.get(case.record.spec.tiers[case.tier])
    if traces is None or tolerance is None:
        return []
    there = by_module(traces.single, found.wrong.__eq__)
    for (_, part), whole in there.items():
        if all(part != s.call.part and _is_of(traces, s, whole, tolerance) for s in found.seen):
            return [f"each vector that stands there is one of the {ordinal(part)} output of the "
                    f"single process"]  # fmt: skip
    return []


@as_a_hint
def joined_in_words(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Rows of what goes in that are put together of several, where all its vectors are right."""
    traces = traces_looked_at(case)
    if traces is None or what_goes_into(case, found) != "right":
        return []
    told = joined_rows(traces.single, into_the_calls(case, found))
    if not told:
        return []
    one = told[0]
    more = f", and so in {len(told) - 1} more" if len(told) > 1 else ""
    first = _first_joined(case, look, found, one.rank)
    shown = [f"places {spans(list(places))}" for places in one.places]
    return [f"on rank {one.rank} in call {one.call} row {one.row} of what goes into it is put "
            f"together of vectors that stand in {len(one.places)} rows of the single process: "
            f"{' and '.join(shown)}{more}: look at how rows are cut, packed or folded",
            *first]  # fmt: skip


def _first_joined(case: Case, look: Look, found: FirstWrong, rank: int) -> list[str]:
    """The first module on a rank that such rows go into, and the line that made them."""
    traces = traces_looked_at(case)
    for module in look.modules[: look.modules.index(found.wrong)] if traces else ():
        into = [s for s in gone_into(case, module) if s.rank == rank and s.forward == "right"]
        told = joined_rows(traces.single, into) if traces else []
        if not told:
            continue
        call = next(s.call for s in into if s.call.number == told[0].call)
        made = traces.ranks[rank].stack(call).made if traces else ("", "")
        at = f", made at {line_and_code(*made)}" if made[0] else ""
        return [f"the first module that such a row goes into there is {named(look, module)}{at}"]
    return []


def picked_in_words(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Rows that are taken at another place of what a right module gives; of the first, and how many
    there are more."""
    traces, seen = traces_looked_at(case), entered_wrong(case, found) or found.seen
    if traces is None or case.record.spec.tiers[case.tier] != "float64":
        return []
    others = [m for m in look.modules if look.forward(m) == "right" and m not in found.modules]
    told = list(picked_otherwise(traces, look, seen, [*found.modules, *reversed(others)]))
    if told:
        one = told[0]
        told = [other for other in told if other.module == one.module]  # others hand it on
        what = "goes in" if seen[0].call.module.startswith(INTO) else "it gives"
        (place, wanted), (here, there) = one.places, one.of
        more = f", and so in {len(told) - 1} more" if len(told) > 1 else ""
        return [f"on rank {one.rank} in call {one.call} what {what} for row {one.row} is what "
                f"{one.module} gives at place {place} of {here}, and in the single process what "
                f"that gives at place {wanted} of {there}{more}: look at how the place is "
                f"found"]  # fmt: skip
    return []


def _is_of(traces: Traces, s: Seen, whole: Whole, tolerance: float) -> bool:
    trace = traces.ranks[s.rank]
    got = vectors(trace.output_of(s.call))
    where = match(got, whole.outputs, tolerance)
    return where is not None and bool(where.found.any(1).all())


def features_in_words(case: Case, found: FirstWrong) -> list[str]:
    """Which features of the wrong vectors, where some are right."""
    traces = traces_looked_at(case)
    seen = entered_wrong(case, found) or found.seen
    if traces is None or not seen or any(s.mixed for s in seen):
        return []
    dtype, one = case.record.spec.tiers[case.tier], told_of(seen)
    told, where = wrong_features(traces, seen, dtype), ""
    if told is None:
        told = wrong_features(traces, [one], dtype)
        where = f", on rank {one.rank} in call {one.call.number}"
    if told is None:
        return []
    wrong, width = told
    what = "what goes in" if one.call.module.startswith(INTO) else "its output"
    return [f"of each such vector of {what}{where} elements {spans(wrong)} of {width} are not "
            f"what stands beside the others in the single process"]  # fmt: skip


@as_a_hint
def beyond_in_words(case: Case, found: FirstWrong) -> list[str]:
    """Where its output goes on beyond an end of the single process's, and is right but for that."""
    traces = traces_looked_at(case)
    if traces is None or case.record.spec.tiers[case.tier] != "float64":
        return []
    told = {
        (b.rank, b.before): b for b in reversed([*beyond_the_ends(traces, found.seen, "float64")])
    }
    out = []
    for _, b in sorted(told.items()):
        right = range(b.places, b.size) if b.before else range(b.size - b.places)
        beyond = spans(sorted({*range(b.size)} - {*right}))
        end, side = ("begins", "before") if b.before else ("ends", "behind")
        out.append(
            f"on rank {b.rank} in call {b.call} places {spans([*right])} of {b.size} of dimension "
            f"{b.dim} of its output are those with which the single process's {end}; what stands "
            f"{side} them, at {beyond}, is beyond that, and counts in the loss: look for what "
            f"should cut it off or make it zero"
        )
    return out


@as_a_hint
def part_of_each_vector(case: Case, look: Look, below: Sequence[str]) -> list[str]:
    """Of right modules next below: which elements a rank has, where that is not all of them."""
    traces = traces_looked_at(case)
    if traces is None:
        return []
    whole, told = by_module(traces.single, {*below}.__contains__), {}
    for m in below:
        held = {
            s.rank: (*s.where.columns, width)
            for s in look.seen[m]
            if s.where is not None and (m, s.call.part) in whole
            and s.where.columns != (0, width := whole[m, s.call.part].outputs.shape[1])
        }  # fmt: skip
        if held:
            told[m] = held
    if not told:
        return []
    first = next(iter(told.values()))
    where = [f"{spans([*range(start, end)])} of {width} on rank {rank}"
             for rank, (start, end, width) in sorted(first.items())]  # fmt: skip
    return [f"what {some_of([*told])} gives is a part of each vector, of {next(iter(told))} "
            f"elements {some_of(where)}: whether that is the part which is wanted there is not "
            f"known"]  # fmt: skip


@as_a_hint
def scaled_in_words(case: Case, found: FirstWrong) -> list[str]:
    """Where all wrong vectors are the single process's but for one factor."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    seen = entered_wrong(case, found) or found.seen
    if traces is None or dtype != "float64":
        return []
    factor = one_factor(traces, seen, TOLERANCES[dtype])
    if factor is None or abs(factor - 1) <= SAME:
        return []
    what = "what goes in" if seen[0].call.module.startswith(INTO) else "its output"
    return [f"each such vector of {what} is {factor_in_words(factor)} times one that is there in "
            f"the single process: "
            f"look for a factor that is missing, or one more"]  # fmt: skip


def factor_in_words(factor: float) -> str:
    """With the square, where that is a fraction and it is none."""
    square = as_fraction(factor * factor, 1e-9) if as_fraction(factor, 1e-9) is None else None
    return fraction_of(factor) + (f" (the square root of {square})" if square else "")


def in_other_places(case: Case, found: FirstWrong) -> list[str]:
    """Numbers that are right, and in another order."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    if traces is None:
        return []
    for seen, what in (
        (entered_wrong(case, found), "what goes into it"),
        (found.seen, "its output"),
    ):
        if zeroed(traces, seen, dtype):
            return [f"the wrong vectors of {what}, where not all zero, are the single process's "
                    f"with zeros in some places: look at what writes zeros (a mask, a ReLU in "
                    f"place, a padding)"]  # fmt: skip
        if numbers_elsewhere(traces, seen, dtype):
            return [f"all numbers of the wrong vectors of {what} are there in the single process, "
                    f"not all of them at these places: look at what cuts and orders them (a split, "
                    f"a padding, a reshape, a transpose, an index)"]  # fmt: skip
    return []


@as_a_hint
def cut_in_words(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Of a module of torch's own that is handed all rows and a part of something else: of what."""
    traces, source = traces_looked_at(case), look.sources.get(found.wrong, " at ")
    if traces is None or " at " in source or what_goes_into(case, found) != "right":
        return []
    rows = len(next(iter((traces.single.batch or {}).values()), ()))
    name = f"{INTO}{found.wrong}"
    pairs = zip(traces.single.calls, traces.single.outputs, strict=True)
    whole = {tuple(o.shape) for c, o in pairs if c.module == name and c.part == 0}
    if len(whole) != 1:
        return []
    was = whole.pop()
    for s in into_the_calls(case, found):
        cut = [d for d, (a, b) in enumerate(zip(s.shape, was, strict=True)) if a != b]
        one = s.call.part == 0 and len(cut) == 1 and was[:-1].count(rows) == 1
        if one and was[cut[0]] % rows:  # else it may be the rows themselves, and what is in them
            return [f"on rank {s.rank} in call {s.call.number} it is handed {s.shape[cut[0]]} of "
                    f"the {was[cut[0]]} places of dimension {cut[0]}, and all {rows} of dimension "
                    f"{was.index(rows)}, as many as there are rows: look at what cuts the rows, "
                    f"and along which dimension"]  # fmt: skip
    return []


@as_a_hint
def changed_in_place(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Where a wrong output is a tensor that one module gave and another changed since."""
    traces = case.traces  # as they were recorded: calls say by their places what they changed
    if traces is None:
        return []
    for s in found.seen:
        trace = traces.ranks[s.rank]
        key = s.call.module, s.call.number, s.call.part, s.call.recomputed
        keys = [(c.module, c.number, c.part, c.recomputed) for c in trace.calls]
        at = keys.index(key)
        same = [i for i, o in enumerate(trace.outputs[:at]) if o is trace.outputs[at]]
        later = next((i for i in same if trace.calls[i].changed_from >= 0), None)
        if later is None:
            continue
        first = trace.calls[trace.calls[later].changed_from]
        by = trace.calls[later]
        handed = f"{INTO}{found.wrong}"
        given = [i for i in same if trace.calls[i].module == handed]
        if given or first.module.startswith(INTO) or by.module.startswith(INTO):
            continue  # what it is handed already
        return [f"on rank {s.rank} in call {s.call.number} it is the tensor that "
                f"{named(look, first.module)} gave, which {named(look, by.module)} then changed "
                f"in place"]  # fmt: skip
    return []
