"""Weights that a call of a module is handed, beside those of the single process's calls that get
the same, as where weights are adapted from call to call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sumgrad.diagnose.modules.in_code.computed_otherwise import Both
from sumgrad.diagnose.modules.values.numbers import CLOSE
from sumgrad.record.computed import MODULE, Computation
from sumgrad.record.line import Line
from sumgrad.record.trace import Traces
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherInCall:
    """A call of a rank's, by number, whose weight none of the single process's calls has that get
    the same: `num` calls. made: the line that made the weight; the model: whether the first of
    these calls has the model's own parameter there."""

    rank: int
    call: int
    num: int
    made: Line
    there: Line
    of_the_model: bool


def weights_of_calls(traces: Traces, module: str, rank: int) -> Iterator[OtherInCall]:
    """In the order of a rank's calls of a module; only what is made in the step, on a rank or in
    the single process: parameters that are cut or gathered are told elsewhere."""
    mine, whole = traces.ranks[rank].computed, traces.single.computed
    own = [c for c in mine.computations if c.function == MODULE + module]
    there = [c for c in whole.computations if c.function == MODULE + module]
    if not own or not any(line for c in (*own, *there) for line, _ in c.made_at[1:]):
        return
    both = Both(mine, whole)
    for number, c in enumerate(own):
        alike = [w for w in there if _enters(both, c, w)]
        for at, taken in enumerate(c.takes[1:], 1):
            told = [w for w in alike if at < len(w.takes)]
            if not told or not isinstance(taken, int):
                continue
            weight = mine.values[taken]
            weights = [whole.values[n] for w in told if isinstance(n := w.takes[at], int)]
            made = c.made_at[at], told[0].made_at[at]
            if not any(line for line, _ in made) or any(w.shape != weight.shape for w in weights):
                continue
            if weights and not any(_same(weight, w) for w in weights):
                is_model = any(_same(weights[0], p) for p in traces.single.params.values())
                yield OtherInCall(
                    rank=rank,
                    call=number,
                    num=len(told),
                    made=made[0],
                    there=made[1],
                    of_the_model=is_model,
                )
                break


def _enters(both: Both, c: Computation, w: Computation) -> bool:
    """Whether all that enters a rank's call enters one of the single process's."""
    return bool(c.takes and w.takes) and both.in_common(c.takes[0], w.takes[0]) is not None


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool(((a - b).abs() <= CLOSE * b.abs().max()).all()) if b.numel() else True
