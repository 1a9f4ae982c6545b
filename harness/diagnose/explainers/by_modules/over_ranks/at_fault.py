"""A collective that does what it should not, and what it is looked at with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.modules.in_code.computed_otherwise import COMPARED
from sumgrad.diagnose.modules.over_ranks.collectives import SAME, Collective, in_words
from sumgrad.diagnose.modules.over_ranks.right_sums import Truth, off_by, truths
from sumgrad.diagnose.modules.values.seen import COARSE, TOLERANCES, constant
from sumgrad.diagnose.modules.values.whole import Whole, by_module
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import INTO, Traces
from torch import Tensor

MOST_AFTER = 40  # tensors of modules after them


@dataclass(frozen=True, slots=True, kw_only=True)
class AtFault:
    """One collective that does what it should not. cause, because: in words. ranks: whose part."""

    kind: str
    cause: str
    because: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Looking:
    """What is looked at, and from where. everywhere: any module may have the right sum, not only
    those around the wrong one."""

    case: Case
    traces: Traces
    look: Look
    found: FirstWrong
    rank: int
    back: bool
    everywhere: bool = False

    @property
    def tolerance(self) -> float:
        return TOLERANCES.get(self.case.record.spec.tiers[self.case.tier], COARSE)

    @property
    def factor(self) -> float | None:
        """Of the gradients of this rank: that of what is right beside; None where there are
        several."""
        if not self.back:
            return 1.0
        found = [
            constant(s.factors)
            for m in self.found.modules
            for s in self.look.seen[m]
            if s.rank == self.rank and s.backward == "right"
        ]
        known = [f for f in found if f]
        if not known or len(known) < len(found) or max(known) - min(known) > SAME * abs(known[0]):
            return None
        return known[0]

    def whole(self) -> dict[tuple[str, int], Whole]:
        """What may be the right sum: of the wrong module, of what is in it, of its neighbours; put
        together once for all collectives and ranks."""
        key = f"right sums of {self.found.wrong!r}, {self.back}, {self.everywhere}"
        if key not in self.case.known:
            self.case.known[key] = by_module(self.traces.single, self._is_near())
        found: dict[tuple[str, int], Whole] = self.case.known[key]
        return found

    def _is_near(self) -> Callable[[str], bool]:
        if self.everywhere:
            return lambda _: True
        wrong = self.found.wrong
        near = {wrong, f"{INTO}{wrong}", *self.found.beside}
        near |= {f"{INTO}{m}" for m in self.found.beside}
        if wrong:
            near |= {m for m in self.look.modules if is_in(m, wrong)}
        paths = self.look.paths
        near |= {*paths.next_below(wrong, lambda _: True)}
        if self.back:
            near |= paths.all_above(wrong) & {
                m for b in self.found.modules for m in paths.all_below(b)
            }
        return near.__contains__

    def truths(self, op: Collective) -> Iterator[Truth]:
        factor = self.factor
        if factor is not None:
            yield from truths(
                op, self.look, self.traces.single, self.whole(), back=self.back, factor=factor
            )

    def what(self, truth: Truth) -> str:
        """`what layers.0.down gives in the single process`."""
        gives = not self.back and not truth.module.startswith(INTO)
        text = f"what {truth.module} gives" if gives else self.words(truth.module)
        return f"{text} in the single process"

    def shown(self, op: Collective) -> str:
        return in_words(self.case.record, op)

    def goes_into(self, module: str, rank: int) -> bool:
        """Whether numbers that are not all zero go into a module on a rank."""
        trace = self.traces.ranks[rank]
        return any(
            call.module == f"{INTO}{module}" and bool(output.any())
            for call, output in zip(trace.calls, trace.outputs, strict=True)
        )

    def off_by(self, op: Collective, truth: Truth) -> Tensor | None:
        return off_by(self.traces, op, truth, back=self.back)

    def after(self, op: Collective) -> list[tuple[str, Tensor]]:
        """What came after a collective on this rank, with what it is in words."""
        trace, number = self.traces.ranks[self.rank], op.own.number
        near: list[tuple[str, Tensor]] = []
        for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
            at, value = (call.operation_back, gradient) if self.back else (call.operation, output)
            if at is None or value is None or at <= number:
                continue
            near.append((self.words(call.module), value))
        lines = []
        if not self.back:
            for one in trace.computed.computations:
                for argument in one.takes if one.function in COMPARED else ():
                    if isinstance(argument, int):
                        value = trace.computed.values[argument]
                        lines.append((f"what `{one.code}` computes with", value))
        return [*near[:MOST_AFTER], *lines]

    def words(self, module: str) -> str:
        """`the output of down`, `the gradient of what goes into down`."""
        name = module.removeprefix(INTO)
        text = f"what goes into {name}" if module.startswith(INTO) else f"the output of {name}"
        return f"the gradient of {text}" if self.back else text
