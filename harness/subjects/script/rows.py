"""Which rows a model was given: a digest of each, the same however a batch was cut or padded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MAX_ROWS = 4096  # of one call; further ones are not looked at
# Digests of a row: with what repeats at its end once, as it is, and without what repeats there.
# Then how many elements it has in each tensor.
Row = tuple[str, str, str, str]


def rows_of(inputs: Any) -> list[Row]:
    """The rows of a call's arguments: of every tensor with as many of them as the first has.

    Tensors that a gradient goes into are another stage's or model's output, and no rows.
    """
    tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and _is_data(t)]
    if not tensors:
        return []
    count = tensors[0].shape[0]
    rows = [t for t in tensors if t.shape[0] == count]
    if any(_is_edges(t, count) or _is_in_bags(t, count) for t in tensors):
        rows = [t for t in rows if not _counts_up(t)]
    tables = [_plain(t) for t in rows]
    if not tables:
        return []
    return [_digests([table[i] for table in tables]) for i in range(min(count, MAX_ROWS))]


def _is_data(tensor: Tensor) -> bool:
    if tensor.is_nested:
        return False  # its rows have no common shape
    return tensor.dim() > 0 and not tensor.requires_grad and not hasattr(tensor, "placements")


def _is_edges(tensor: Tensor, nodes: int) -> bool:
    """Whether it may say which nodes of a graph belong together, two and two."""
    pairs = _is_whole(tensor, 2) and tensor.shape[0] == 2 != nodes and tensor.numel() > 0
    return pairs and int(tensor.min()) >= 0 and int(tensor.max()) < nodes


def _is_in_bags(tensor: Tensor, bags: int) -> bool:
    """Whether it may be what offsets, of which there are so many, cut into bags."""
    return _is_whole(tensor, 1) and tensor.shape[0] > bags


def _counts_up(tensor: Tensor) -> bool:
    """Whether it may say which graph of its batch a node belongs to, or where a bag begins: such a
    number is anew in each batch."""
    if not _is_whole(tensor, 1) or not tensor.numel():
        return False
    return int(tensor[0]) == 0 and bool((tensor.diff() >= 0).all())


def _is_whole(tensor: Tensor, dims: int) -> bool:
    """Whether it holds integers, over so many dimensions."""
    return tensor.dim() == dims and not tensor.is_floating_point() and not tensor.is_complex()


def _plain(tensor: Tensor) -> Tensor:
    flat = tensor.detach().cpu()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.reshape(len(flat), math.prod(flat.shape[1:]))  # there may be no row
    # Floats in four bytes: rows are the same whatever they were cast to on their way.
    return flat.float() if flat.is_floating_point() else flat.to(torch.int64)


def _digests(parts: Sequence[Tensor]) -> Row:
    once, whole, cut = (hashlib.blake2b(digest_size=8) for _ in range(3))
    for part in parts:
        values = part.numpy()
        end = len(values)
        while end > 1 and values[end - 1] == values[-1]:
            end -= 1
        for total, stop in ((once, end + 1), (whole, len(values)), (cut, end)):
            total.update(values[:stop].tobytes() + b"|")
    size = " ".join(str(len(part)) for part in parts)
    return once.hexdigest(), whole.hexdigest(), cut.hexdigest(), size
