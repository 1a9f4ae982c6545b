"""Lines that compute with one thing of the single process's, and with another beside it.

Where a rank's line and one of the single process call the same function, and the numbers of one
argument are all found in that of the other, element by element, the arguments beside it can be
compared element by element, too: a mean, a mask, a count, a target. In float64, where equal numbers
are no chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from sumgrad.diagnose.modules.values.comparable import ATTENTION, OF_CLASSES, comparable
from sumgrad.diagnose.modules.values.numbers import CLOSE, Numbers
from sumgrad.record.computed import Computation, Computed
from torch import Tensor

CLASSES = {"cross_entropy", "nll_loss"}  # their first argument has a dimension of classes
ELEMENTWISE = {"add", "sub", "rsub", "mul", "div", "rdiv", "maximum", "minimum", "mse_loss",
               "l1_loss", "smooth_l1_loss", "huber_loss"}  # fmt: skip
COMPARED = {
    "add", "sub", "rsub", "mul", "div", "rdiv", "pow", "where", "masked_fill", "clamp", "maximum",
    "minimum", "lerp", "addcmul", "addcdiv", "gt", "lt", "ge", "le", "cross_entropy", "nll_loss",
    "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "gaussian_nll_loss", "poisson_nll_loss", "ctc_loss", "matmul",
    "linear", "gather", "take_along_dim", "layer_norm", "rms_norm", "cosine_similarity", ATTENTION,
}  # fmt: skip
NUMBERS = {"add", "sub", "rsub", "mul", "div", "rdiv", "pow", "clamp", "lerp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How an argument differs. factor: of all its numbers, where it is one. num, of: how many of
    the elements that were compared are others; now, was: the first of these. elsewhere: all its
    numbers stand in the single process's, at other places. spread: shapes of the two arguments,
    each broadcast over the other, as they are not there. several: it is held against several
    computations and differs from each, so that no number is known to be the right one."""

    factor: float | None
    num: int
    of: int
    now: float
    was: float
    elsewhere: bool = False
    spread: tuple[torch.Size, torch.Size] | None = None
    several: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Otherwise:
    """A rank's computation `mine` takes another argument number `at` than the single process's.

    place: of the computation among the rank's. beside: the argument whose numbers are all there, by
    which the two belong together.
    """

    rank: int
    mine: Computation
    its: Computation
    at: int
    how: Difference
    place: int
    beside: int

    @property
    def is_sure(self) -> bool:
        """Whether what is compared is meant to be the same: the lines are the same words, or some
        of the numbers are there. Another formula may call the same function with other things."""
        alike = self.mine.code == self.its.code or self.how.spread is not None
        return alike or self.how.num < self.how.of or self.how.elsewhere


def computed_otherwise(rank: int, mine: Computed, whole: Computed) -> Iterator[Otherwise]:
    """The computations of a rank that take something else, in the order of the rank."""
    both = Both(mine, whole)
    for place, c in enumerate(mine.computations):
        if c.function not in COMPARED:
            continue
        alike = both.alike(c)
        found = [(w, *both_of) for w in alike if (both_of := both.compared(c, w)) is not None]
        others = [
            Otherwise(rank=rank, mine=c, its=w, at=told[0], how=told[1], place=place, beside=j)
            for w, j, told in found
            if told is not None
        ]
        if not others or len(others) < len(found):
            continue  # it is the same as one of them
        elsewhere = c.function in ELEMENTWISE and any(one.how.elsewhere for one in others)
        compared = {id(w) for w, *_ in found}
        known = any(one.its.code == c.code for one in others)  # the line itself, and no other
        if elsewhere and any(
            not known or both.may_take(w, c.takes[one.beside])
            for w in alike
            if id(w) not in compared
            for one in others
        ):
            continue  # it may belong to one that could not be compared
        own = [one for one in others if one.its.line == c.line]
        if own or len({(one.its.line, one.at, one.how) for one in others}) == 1:
            first, *more = own or others
            several = any(one.how != first.how for one in more)
            yield replace(first, how=replace(first.how, several=several))


class Both:
    """A rank's computations and the single process's."""

    def __init__(self, mine: Computed, whole: Computed) -> None:
        self.mine, self.whole = mine, whole
        self.there = Numbers(whole.values)
        self._spread: set[tuple[str, str]] | None = None
        self._sites = {c.site for c in whole.computations if c.site}
        self._known: dict[int, frozenset[int]] = {}
        self._with: dict[tuple[str, int, int], dict[int, Computation]] = {}
        self._functions = {
            (c.function, len(c.takes)) for c in whole.computations if c.function in COMPARED
        }
        for i, c in enumerate(whole.computations):
            for value in c.takes:
                if isinstance(value, int):
                    key = c.function, len(c.takes), value
                    self._with.setdefault(key, {})[i] = c

    def alike(self, c: Computation) -> Sequence[Computation]:
        """The single process's of the same function that may have a tensor in common, in order: of
        the same call in the code, where it makes that too, and not of another on the same line."""
        key = c.function, len(c.takes)
        found: dict[int, Computation] = {}
        for value in c.takes if key in self._functions else ():
            for number in self._holding(value) if isinstance(value, int) else ():
                found |= self._with.get((*key, number), {})
        own = c.site in self._sites
        return [found[i] for i in sorted(found) if not own or found[i].site == c.site]

    def compared(
        self, c: Computation, w: Computation
    ) -> tuple[int, tuple[int, Difference] | None] | None:
        """By which argument the two belong together, and which one differs and how, None where all
        are the same; None where the two have nothing in common, or something that cannot be
        compared."""
        for j, (a, b) in enumerate(zip(c.takes, w.takes, strict=True)):
            places = self.in_common(a, b)
            if places is None or not isinstance(a, int) or not isinstance(b, int):
                continue
            if j and c.function == ATTENTION:
                return None  # only queries tell which heads and rows it is of
            # A zero tells nothing of which it is.
            live = self.mine.values[a].reshape(-1)[places[0]] != 0
            places = places[0][live], places[1][live]
            shapes = self.mine.values[a].shape, self.whole.values[b].shape
            found = []
            for i in range(len(c.takes)):
                if i != j:
                    told = self._beside(c, w, (i, j), shapes, places) if len(places[0]) else None
                    if told is None:
                        break
                    found += [(i, how) for how in told]
            else:
                return j, (found[0] if found else None)
        return None

    def in_common(self, a: int | str, b: int | str) -> tuple[Tensor, Tensor] | None:
        """Which elements of a rank's value are which of one of the single process's, where all of
        them are there."""
        if not isinstance(a, int) or not isinstance(b, int) or b not in self._holding(a):
            return None
        return self.there.places(self.mine.values[a], b)

    def may_take(self, w: Computation, value: int | str) -> bool:
        """Whether some tensor that one of the single process's takes may have all its numbers."""
        held = self._holding(value) if isinstance(value, int) else frozenset()
        return not held.isdisjoint(t for t in w.takes if isinstance(t, int))

    def _is_among(self, x: int | str, w: Computation, i: int) -> bool:
        """Whether all numbers of a rank's value stand in what a call of the single process has
        there, or another of the same call in the code."""
        if not isinstance(x, int):
            return False
        takes = [w, *(other for other in self.whole.computations
                      if (other.site, other.function) == (w.site, w.function))]  # fmt: skip
        numbers = {other.takes[i] for other in takes if len(other.takes) > i}
        return any(
            number in numbers and self.there.has_all(self.mine.values[x], number)
            for number in sorted(self._holding(x))
        )

    def _holding(self, number: int) -> frozenset[int]:
        """Values of the single process that may hold all numbers of one of the rank's."""
        if number not in self._known:
            self._known[number] = self.there.holding(self.mine.values[number])
        return self._known[number]

    def _spread_there(self) -> set[tuple[str, str]]:
        """The single process's functions and lines that broadcast two arguments over each other."""
        if self._spread is None:
            self._spread = set()
            for c in self.whole.computations:
                shapes = [self.whole.values[t].shape for t in c.takes if isinstance(t, int)]
                if c.function in ELEMENTWISE and len(shapes) == 2 and _is_spread(*shapes):
                    self._spread.add((c.function, c.line))
        return self._spread

    def _beside(
        self,
        c: Computation,
        w: Computation,
        at: tuple[int, int],
        shapes: tuple[torch.Size, torch.Size],
        places: tuple[Tensor, Tensor],
    ) -> tuple[Difference, ...] | None:
        """How an argument differs from that beside another: () where it does not, None where that
        cannot be told. at: the two.

        Where two lines are not the same words, numbers may be put together in another order,
        a * (b / c) for (a * b) / c, and zeros are a way to use nothing. What is added may be a part
        of a sum, as it is put together, unless it is what belongs elsewhere.
        """
        i, j = at
        x, y = c.takes[i], w.takes[i]
        words = isinstance(x, str) and isinstance(y, str)
        if words and (x == y or c.function not in NUMBERS):
            return () if x == y else None
        got, wanted = _tensor(x, self.mine), _tensor(y, self.whole)
        if got is None or wanted is None or _are_tensor_and_number(x, y, got, wanted):
            return None
        here, there = (shapes[0], got.shape), (shapes[1], wanted.shape)
        spread = c.function in ELEMENTWISE and _is_spread(*here) and not _is_spread(*there)
        if spread and (c.function, c.line) in self._spread_there():
            return None  # the same line pairs all with all in the single process, too
        if spread:
            n, nan = got.numel(), math.nan
            return (Difference(factor=None, num=n, of=n, now=nan, was=nan, spread=here),)
        same = got.shape == wanted.shape and torch.equal(got, wanted)
        told = comparable(c.function, i, (got, wanted), shapes, places)
        if told is None:
            return None
        got, wanted = told
        targets = c.function in CLASSES
        flat = _spread(got, shapes[0], targets=targets)
        beside = _spread(wanted, shapes[1], targets=targets)
        number = _spread(torch.arange(got.numel()).reshape(got.shape), shapes[0], targets=targets)
        if flat is None or beside is None or number is None:
            return () if got.shape == wanted.shape and torch.equal(got, wanted) else None
        its = self._its(c.takes[j], w.takes[j], places, flat, beside)
        how = _differ(flat[places[0]], its, number[places[0]].long(), got.numel())
        if how is None:
            return ()
        how = _of_classes(how, c.function, got)
        elsewhere = same or self._is_among(x, w, i) or _is_in_another_order(flat[places[0]], its)
        other = elsewhere and [*map(len, here)] != [*map(len, there)]  # another formula
        few = how.factor is not None or min(got.numel(), wanted.numel()) == 1
        if c.code != w.code and (few or other):
            return None
        # Of what all rows share none is another: what is in common stands elsewhere.
        if same and got.numel() < shapes[0].numel():
            return None
        several = min(got.numel(), wanted.numel()) > 1
        if c.function == "add" and self._is_of_a_sum(c, w, i, several=several, elsewhere=elsewhere):
            return None
        return (replace(how, elsewhere=elsewhere),)

    def _its(
        self,
        a: int | str,
        b: int | str,
        places: tuple[Tensor, Tensor],
        flat: Tensor,
        beside: Tensor,
    ) -> Tensor:
        """What stands beside each element that two values have in common; of a number that comes
        again in the single process's, what is the same beside any of its places."""
        own, its = flat[places[0]], beside[places[1]]
        if isinstance(a, int) and isinstance(b, int):
            for k, there in self.there.again(self.mine.values[a], b, places[0], own != its):
                if bool((beside[there] == own[k]).any()):
                    its[k] = own[k]
        return its

    def _is_of_a_sum(
        self, c: Computation, w: Computation, i: int, *, several: bool, elsewhere: bool
    ) -> bool:
        """Whether what is added may be another because the sum is put together otherwise: a part of
        it, which is summed over ranks, or one of more that are added one after the other."""
        if not elsewhere:
            return several and not self._are_no_parts(c, w, i)
        return any(
            w.takes[i] in other.gives
            for other in self.whole.computations
            if (other.site, other.function) == (w.site, w.function)
        )

    def _are_no_parts(self, c: Computation, w: Computation, i: int) -> bool:
        """Whether the same words add to what has a gradient something of which autograd knows
        nothing, as a mask or a bias by places: what is summed over ranks later has one."""
        graphs = [
            {k for k, t in enumerate(takes) if t in known}
            for takes, known in ((c.takes, self.mine.with_graph), (w.takes, self.whole.with_graph))
        ]
        return c.site == w.site and graphs == [{1 - i}] * 2


def _are_tensor_and_number(x: int | str, y: int | str, got: Tensor, wanted: Tensor) -> bool:
    return type(x) is not type(y) and max(got.numel(), wanted.numel()) > 1


def _is_spread(a: torch.Size, b: torch.Size) -> bool:
    """Whether two shapes are broadcast over each other: to more elements than either has."""
    try:
        both = torch.broadcast_shapes(a, b)
    except RuntimeError:
        return False
    return both.numel() > max(a.numel(), b.numel())


def _of_classes(how: Difference, function: str, got: Tensor) -> Difference:
    """The same without a factor where it is of targets or truth values: a class is no multiple of
    another."""
    are_targets = not got.is_floating_point() and function in OF_CLASSES
    return replace(how, factor=None) if are_targets or got.dtype == torch.bool else how


def _tensor(argument: int | str, computed: Computed) -> Tensor | None:
    if isinstance(argument, int):
        return computed.values[argument]
    try:
        return torch.tensor(float(argument), dtype=torch.float64)
    except ValueError:
        return None


def _spread(tensor: Tensor, shape: torch.Size, *, targets: bool) -> Tensor | None:
    """Flat, one number for each element of another argument's shape. targets: it has all of that
    one's dimensions but the classes, which are the second; else it is broadcast."""
    try:
        if targets and tensor.dim() and tensor.dim() == len(shape) - 1:
            tensor = tensor.unsqueeze(1)
        return torch.broadcast_to(tensor, shape).reshape(-1).double()
    except RuntimeError:
        return None


def _is_in_another_order(got: Tensor, wanted: Tensor) -> bool:
    """Whether these are the same numbers, of which some stand beside others."""
    return len(got.unique()) > 2 and torch.equal(got.sort().values, wanted.sort().values)


def _differ(got: Tensor, wanted: Tensor, number: Tensor, size: int) -> Difference | None:
    """None where it does not. number: which element of the rank's own tensor, of so many, each is:
    one of several has no factor that is all of theirs."""
    scale = float(wanted.abs().max()) if len(wanted) else 0.0
    same = (got == wanted) | ((got - wanted).abs() <= CLOSE * (wanted.abs() + 1e-3 * scale))
    same |= got.isnan() & wanted.isnan()
    if bool(same.all()):
        return None
    live = wanted != 0
    ratios = got[live] / wanted[live]
    factor = None
    alone = size > 1 and len(number.unique()) < 2
    if len(ratios) and not alone and not bool(got[~live].any()):
        r = float(ratios[0])
        if math.isfinite(r) and bool(((ratios - r).abs() <= CLOSE * abs(r)).all()):
            factor = r
    first = int((~same).nonzero()[0])
    num, of = len(number[~same].unique()), len(number.unique())
    return Difference(
        factor=factor, num=num, of=of, now=float(got[first]), was=float(wanted[first])
    )
