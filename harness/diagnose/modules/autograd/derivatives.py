"""Which of a user's Functions give something else than the derivative of their forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sumgrad.diagnose.modules.autograd.adjoints import as_derivatives
from sumgrad.record.adjoint import Adjoint
from sumgrad.record.derivative import Derivative
from sumgrad.record.trace import Trace, Traces

NEAR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFormula:
    """A Function, and what was told of its calls: (rank, derivative), by rank and in order."""

    function: str
    written: str
    told: tuple[tuple[int, Derivative], ...]

    @property
    def wrong(self) -> tuple[tuple[int, Derivative], ...]:
        return tuple(one for one in self.told if not one[1].agrees)

    @property
    def only_scales(self) -> bool:
        """Whether all that it gives is the derivative times a number, in each call its own."""
        held = [d.off.factors if d.off else () for _, d in self.wrong]
        return all(own and _alike(own) for own in held)

    @property
    def scale(self) -> float | None:
        """That number, where it is one."""
        factors = [f for _, d in self.wrong for f in (d.off.factors if d.off else ())]
        return factors[0] if self.only_scales and _alike(factors) else None


def _alike(factors: Sequence[float]) -> bool:
    return all(abs(f - factors[0]) <= NEAR * abs(factors[0]) for f in factors)


def own_formulas(
    ranks: Mapping[int, Trace], adjoints: Sequence[Adjoint] = ()
) -> dict[tuple[str, str], OwnFormula]:
    """By class and by where the backward stands, on all ranks. adjoints: of those that
    communicate."""
    found: dict[tuple[str, str], list[tuple[int, Derivative]]] = {}
    own = ((rank, one) for rank, trace in ranks.items() for one in trace.computed.derivatives)
    for rank, one in (*own, *as_derivatives(adjoints)):
        found.setdefault((one.function, one.written), []).append((rank, one))
    return {
        key: OwnFormula(function=key[0], written=key[1], told=tuple(told))
        for key, told in found.items()
    }


def no_derivatives(traces: Traces) -> dict[tuple[str, str], OwnFormula]:
    """Those of the ranks that are not; without what is not in the single process either, where the
    formula is meant so, as of a rounding that lets gradients through."""
    meant = {key for key, one in own_formulas({0: traces.single}).items() if one.wrong}
    ranks = own_formulas(traces.ranks, traces.adjoints)
    return {key: one for key, one in ranks.items() if one.wrong and key not in meant}
