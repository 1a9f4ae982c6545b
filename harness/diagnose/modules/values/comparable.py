"""An argument of a line beside one that two processes have in common, as the function goes with it.

Most go element by element; heads, targets of classes and lengths of rows do not.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ATTENTION = "scaled_dot_product_attention"
CTC = "ctc_loss"
OF_CLASSES = {"cross_entropy": 1, "nll_loss": 1, "gather": -1}  # which: targets are places in it


def comparable(
    function: str,
    i: int,
    pair: tuple[Tensor, Tensor],
    shapes: tuple[torch.Size, torch.Size],
    places: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor] | None:
    """Argument i of both, as far as that function tells how it goes with the one in common."""
    got, wanted = pair
    if function == ATTENTION:
        if not _are_all_keys(got, wanted, i, shapes[0]):
            return None
        return _attended(got, i), _attended(wanted, i)
    if function == CTC:
        if got.dim() == wanted.dim() == 2:  # targets in lines, cut to the longest of a rank's
            width = min(got.shape[1], wanted.shape[1])
            got, wanted = got[:, :width], wanted[:, :width]
        mine, its = _of_each_row(got, shapes[0]), _of_each_row(wanted, shapes[1])
        return None if mine is None or its is None else (mine, its)
    if function in OF_CLASSES and not got.is_floating_point():
        told = _classes_there(got, shapes, places, OF_CLASSES[function])
        return None if told is None else (told, wanted)
    return got, wanted


def _classes_there(
    got: Tensor, shapes: tuple[torch.Size, torch.Size], places: tuple[Tensor, Tensor], dim: int
) -> Tensor | None:
    """Targets as the single process numbers its classes, which a rank may hold in another order.
    None where it holds fewer of them, as of a cut vocabulary."""
    mine, whole = shapes
    dim = min(dim % len(mine), len(mine) - 1)
    if mine[dim] != whole[dim] or len(mine) != len(whole) or got.dim() < len(mine) - 1:
        return None
    there = torch.full((mine.numel(),), -1)
    there[places[0]] = places[1]
    at = torch.arange(mine.numel()).reshape(mine)
    index = got if got.dim() == len(mine) else got.unsqueeze(dim)
    here = (index >= 0) & (index < mine[dim])
    try:
        element = there[at.gather(dim, index.clamp(0, mine[dim] - 1))]
    except RuntimeError:
        return None
    number = element // math.prod(whole[dim + 1 :]) % whole[dim]
    told = torch.where(here & (element >= 0), number, index)
    return told if got.dim() == len(mine) else told.squeeze(dim)


def _are_all_keys(got: Tensor, wanted: Tensor, i: int, queries: torch.Size) -> bool:
    """Whether a rank has as many keys as the single process, as none in a ring has; and of keys and
    values as many heads as of queries."""
    if min(got.dim(), wanted.dim(), len(queries)) < 3:
        return False
    if i in (1, 2):
        return got.shape[-3] == queries[-3] and got.shape[-2:] == wanted.shape[-2:]
    return got.shape[-1] == wanted.shape[-1]


def _attended(given: Tensor, i: int) -> Tensor:
    """Of keys or values one number for each head, whatever their order; of a mask how many keys
    each query sees, or what it adds for them."""
    if i in (1, 2):
        weights = torch.arange(1, given.shape[-1] + 1).double().sqrt()
        return (given.double() @ weights).sum(-1)[..., None, None]
    seen = given.double() if given.dtype == torch.bool else given.double().exp()
    return seen.sum(-1, keepdim=True)


def _of_each_row(given: Tensor, log_probs: torch.Size) -> Tensor | None:
    """Of lengths, or of targets in lines, one number for each row, as the second dimension has
    them."""
    if len(log_probs) != 3 or not given.dim() or len(given) != log_probs[1]:
        return None
    if given.dim() == 1:
        return given[:, None]
    weights = torch.arange(1, given.shape[1] + 1).double().sqrt()
    return (given.double() @ weights)[:, None]
