"""The canonical tree across ranks: who owns which nodes, slices to all, one root back.

Each rank holds m complete nodes of a tree (sumgrad.kernels.tree) and the bits of the root must not
depend on how samples were spread. So nodes are not summed by the backend: every rank gets its 1/W
slice of all nodes by an all-to-all, finishes the tree for that slice, and an all-gather joins the
slices. Payload: (m + 1) / 2 times the bytes of a ring SUM.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None
Key = tuple[int, int]
MAX_NODES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds. values: (len(keys), *shape) in dtype; empties: complete, no position.

    tree: what fixes the nodes' bits, as text (a TreeId's repr); "" if nothing is held.
    """

    tree: str
    keys: Sequence[Key]
    empties: Sequence[Key]
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSum:
    """The root (*shape), and what this rank sent, against a ring SUM of the same tensor."""

    root: Tensor
    sent_bytes: int
    ring_sum_bytes: int
    most_nodes: int


Finish = Callable[[Sequence[Held]], Tensor]


class DifferentTrees(RuntimeError):
    """Two ranks hold nodes of different trees, which never merge."""


class TooManyNodes(RuntimeError):
    """A rank owns samples so scattered that its nodes would cost more than moving the samples."""


def tree_sum(
    held: Held,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    finish: Finish,
    group: Group = None,
    max_nodes: int = MAX_NODES,
) -> TreeSum:
    """The root of a tree whose nodes are spread over a group; the same bits on every rank.

    finish: every rank's Held, of a slice (k, n) each, -> the slice (n,) of the root; `tree` is this
    rank's own. Raises, on every rank alike, DifferentTrees, and TooManyNodes with rank and count.
    """
    assert held.values.dtype == dtype, (held.values.dtype, dtype)  # nothing is rounded on the way
    world = dist.get_world_size(group)
    device = held.values.device
    marks, tables = _gather_keys(held, device, group)
    if len(set(marks.values())) > 1:
        first = min(marks)
        other = next(rank for rank, mark in marks.items() if mark != marks[first])
        raise DifferentTrees(
            f"ranks {first} and {other} of the group hold nodes of different trees; "
            f"this rank's: {held.tree or 'none'}"
        )
    counts = [len(keys) for keys, _ in tables]
    if max(counts) > max_nodes:
        rank = counts.index(max(counts))
        raise TooManyNodes(
            f"rank {rank} of the group holds {max(counts)} nodes, more than {max_nodes}: give each "
            f"rank a contiguous range of samples before the exchange"
        )
    numel = prod(shape)
    width = -(-numel // world)
    sends = torch.zeros(len(held.keys), world * width, dtype=dtype, device=device)
    sends[:, :numel] = held.values.reshape(len(held.keys), numel)
    sends = sends.view(len(held.keys), world, width).transpose(0, 1).contiguous()
    received = torch.empty(sum(counts) * width, dtype=dtype, device=device)
    dist.all_to_all_single(
        received,
        sends.flatten(),
        output_split_sizes=[count * width for count in counts],
        input_split_sizes=[len(held.keys) * width] * world,
        group=group,
    )
    parts = received.view(-1, width).split(counts)
    shares = [
        Held(tree=held.tree, keys=keys, empties=empties, values=part)
        for (keys, empties), part in zip(tables, parts, strict=True)
    ]
    own = finish(shares).contiguous()
    assert own.shape == (width,), (own.shape, width)
    root = torch.empty(world * width, dtype=dtype, device=device)
    _all_gather(root, own, group)
    size = held.values.element_size()
    return TreeSum(
        root=root[:numel].reshape(tuple(shape)),
        sent_bytes=(len(held.keys) + 1) * width * (world - 1) * size,
        ring_sum_bytes=2 * width * (world - 1) * size,
        most_nodes=max(counts),
    )


def _all_gather(out: Tensor, own: Tensor, group: Group) -> None:
    """torch 2.13 renamed all_gather_into_tensor; older versions have only that name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, own, group=group)


def _gather_keys(
    held: Held, device: torch.device, group: Group
) -> tuple[dict[int, int], list[tuple[list[Key], list[Key]]]]:
    """A mark of the tree of every rank that holds something; every rank's (keys, empties)."""
    world = dist.get_world_size(group)
    mark = zlib.crc32(held.tree.encode())
    mine = torch.tensor([len(held.keys), len(held.empties), mark], device=device)
    sizes = torch.empty(world * 3, dtype=torch.int64, device=device)
    _all_gather(sizes, mine, group)
    heads = sizes.view(world, 3).tolist()
    pairs = [(num_keys, num_empties) for num_keys, num_empties, _ in heads]
    marks = {rank: head[2] for rank, head in enumerate(heads) if head[0] or head[1]}
    longest = max(1, *(a + b for a, b in pairs))
    table = torch.zeros(longest, 2, dtype=torch.int64, device=device)
    entries = [*held.keys, *held.empties]
    if entries:
        table[: len(entries)] = torch.tensor(entries, dtype=torch.int64, device=device)
    all_tables = torch.empty(world * longest, 2, dtype=torch.int64, device=device)
    _all_gather(all_tables, table.contiguous(), group)
    out = []
    for (num_keys, num_empties), rows in zip(
        pairs, all_tables.view(world, longest, 2).tolist(), strict=True
    ):
        named = [(height, index) for height, index in rows]
        out.append((named[:num_keys], named[num_keys : num_keys + num_empties]))
    return marks, out
