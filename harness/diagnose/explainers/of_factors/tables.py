"""Which pattern a table of weights is: what a rank has of every rank's backwards, and should."""

from __future__ import annotations

from sumgrad.diagnose.own_gradients import ALIKE, Weighed, near
from torch import Tensor


def scaled(mix: Weighed) -> float | None:
    """The one factor by which all weights are off, or None."""
    at = int(mix.wanted.abs().argmax())
    factor = float(mix.got.reshape(-1)[at] / mix.wanted.reshape(-1)[at])
    return factor if near(mix.got, factor * mix.wanted) else None


def is_zero(weights: Tensor, mix: Weighed) -> bool:
    """Beside the largest weight of those that are there."""
    most = float(mix.got.abs().max())
    return not weights.numel() or float(weights.abs().max()) <= ALIKE * most


def alone(mix: Weighed) -> bool:
    """Only its own backwards are in it, though others belong in it."""
    mine = mix.mine
    return (
        bool(mine.any())
        and is_zero(mix.got[~mine], mix)
        and not is_zero(mix.got[mine], mix)
        and not is_zero(mix.wanted[~mine], mix)
    )


def left_out(mix: Weighed) -> list[int]:
    """Ranks of which nothing is in it, though it belongs there."""
    return [
        rank
        for source, got, wanted in zip(mix.sources, mix.got, mix.wanted, strict=True)
        if is_zero(got, mix) and not is_zero(wanted, mix)
        for rank in source
    ]


def foreign_passes(mix: Weighed) -> list[int]:
    """Backwards of which nothing belongs in it, and all of which is; the others are right."""
    foreign = [
        k
        for k in range(mix.got.shape[1])
        if is_zero(mix.wanted[:, k], mix) and not is_zero(mix.got[:, k], mix)
    ]
    others = [k for k in range(mix.got.shape[1]) if k not in foreign]
    alike = bool(others) and near(mix.got[:, others], mix.wanted[:, others])
    return foreign if alike else []


def early_passes_alone(mix: Weighed) -> bool:
    """Of others, only the last backward is in it."""
    mine = mix.mine
    others = mix.got[~mine]
    return (
        mix.got.shape[1] > 1
        and bool(mine.any())
        and is_zero(others[:, :-1].reshape(-1), mix)
        and not is_zero(others[:, -1], mix)
        and not is_zero(mix.got[mine][:, :-1].reshape(-1), mix)
    )


def late_passes_alone(mix: Weighed) -> bool:
    """Of others, the first backwards are in it and the last are not; of its own all are."""
    mine = mix.mine
    passes = mix.got.shape[1]
    there = [not is_zero(mix.got[~mine][:, k], mix) for k in range(passes)]
    own = [not is_zero(mix.got[mine][:, k], mix) for k in range(passes)]
    return (
        bool(mine.any())
        and bool((~mine).any())
        and all(own)
        and there == sorted(there, reverse=True)
        and len(set(there)) == 2
    )


def even(mix: Weighed) -> bool:
    """All ranks and backwards weigh the same, though they must not."""
    return near(mix.got, mix.got[0, 0].expand_as(mix.got)) and bool((mix.wanted > 0).all())
