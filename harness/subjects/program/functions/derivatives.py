"""Whether what a user's Function gives in its backward is the derivative of its forward.

A Function whose formula is its author's own is held against finite differences of its forward, run
once more by itself when the step is over: in float64, without a collective, and only where it gives
once more what it gave in the step. What a forward does not depend on is not told. Of every call,
also of one that communicates, what its backward was given and gave is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sumgrad.record.computed import Computation
from sumgrad.record.derivative import Back, Derivative, Off
from sumgrad.record.line import Line
from sumgrad.subjects.program.functions.applied import (
    Applied,
    along,
    argument_name,
    is_as_it_was,
    run_again,
    step_of,
)
from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

MOST_NUMBERS = 200_000  # of one call, in arguments and results
MOST_KEPT = 1 << 22  # of all of them
MOST_CALLS = 6  # of one place, that are run again
MOST_ALIKE = 2  # of these with arguments of the same shapes
MOST_ELEMENTS = 512  # of an argument whose derivative is taken element by element
SECONDS = 2.0  # of this process's own time, whatever else the machine does
MOST_SECONDS = 20.0  # on the clock
DIRECTIONS = 3
EQUAL = 1e-5  # of the largest number: two of them are the same
PLAIN = (Tensor, Parameter)
NOISE = 1e-7  # of what is multiplied: less is rounding


Before = tuple[tuple[Any, ...], tuple[bool, ...], int]


class Derivatives:
    """Calls of Functions, kept while a step runs. operations: how many collectives so far."""

    def __init__(self, operations: Callable[[], int] = lambda: 0) -> None:
        self.operations = operations
        self._kept: dict[Line, list[Applied]] = {}
        self._numbers: dict[Line, int] = {}
        self._room = MOST_KEPT

    def before(self, args: Sequence[Any]) -> Before | None:
        """What is kept of a call's arguments, as it may change them, which of them are leaves, and
        how many operations there were; None of large ones."""
        if _numel(args) > min(self._room, MOST_NUMBERS):
            return None
        leaves = tuple(isinstance(a, Tensor) and a.grad_fn is None for a in args)
        kept = tuple(_kept(a) if isinstance(a, Tensor) else a for a in args)
        return kept, leaves, self.operations()

    def applied(
        self, cls: Any, made: Computation, computation: int, before: Before | None, out: Any
    ) -> None:
        """A call has ended. made: what is known of it, and computation, its number there."""
        place = made.line, made.code
        number = self._numbers[place] = self._numbers.get(place, -1) + 1
        if before is None:
            return
        given, leaves, operations = before
        gave = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        node = next((t.grad_fn for t in gave if type(t.grad_fn).__name__ == _node(cls)), None)
        numel = _numel((*given, *gave))
        tensors = [t for t in (*given, *gave) if isinstance(t, Tensor)]
        if node is None or numel > min(self._room, MOST_NUMBERS):
            return
        if any(type(t) not in PLAIN for t in tensors):
            return
        self._room -= numel
        one = Applied(
            cls=cls, made=made, computation=computation, number=number, given=given,
            gave=tuple(map(_kept, gave)), leaves=leaves,
            operations=(operations, self.operations()),
        )  # fmt: skip
        self._kept.setdefault(place, []).append(one)

        began = [0]

        def begins(_: Any) -> None:
            began[0] = self.operations()

        def ends(inner: Sequence[Tensor | None], outer: Sequence[Tensor | None]) -> None:
            one.talked |= self.operations() > began[0]
            if one.came is None:
                one.came = tuple(map(_kept_or_none, outer)), tuple(map(_kept_or_none, inner))
                one.began, one.ended = began[0], self.operations()

        node.register_prehook(begins)
        node.register_hook(ends)

    def backs(self) -> Iterator[Back]:
        """What every call's backward was given, and gave."""
        for one in self.calls():
            if one.came is not None:
                outer, inner = (tuple(map(_to_be_kept, side)) for side in one.came)
                yield Back(
                    computation=one.computation, outer=outer, inner=inner, alone=one.is_alone
                )

    def calls(self) -> Iterator[Applied]:
        """Every call, by its line and in order."""
        for own in self._kept.values():
            yield from own

    def found(self) -> Iterator[Derivative]:
        """Of each argument that could be told. The step is over: the forwards run once more."""
        until = time.process_time() + SECONDS, time.monotonic() + MOST_SECONDS
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for one in (one for own in self._kept.values() for one in _to_be_run(own)):
                one.until = until
                try:
                    yield from _told(one)
                except Exception:  # a user's forward out of its step: it cannot be told
                    continue


def _to_be_run(calls: Sequence[Applied]) -> list[Applied]:
    """Some calls of each shape."""
    kept: list[Applied] = []
    for one in calls:
        like = [other for other in kept if _shapes(other.given) == _shapes(one.given)]
        if one.is_alone and one.came is not None and len(like) < MOST_ALIKE:
            kept.append(one)
    return kept[:MOST_CALLS]


def _told(one: Applied) -> Iterator[Derivative]:
    assert one.came is not None
    outer, inner = one.came
    places = [i for i, value in enumerate(one.given) if isinstance(value, Tensor)]
    if not is_as_it_was(one, run_again(one, {})):
        return
    for at, gradient in zip(places, inner, strict=True):
        value = one.given[at]
        if gradient is None or not value.requires_grad or value.dtype != torch.float64:
            continue  # what gives none may put it elsewhere
        found = _along(one, at, gradient, outer)
        if found is None:
            continue
        agrees, factor = found
        off = None
        if not agrees and value.numel() <= MOST_ELEMENTS:
            off = _off(gradient, _shares(one, at, outer))
        elif not agrees and factor is not None:
            off = Off(differ=value.numel(), numel=value.numel(), factors=(factor,))
        yield Derivative(
            function=one.cls.__name__,
            line=(one.made.line, one.made.code),
            written=one.made.written,
            call=one.number,
            argument=argument_name(one.cls, at),
            place=one.computation,
            at=places.index(at),
            agrees=agrees,
            off=off,
            leaf=one.leaves[at],
        )


def _slopes(
    one: Applied, at: int, outer: Sequence[Tensor | None], direction: Tensor, step: float
) -> tuple[list[float], list[float]] | None:
    """What each result adds to the derivative along a direction of an argument, by the difference
    to a step ahead and to a step behind; None where no result is another."""
    value = one.given[at].detach()
    up, down = (run_again(one, {at: value + s * step * direction}) for s in (1, -1))
    if all(torch.equal(a, b) for a, b in zip(up, down, strict=True)):
        return None

    def against(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[float]:
        return [along(g, x, y) / step for g, x, y in zip(outer, a, b, strict=True)]

    return against(up, one.gave), against(one.gave, down)


def _along(
    one: Applied, at: int, gradient: Tensor, outer: Sequence[Tensor | None]
) -> tuple[bool, float | None] | None:
    """Whether a gradient is the derivative, along some directions, and the factor that it has along
    all of them, if it is one; None where that cannot be told, as at a kink."""
    step = step_of(one.given[at])
    generator = torch.Generator().manual_seed(0)
    found: list[tuple[float, float, float, float]] = []
    for _ in range(DIRECTIONS):
        v = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        v = v.to(gradient.device)
        near, far = (_slopes(one, at, outer, v, s) for s in (step, 4 * step))
        if near is None or far is None:
            return None
        ahead, behind = sum(near[0]), sum(near[1])
        wide = (sum(far[0]) + sum(far[1])) / 2
        found.append((ahead, behind, wide, float((gradient * v).sum())))
    scale = max(abs(x) for four in found for x in four)
    least = NOISE * max(float(g.abs().max()) for g in (gradient, *outer) if g is not None)
    slopes = [(ahead + behind) / 2 for ahead, behind, _, _ in found]
    for (ahead, behind, wide, _), slope in zip(found, slopes, strict=True):
        if abs(ahead - behind) > 10 * EQUAL * scale + least:
            return None  # a kink, and it may be right to take one side
        if abs(slope - wide) > EQUAL * scale + least:
            return None
    given = [g for *_, g in found]
    agrees = all(
        abs(slope - g) <= 10 * EQUAL * scale + least for slope, g in zip(slopes, given, strict=True)
    )
    times = [g / slope if slope else math.nan for slope, g in zip(slopes, given, strict=True)]
    alike = all(abs(t - times[0]) <= 10 * EQUAL * abs(times[0]) for t in times)
    return agrees, times[0] if alike else None


def _shares(one: Applied, at: int, outer: Sequence[Tensor | None]) -> Tensor:
    """The derivative, element by element: [results, *the argument's shape]."""
    value = one.given[at].detach()
    shares = torch.zeros(len(outer), value.numel(), dtype=value.dtype, device=value.device)
    for i in range(value.numel()):
        direction = torch.zeros(value.numel(), dtype=value.dtype, device=value.device)
        direction[i] = 1
        found = _slopes(one, at, outer, direction.view(value.shape), step_of(value))
        if found is not None:
            mean = [(a + b) / 2 for a, b in zip(*found, strict=True)]
            shares[:, i] = torch.tensor(mean, dtype=value.dtype, device=value.device)
    return shares.view(-1, *value.shape)


def _off(gradient: Tensor, shares: Tensor) -> Off:
    whole = shares.sum(0)
    scale = 10 * EQUAL * float(torch.stack([gradient.abs(), whole.abs()]).max())
    differ = (gradient - whole).abs() > scale
    where = []
    for dim in range(gradient.dim()):
        others = [d for d in range(gradient.dim()) if d != dim]
        held = differ.any(dim=others) if others else differ
        if not held.all():
            where.append((dim, tuple(held.nonzero().flatten().tolist())))
    ordered = (gradient.flatten().sort().values - whole.flatten().sort().values).abs()
    return Off(
        differ=int(differ.sum()),
        numel=gradient.numel(),
        where=tuple(where),
        zero=bool((gradient[differ] == 0).all()),
        moved=bool((ordered <= scale).all()) and bool(whole.abs().max() > scale),
        factors=_factors(gradient, shares, scale),
    )


def _factors(gradient: Tensor, shares: Tensor, scale: float) -> tuple[float, ...]:
    """Of each result's share in what a backward gave; empty where none fit, or several do."""
    columns = shares.flatten(1).T
    live = columns.abs().max(0).values > scale
    if not live.any() or columns.shape[0] < 2 * int(live.sum()):
        return ()
    found = torch.linalg.lstsq(columns[:, live], gradient.flatten())
    rest = (columns[:, live] @ found.solution - gradient.flatten()).abs().max()
    if int(torch.linalg.matrix_rank(columns[:, live])) < int(live.sum()) or float(rest) > scale:
        return ()
    factors = gradient.new_ones(shares.shape[0])
    factors[live] = found.solution
    return tuple(factors.tolist())


def _node(cls: Any) -> str:
    return f"{cls.__name__}Backward"


def _shapes(given: Sequence[Any]) -> list[torch.Size]:
    return [value.shape for value in given if isinstance(value, Tensor)]


def _numel(values: Sequence[Any]) -> int:
    return sum(value.numel() for value in values if isinstance(value, Tensor))


def _kept(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        held = tensor.detach().clone()
        return held.requires_grad_(tensor.requires_grad) if held.is_floating_point() else held


def _kept_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _kept(tensor).detach()


def _to_be_kept(tensor: Tensor | None) -> Tensor | None:
    """On the CPU, complex numbers as pairs, like every value that is kept."""
    if tensor is None or not tensor.is_complex():
        return None if tensor is None else tensor.cpu()
    return torch.view_as_real(tensor.cpu().resolve_conj())
