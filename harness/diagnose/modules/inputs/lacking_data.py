"""Data that ranks are handed a part of each, and that lack something all together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sumgrad.record.line import Line
from sumgrad.record.trace import Trace, Traces
from torch import Tensor

MOST_ROWS = 1 << 16  # of a tensor that is looked at
Key = tuple[str, str, int]  # a module, its argument, number of the call


@dataclass(frozen=True, slots=True, kw_only=True)
class LackingData:
    """Of what a module is handed as an argument in a call: `missing` of `of` rows are on no rank.
    made: the line of a rank that made its part, where it is a user's."""

    module: str
    argument: str
    call: int
    missing: int
    of: int
    made: Line


def lacking_data(traces: Traces) -> Iterator[LackingData]:
    """Where each rank's part is rows of the whole, in the same call, each at most once. Not of
    what ranks call more or less often, as in micro-batches: what is lacking may be in another."""
    there = _handed(traces.single)
    ranks = [_handed(trace) for trace in traces.ranks.values()]
    often = [Counter(key[:2] for key in own) for own in (there, *ranks)]
    for key, (whole, _) in there.items():
        if len({own[key[:2]] for own in often}) > 1:
            continue
        held = [own[key] for own in ranks if key in own]
        if len(held) < len(ranks) or len(ranks) < 2 or not 0 < len(whole) <= MOST_ROWS:
            continue
        if any(part.dim() != whole.dim() or part.shape[1:] != whole.shape[1:] for part, _ in held):
            continue
        every, parts = _rows(whole), [_rows(part) for part, _ in held]
        together: Counter[tuple[float, ...]] = Counter()
        for part in parts:
            together += part
        missing = every.total() - together.total()
        if missing > 0 and together <= every and len({tuple(p.items()) for p in parts}) > 1:
            module, argument, call = key
            made = next((line for _, line in held if line[0]), ("", ""))
            yield LackingData(module=module, argument=argument, call=call, missing=missing,
                              of=every.total(), made=made)  # fmt: skip


def _handed(trace: Trace) -> Mapping[Key, tuple[Tensor, Line]]:
    out: dict[Key, tuple[Tensor, Line]] = {}
    lines = trace.entered_at or (("", ""),) * len(trace.data)
    for data, module, (call, name), line in zip(
        trace.data, trace.entered, trace.entered_as, lines, strict=False
    ):
        if data.dim():
            out.setdefault((module, name, call), (data, line))
    return out


def _rows(tensor: Tensor) -> Counter[tuple[float, ...]]:
    flat = tensor.reshape(len(tensor), -1).double().tolist()
    return Counter(map(tuple, flat))
