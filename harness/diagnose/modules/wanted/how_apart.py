"""In what way a tensor has to be another, where that is simple."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.diagnose.modules.wanted.inverses import ROUNDINGS, Needed
from sumgrad.diagnose.modules.wanted.keys_needed import KeysNeeded
from torch import Tensor

ENOUGH = 3  # numbers that have one factor, or come out right without being needed: no chance
Kind = Literal[
    "way", "keys", "ranks", "factor", "factors", "offset", "inverse", "zeros", "order", "there"
]


@dataclass(frozen=True, slots=True)
class How:
    """In what way a tensor has to be another. dim: along which the factors differ; factors: one, or
    one for each index, or the offset, or the product with what it is, where it is its inverse.
    there: the number of the single process's value it has to be. some: in how many elements, if
    not in all. way: the function does it in another way, with what it takes. keys: of an attention,
    over which it has to go. ranks: what one of these has there, or several together: their sum,
    mean, largest or smallest, as `way` says.
    """

    kind: Kind
    dim: int = 0
    factors: tuple[float, ...] = ()
    there: int = -1
    some: int = 0
    way: str = ""
    keys: KeysNeeded | None = None
    ranks: tuple[int, ...] = ()


def how_apart(own: Tensor, need: Needed, there: Numbers) -> How | None:
    """None where it is not simple.

    there: the single process's values.
    """
    wanted = need.value
    known = ~wanted.isnan()
    got, want = own[known].double(), wanted[known]
    finite = want.isfinite()
    if not bool(finite.any()):
        return None
    near = ROUNDINGS * float(want[finite].abs().max())
    off = (want - got).abs() > near
    if not bool(finite.all()):
        return How("zeros") if bool((~finite == off).all()) else None
    enough = max(len(got), need.spare) >= ENOUGH
    how = (_of_all(got, want, near) if enough else None) or _along_one(own, wanted, near)
    if how is None and not bool(off.all()):
        how = _of_some(got, want, off, near, sure=need.spare >= ENOUGH)
    if how is None and bool(known.all()) and len(got.unique()) >= ENOUGH:
        same = (got.sort().values - want.sort().values).abs() <= near
        how = How("order") if bool(same.all()) else None
    # What has no others beside them first: a largest is among what it was chosen from, too.
    held = there.holding(want) if how is None else ()
    for number in sorted(held, key=lambda n: (there.how_many(n), n)):
        if there.has_all(want, number):
            return How("there", there=number)
    return how


def is_apart(own: Tensor, wanted: Tensor) -> bool:
    """Whether some number that is known has to be another."""
    known = ~wanted.isnan()
    if not bool(known.any()):
        return False
    finite = wanted[known & wanted.isfinite()].abs()
    near = ROUNDINGS * float(finite.max()) if len(finite) else 0.0
    return bool(((own - wanted)[known].abs() > near).any())


def _of_all(got: Tensor, want: Tensor, near: float) -> How | None:
    factor = _factor(got, want, near)
    if factor is not None:
        return How("factor", factors=(factor,))
    apart, product = want - got, want * got
    if bool(((apart - apart[0]).abs() <= near).all()):
        return How("offset", factors=(float(apart[0]),))
    same = (product - product[0]).abs() <= ROUNDINGS * abs(product[0])
    if bool(product[0]) and bool(same.all()):
        return How("inverse", factors=(float(product[0]),))
    return None


def _of_some(got: Tensor, want: Tensor, off: Tensor, near: float, *, sure: bool) -> How | None:
    """Of those elements that are off. Zeros that have to be something only if others agree: what is
    added up begins with zeros, and anything that is missing may be put there."""
    if bool((((got == 0) & sure) | (want.abs() <= near))[off].all()):
        return How("zeros")
    if int(off.sum()) < ENOUGH:
        return None
    how = _of_all(got[off], want[off], near)
    return None if how is None else replace(how, some=int(off.sum()))


def _along_one(own: Tensor, wanted: Tensor, near: float) -> How | None:
    """With a factor for each index of one dimension, the last first."""
    for dim in range(own.dim() - 1, -1, -1):
        factors = _factors_along(own.double(), wanted, dim, near)
        if factors is not None:
            return How("factors", dim=dim, factors=factors)
    return None


def _factor(got: Tensor, want: Tensor, near: float) -> float | None:
    square = float((got * got).sum())
    if not square:
        return None
    factor = float((got * want).sum()) / square
    return factor if bool(((got * factor - want).abs() <= near).all()) else None


def _factors_along(own: Tensor, wanted: Tensor, dim: int, near: float) -> tuple[float, ...] | None:
    """One for each index of a dimension, where each has enough numbers to tell."""
    out, known = [], ~wanted.isnan()
    for i in range(own.shape[dim] if own.shape[dim] > 1 else 0):
        here = known.select(dim, i)
        factor = None
        if int(here.sum()) >= ENOUGH:
            factor = _factor(own.select(dim, i)[here], wanted.select(dim, i)[here], near)
        if factor is None:
            return None
        out.append(factor)
    return tuple(out) or None
