"""Where ranks come to have other rows: the line that makes what each has of what all have alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sumgrad.diagnose.modules.in_code.followed import is_users
from sumgrad.record.computed import Computation, Computed, same_value
from sumgrad.record.line import Line
from sumgrad.record.trace import Trace, Traces
from torch import Tensor

Call = tuple[str, int]  # which call in the code, and which time that it is made


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """A line of the user's that takes the same tensors on all ranks, and gives each others. within:
    the function that it is in. words: by rank what it takes beside tensors, where that is unlike.
    """

    line: Line
    within: str
    words: Mapping[int, str] = field(default_factory=dict)


def where_ranks_part(traces: Traces) -> Parted | None:
    """Of the lines that what enters the ranks' modules is made of: the first that all ranks which
    read rows run, with the same before it and not behind it."""
    read = {rank: trace for rank, trace in traces.ranks.items() if trace.entered}
    if len(read) < 2 or len({_enters(trace) for trace in read.values()}) > 1:
        return None
    calls = {rank: _calls(trace.computed) for rank, trace in read.items()}
    first = min(read)
    trace, own = read[first], calls[first]
    for call in _made_of(trace, own):
        if all(call in of_rank for of_rank in calls.values()):
            ones = {rank: (of_rank[call], read[rank].computed)
                    for rank, of_rank in calls.items()}  # fmt: skip
            if _takes_alike(ones) and not _gives_alike(ones):
                c = own[call]
                return Parted(line=(c.line, c.code), within=c.within, words=_words(ones))
    return None


def _enters(trace: Trace) -> Line:
    return trace.entered_at[0] if trace.entered_at else ("", "")


def _calls(computed: Computed) -> dict[Call, Computation]:
    times = Counter[str]()
    found: dict[Call, Computation] = {}
    for c in computed.computations:
        if is_users(c):
            found[c.site, times[c.site]] = c
            times[c.site] += 1
    return found


def _made_of(trace: Trace, calls: Mapping[Call, Computation]) -> list[Call]:
    """The calls that what enters the rank's first module is made by, in the order they are made."""
    made, values = _enters(trace)[0], trace.computed.values
    entering = [data for module, data in zip(trace.entered, trace.data, strict=False)
                if module == trace.entered[0]]  # fmt: skip
    makers: dict[int, list[Call]] = {}
    for call, c in calls.items():
        for number in c.gives:
            makers.setdefault(number, []).append(call)
    todo = [call for call, c in calls.items() if c.line == made and any(
        same_value(values[n], data) for n in c.gives for data in entering)]  # fmt: skip
    seen = {*todo}
    while todo:
        for taken in calls[todo.pop()].takes:
            # What is handed on is given by several, of which this one is not made.
            for call in makers.get(taken, ()) if isinstance(taken, int) else ():
                if call not in seen:
                    seen.add(call)
                    todo.append(call)
    return [call for call in calls if call in seen]


Ones = Mapping[int, tuple[Computation, Computed]]  # one call, by rank


def _takes_alike(ones: Ones) -> bool:
    return _are_alike([[t for t in c.takes if isinstance(t, int)] for c, _ in ones.values()], ones)


def _gives_alike(ones: Ones) -> bool:
    return _are_alike([[*c.gives] for c, _ in ones.values()], ones)


def _are_alike(numbers: list[list[int]], ones: Ones) -> bool:
    held: list[list[Tensor]] = [
        [computed.values[n] for n in own]
        for own, (_, computed) in zip(numbers, ones.values(), strict=True)
    ]
    first, *others = held
    return all(
        len(own) == len(first) and all(same_value(a, b) for a, b in zip(first, own, strict=True))
        for own in others
    )


def _words(ones: Ones) -> dict[int, str]:
    """What is no tensor, and not the same everywhere: `4:8` of a slice."""
    others = {rank: [t for t in c.takes if isinstance(t, str)] for rank, (c, _) in ones.items()}
    if len({len(own) for own in others.values()}) > 1:
        return {}
    unlike = [at for at, words in enumerate(zip(*others.values(), strict=True))
              if len({*words}) > 1]  # fmt: skip
    return {rank: ", ".join(_as_written(own[at]) for at in unlike)
            for rank, own in others.items()} if unlike else {}  # fmt: skip


def _as_written(words: str) -> str:
    if not words.startswith("slice(") or words.count(",") != 2:
        return words
    start, stop, step = (
        "" if part == "None" else part for part in words[len("slice(") : -1].split(", ")
    )
    return f"{start}:{stop}" + (f":{step}" if step else "")
