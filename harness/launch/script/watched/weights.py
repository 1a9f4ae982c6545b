"""Weights of a script's runs made equal: kept by the single run, taken over by every other.

They are set before the first forward and after every step. What the script makes of them in
between, otherwise than the single run does, is found by comparing them with what was set. Buffers
and what is not trained are only set where the weights were drawn otherwise: elsewhere what a rank
has there is the script's own doing, and shows in its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from sumgrad.base.tensors import same_bits, to_local
from sumgrad.launch.script.watched.kept import Kept
from sumgrad.record.ranks import AFTER, BUFFER_NAMED
from sumgrad.record.reference import Grads
from sumgrad.subjects.script.asked import START, Asked
from sumgrad.subjects.script.models import Held
from sumgrad.subjects.script.start import take_over, take_over_buffers
from torch import Tensor

BEFORE = "before"  # weights that the script itself changed between two steps
# Of the largest weight, by which such a change may differ on ranks; of weights of few digits.
ROUNDINGS, FEW = 64, 4
NEAR = 1e-5  # of each number of a buffer: it is the same then


@dataclass(frozen=True, slots=True)
class Begun:
    """What had other values than in the single run. trained: weights, made equal; made_equal: what
    is not trained, made equal, too, and left: as it was. Buffers have BUFFER_NAMED before them.
    drawn: whether trained weights differ by more than roundings, here or in models before."""

    trained: tuple[str, ...] = ()
    made_equal: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    drawn: bool = False


class Weights:
    """Of one process. directory: where the single run keeps its own."""

    def __init__(self, asked: Asked, directory: Path) -> None:
        self._asked, self._kept = asked, Kept(asked, directory)
        self._whole: Grads = {}
        self._as_set: Grads = {}
        self._buffers: set[str] = set()  # that were made equal, once
        self._drawn_otherwise = False  # weights that are trained
        self._left: set[str] = set()  # what stays unlike
        self._stepped: set[str] = set()  # by the single run's optimizers, until now

    def single(self) -> Grads | None:
        """What the single run started with; None in that run itself."""
        return None if self._asked.start is None else self._kept.stored(f"{START}_*")

    def begin(self, new: list[Held], buffers: Mapping[str, Tensor], root: int) -> Begun:
        """Parameters and buffers met for the first time.

        root: how many models were met before.
        """
        buffers = {n: b for n, b in buffers.items() if n not in self._buffers}
        self._buffers |= buffers.keys()
        named = {f"{BUFFER_NAMED}{n}": b for n, b in buffers.items()}
        if self._asked.start is None:
            self._kept.keep(f"{START}_{root}", {h.name: h.local() for h in new})
            whole = {n: to_local(b) for n, b in named.items()}
            self._kept.keep(f"{START}_{root}_buffers", whole)
            begun = Begun()
        else:
            self._whole |= self._kept.stored(f"{START}_*")
            begun = self._made_equal(new, named)
        self._remember(new)
        return begun

    def _made_equal(self, new: list[Held], buffers: Mapping[str, Tensor]) -> Begun:
        whole, jitter = self._whole, self._asked.jitter
        trained = [h for h in new if h.param.requires_grad]
        others = [h for h in new if not h.param.requires_grad and h.name in whole]
        buffers = {n: b for n, b in buffers.items() if n in whole}
        self._drawn_otherwise |= any(
            h.name in whole and _is_far(h.local(), h.slice(whole[h.name])) for h in trained
        )
        drawn = take_over(trained, whole, jitter=jitter)
        far = {h.name for h in others if _is_far(h.local(), h.slice(whole[h.name]))}
        apart = {n for n, b in buffers.items() if _is_far(to_local(b), whole[n])}
        kept = set[str]()
        if not jitter:
            # A whole number says where a part begins, or what is masked, and is not drawn.
            drawn_too = self._drawn_otherwise
            kept = {n for n in apart if not (drawn_too and buffers[n].is_floating_point())}
            kept |= set() if drawn_too else far
        self._left |= kept
        take_over([h for h in others if h.name not in kept], whole, jitter=jitter)
        take_over_buffers({n: b for n, b in buffers.items() if n not in kept}, whole)
        return Begun(
            trained=tuple(drawn),
            made_equal=tuple(sorted((far | apart) - kept)),
            left=tuple(sorted(kept)),
            drawn=self._drawn_otherwise,
        )

    def moved(self, held: Mapping[str, Held], call: int) -> list[str]:
        """Weights that the script changed since they were set, otherwise than the single run did.

        That run keeps those which it changed; a noise run has others anyhow.
        """
        if self._asked.jitter:
            return []
        moved = {
            n: h
            for n, h in held.items()
            if n not in self._as_set or not same_bits(h.local(), self._as_set[n])
        }
        if self._asked.start is None:
            self._kept.keep(f"{BEFORE}_{call}", {n: h.local() for n, h in moved.items()})
            return []
        theirs = self._kept.stored(f"{BEFORE}_{call}")
        known = {**self._whole, **theirs}
        return [
            n
            for n, h in held.items()
            if (n in moved or n in theirs) and not _nearly(h.local(), h.slice(known[n]))
        ]

    def is_changed(self, held: Held) -> bool:
        """Whether a parameter has other values than it was given, or left with."""
        as_set = self._as_set.get(held.name)
        return as_set is not None and not same_bits(held.local().detach(), as_set)

    def after(self, held: list[Held], call: int) -> None:
        """An optimizer has stepped: kept by the single run, set to its own by every other."""
        if self._asked.start is None:
            self._kept.keep(f"{AFTER}_{call}", {h.name: h.local() for h in held})
        else:
            seed = self._asked.jitter and self._asked.jitter + 1000 * (call + 1)
            self._whole |= (whole := self._kept.stored(f"{AFTER}_{call}"))
            self._stepped |= whole.keys()
            take_over([h for h in held if h.name not in self._left], whole, jitter=seed)
        self._remember(held)

    def left_behind(self, others: Mapping[str, Held]) -> list[str]:
        """Of parameters that this rank uses and none of its optimizers has, those that are not
        what the single run's steps made of them: another rank's optimizer, or nobody, has them."""
        if self._asked.start is None or self._asked.jitter:
            return []
        return [
            n
            for n, h in others.items()
            if n in self._stepped and not _nearly(h.local(), h.slice(self._whole[n]))
        ]

    def _remember(self, held: Iterable[Held]) -> None:
        """The weights as they were set; the single run's own tensors where they are those."""
        if self._asked.jitter:
            return
        for h in held:
            local = h.local().detach()
            wanted = h.slice(self._whole[h.name]) if h.name in self._whole else None
            as_set = wanted is not None and same_bits(local, wanted)
            self._as_set[h.name] = wanted if as_set and wanted is not None else local.clone()


def _is_far(own: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors, of which neither is a part of the other, differ by more in any number
    than another order of sums makes, as of statistics that are reduced."""
    if own.shape != wanted.shape:
        return False
    own, wanted = own.detach(), wanted.to(own.device)
    if same_bits(own, wanted.to(own.dtype)):
        return False
    if not own.is_floating_point():
        return not torch.equal(own, wanted.to(own.dtype))
    nearest = max(NEAR, 2 * torch.finfo(own.dtype).eps)
    mine, theirs = own.double(), wanted.double()
    finite = mine.isfinite() & theirs.isfinite()
    if not torch.allclose(mine[~finite], theirs[~finite], 0.0, 0.0, equal_nan=True):
        return True
    mine, theirs = mine[finite], theirs[finite]
    rest = nearest * 1e-4 * min(float(theirs.square().mean().sqrt()), 1.0)
    return bool(((mine - theirs).abs() > nearest * theirs.abs() + rest).any())


def _nearly(own: Tensor, wanted: Tensor) -> bool:
    """Whether two weights differ by no more than a few roundings."""
    if own.shape != wanted.shape:
        return False
    if not own.numel():
        return True
    eps = torch.finfo(own.dtype).eps
    most = (ROUNDINGS if eps < NEAR else FEW) * eps * float(wanted.abs().max())
    return float((own - wanted.to(own)).abs().max()) <= most
