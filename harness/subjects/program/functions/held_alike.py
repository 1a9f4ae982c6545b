"""What the ranks of one call hold alike: it is one thing, and is moved, or counts, as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SAME = 1e-9  # of the largest number: ranks hold the same
NEARLY = 1e-3  # the same, of what may be meant to be the same and has drifted apart
DIGITS = 4096  # what this times a number is whole is a number that many things have


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A rank's result, and what it was given, each as two numbers that tell it from others."""

    gave: tuple[float, float]
    given: tuple[float, float]

    @staticmethod
    def of(gave: Tensor, given: Tensor | None) -> Result:
        """given: None where nothing came."""
        return Result(gave=_sketch(gave), given=(0.0, 0.0) if given is None else _sketch(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds in a call. arguments: of those that can be moved the value, and whether it
    is to get a gradient."""

    arguments: tuple[tuple[Tensor, bool] | None, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """An argument, by its place, and the ranks that hold the same there; holders: those of them for
    which it is to get a gradient."""

    at: int
    ranks: tuple[int, ...]
    holders: tuple[int, ...]


def can_be_moved(ranks: Sequence[int], held: Sequence[Held | None]) -> list[Moved]:
    """Nothing where a rank's call is another; of an argument nothing where ranks hold a part of it
    alike, or what has drifted apart."""
    own = [one for one in held if one is not None]
    if len(own) < len(held) or len({len(one.arguments) for one in own}) != 1:
        return []
    moved: list[Moved] = []
    for at, values in enumerate(zip(*(one.arguments for one in own), strict=True)):
        there = {r: value for r, value in zip(ranks, values, strict=True) if value is not None}
        groups = _alike({rank: value for rank, (value, _) in there.items()})
        for group in groups or ():
            holders = tuple(rank for rank in group if there[rank][1])
            moved += [Moved(at=at, ranks=group, holders=holders)] if holders else []
    return moved


def alike_results(held: Sequence[Held | None]) -> tuple[bool, ...]:
    """Of each result, whether all have the same and were given the same for it."""
    own = [one.results for one in held if one is not None]
    if not own or len({len(one) for one in own}) != 1:
        return ()
    return tuple(
        all(_near(one.gave, first.gave) and _near(one.given, first.given) for one in others)
        for first, *others in zip(*own, strict=True)
    )


def _alike(held: dict[int, Tensor]) -> list[tuple[int, ...]] | None:
    """The ranks that hold the same; None where some hold nearly the same, or have a part of it in
    common."""
    groups: list[tuple[Tensor, list[int]]] = []
    for rank, value in held.items():
        same = next((own for other, own in groups if _off(value, other) <= SAME), None)
        if same is None:
            groups.append((value, [rank]))
        else:
            same.append(rank)
    values = [value for value, _ in groups]
    for i, value in enumerate(values):
        if any(_off(value, v) <= NEARLY or _share_numbers(value, v) for v in values[:i]):
            return None
    return [tuple(own) for _, own in groups]


def _off(a: Tensor, b: Tensor) -> float:
    """Of the largest number; infinite where the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    largest = float(a.abs().max())
    off = float((a - b).abs().max())
    return off / largest if largest else off


def _share_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether a number of the one, that few things have, is in the other."""
    flat = a.reshape(-1)
    long = flat[(flat * DIGITS) != (flat * DIGITS).round()]
    return bool(torch.isin(long, b.reshape(-1)).any())


def _sketch(value: Tensor) -> tuple[float, float]:
    flat = value.reshape(-1).double()
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(flat.shape, generator=generator, dtype=flat.dtype)
    return float(flat @ weights), float(flat.norm())


def _near(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return all(abs(x - y) <= SAME * max(a[1], b[1]) for x, y in zip(a, b, strict=True))
