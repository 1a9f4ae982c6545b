"""The canonical reduction tree, version 1: one order of addition for every layout.

A leaf holds up to `leaf` consecutive positions of one sample, b = position // leaf, and has the key
sample * 2**32 + b. Node (h, k) covers the keys [k 2**h, (k + 1) 2**h): left + right, or the only
child that is not EMPTY, or EMPTY. EMPTY means that no valid position lies there; a masked loss or
an unused token is not empty. Partials merge only as siblings, so whoever owns which leaves, the
root has the same bits.

    plan_tree(layout, leaf)   which nodes the rows of one call make: the maximal complete ones
    Nodes                     these nodes with their values
    Accumulator               merges the nodes of micro-batches and ranks in any order

Nothing here imports Triton. Keys are Python integers: there is no size at which they wrap.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sumgrad.kernels.layout import Layout
from torch import Tensor

VERSION = 1
SAMPLE_BITS = 32
RADIX_BITS = 4  # a fold stage merges up to 16 slots
Key = tuple[int, int]  # (height, index)


class TreeError(ValueError):
    """Nodes that must not meet: of different trees, owned twice, or missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeId:
    """What fixes the bits of a node; nodes of different trees never merge.

    use: operator and weight, as "rms_norm.weight". dtype: of the inputs. leaf: positions a leaf
    holds. tile: rows, columns and depth of the matrix tile (BM, BN, BK), or zeros. instruction:
    how products are summed.
    """

    leaf: int
    use: str = ""
    dtype: str = ""
    tile: tuple[int, int, int] = (0, 0, 0)
    instruction: str = "chain"
    fusion: str = "separate"
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreePlan:
    """The leaves that one call's rows hold, and how they fold into its nodes.

    keys, row, count: int64 (n,), each leaf's key, first physical row and number of rows, in key
    order. nodes: the m maximal complete nodes with a leaf in them; node i has the leaves
    first[i] to first[i + 1]. empties: complete nodes without a leaf, which the owner must report.
    merges: int32 (n,), how often a stack of partials merges its top two after each leaf.
    depth: the most partials such a stack holds. stages: int32 (m_s, 16) tables of slots, -1 is
    EMPTY; applied one after another to the n leaves they give the m nodes.
    """

    leaf: int
    num_samples: int
    keys: np.ndarray
    row: np.ndarray
    count: np.ndarray
    nodes: tuple[Key, ...]
    first: np.ndarray
    empties: tuple[Key, ...]
    merges: np.ndarray
    depth: int
    stages: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nodes:
    """Complete nodes of one tree. values: (len(keys), *shape) float32 or float64, unrounded."""

    tree: TreeId
    num_samples: int
    keys: tuple[Key, ...]
    empties: tuple[Key, ...]
    values: Tensor


def plan_tree(layout: Layout, leaf: int) -> TreePlan:
    """The leaves and nodes of a layout. leaf: a power of two >= 16. Raises UnalignedCut."""
    plan: TreePlan = layout.derived(("tree", leaf), lambda: _plan_tree(layout, leaf))
    return plan


def _plan_tree(layout: Layout, leaf: int) -> TreePlan:
    if leaf < 16 or leaf & (leaf - 1):
        raise TreeError(f"leaf: got {leaf}, expected a power of two >= 16")
    layout.check_cuts(leaf, f"leaves of {leaf} positions")
    leaves = sorted(_leaves(layout, leaf))
    keys = [key for key, _, _ in leaves]
    nodes, empties, first = _own_nodes(layout, leaf, keys)
    merges, depth = stack_schedule(keys, first)
    return TreePlan(
        leaf=leaf,
        num_samples=layout.num_samples,
        keys=np.array(keys, dtype=np.int64),
        row=np.array([row for _, row, _ in leaves], dtype=np.int64),
        count=np.array([count for _, _, count in leaves], dtype=np.int64),
        nodes=tuple(nodes),
        first=np.array(first, dtype=np.int64),
        empties=tuple(empties),
        merges=merges,
        depth=depth,
        stages=_stages(keys, first),
    )


def _leaves(layout: Layout, leaf: int) -> Iterable[tuple[int, int, int]]:
    """(key, first physical row, number of rows) of every leaf."""
    for p in layout.pieces:
        for start in range(p.start, p.stop, leaf):
            key = (p.sample << SAMPLE_BITS) + start // leaf
            yield key, p.row + start - p.start, min(leaf, p.stop - start)


def _own_nodes(
    layout: Layout, leaf: int, keys: Sequence[int]
) -> tuple[list[Key], list[Key], list[int]]:
    """The maximal complete nodes of the owned keys: with leaves, without, and leaf offsets."""
    spans = []
    for p in layout.pieces:
        base = p.sample << SAMPLE_BITS
        stop = base + (1 << SAMPLE_BITS) if p.ends else base + p.stop // leaf
        spans.append((base + p.start // leaf, stop))
    nodes: list[Key] = []
    empties: list[Key] = []
    first = [0]
    for start, stop in _joined(spans):
        for height, index in dyadic(start, stop):
            end = first[-1]
            while end < len(keys) and keys[end] < (index + 1) << height:
                end += 1
            if end > first[-1]:
                nodes.append((height, index))
                first.append(end)
            else:
                empties.append((height, index))
    assert first[-1] == len(keys), (first, len(keys))
    return nodes, empties, first


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted spans, neighbours joined."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(span for span in spans if span[1] > span[0]):
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def dyadic(start: int, stop: int) -> Iterable[Key]:
    """The maximal nodes (h, k) that tile [start, stop), ascending."""
    while start < stop:
        height = (start & -start).bit_length() - 1 if start else stop.bit_length()
        while start + (1 << height) > stop:
            height -= 1
        yield height, start >> height
        start += 1 << height


def _gap_levels(keys: Sequence[int], first: Sequence[int]) -> list[int]:
    """For each leaf the height at which it meets the next leaf of its node; 0 at a node's end."""
    gaps = [(a ^ b).bit_length() for a, b in itertools.pairwise(keys)]
    gaps += [0] * (len(keys) > 0)
    for end in first[1:]:
        gaps[end - 1] = 0
    return gaps


def stack_schedule(keys: Sequence[int], first: Sequence[int]) -> tuple[np.ndarray, int]:
    """How often a stack merges after each leaf, and how deep it gets.

    keys: of the leaves in order; first: where each node's leaves begin, and their end. A partial
    stays on the stack only while it waits for a sibling.
    """
    gaps = _gap_levels(keys, first)
    merges = np.zeros(len(gaps), dtype=np.int32)
    depth = 1
    for begin, end in itertools.pairwise(first):
        waiting: list[int] = []  # heights at which the partials below the top will merge
        for i in range(begin, end):
            last = i == end - 1
            depth = max(depth, len(waiting) + 1)
            while waiting and (last or waiting[-1] < gaps[i]):
                waiting.pop()
                merges[i] += 1
            if not last:
                waiting.append(gaps[i])
    return merges, depth


def _stages(keys: Sequence[int], first: Sequence[int]) -> tuple[np.ndarray, ...]:
    """Tables of 16 slots a row. Only key bits at which two leaves meet take part."""
    bits = sorted({gap - 1 for gap in _gap_levels(keys, first) if gap})
    frontier = []
    for node, (begin, end) in enumerate(itertools.pairwise(first)):
        for i in range(begin, end):
            place = sum(((keys[i] >> bit) & 1) << j for j, bit in enumerate(bits))
            frontier.append((node, place))
    stages = []
    for _ in range(0, len(bits), RADIX_BITS):
        rows: dict[tuple[int, int], list[int]] = {}
        for source, (node, place) in enumerate(frontier):
            slots = rows.setdefault((node, place >> RADIX_BITS), [-1] * (1 << RADIX_BITS))
            slots[place & ((1 << RADIX_BITS) - 1)] = source
        frontier = list(rows)
        stages.append(np.array(list(rows.values()), dtype=np.int32))
    return tuple(stages)


class Accumulator:
    """Merges nodes into the root, siblings only: the same bits in any order of arrival.

    Fed in key order it holds at most 2 ceil(log2 N) nodes and the incoming ones; fed at random it
    may hold N / 2. `most_open` tells how many it ever held. A node's values are not changed.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.tree: TreeId | None = None
        self.most_open = 0
        self._open: dict[Key, Tensor | None] = {}
        self._like: tuple[tuple[int, ...], torch.dtype, torch.device] = (
            (),
            torch.float32,
            torch.device("cpu"),
        )
        self._root_height = SAMPLE_BITS + max(0, num_samples - 1).bit_length()

    def add(self, nodes: Nodes) -> None:
        """Take nodes. Raises TreeError for another tree, another N, or positions seen before."""
        if nodes.num_samples != self.num_samples:
            raise TreeError(f"nodes of {nodes.num_samples} samples, expected {self.num_samples}")
        like = (tuple(nodes.values.shape[1:]), nodes.values.dtype, nodes.values.device)
        if self.tree is None:
            self.tree, self._like = nodes.tree, like
        if nodes.tree != self.tree:
            raise TreeError(f"nodes of {nodes.tree} never merge with nodes of {self.tree}")
        if like != self._like:
            raise TreeError(f"nodes of {like} (shape, dtype, device), expected {self._like}")
        taken: set[Key] = set()
        for key in (*nodes.empties, *nodes.keys):
            if self._overlaps(key, self._open) or self._overlaps(key, taken):
                raise TreeError(f"node {_name(key)} was counted before")
            taken.add(key)
        for key in nodes.empties:
            self._put(key, None)
        for key, value in zip(nodes.keys, nodes.values, strict=True):
            self._put(key, value)

    def _put(self, key: Key, value: Tensor | None) -> None:
        height, index = key
        mine = value is None  # whether the value is the accumulator's own and not the caller's
        while height < self._root_height:
            sibling = (height, index ^ 1)
            if not self._beyond(sibling):
                if sibling not in self._open:
                    break
                other = self._open.pop(sibling)
                left, right = (value, other) if index % 2 == 0 else (other, value)
                mine = mine or other is not None
                value = merge(left, right)
            height, index = height + 1, index >> 1
        self._open[height, index] = value if mine or value is None else value.clone()
        self.most_open = max(self.most_open, self.num_open)

    def _overlaps(self, key: Key, held: Collection[Key]) -> bool:
        height, index = key
        above = ((h, index >> (h - height)) for h in range(height, self._root_height + 1))
        if any(node in held for node in above):
            return True
        return any(h < height and k >> (height - h) == index for h, k in held)

    def _no_values(self) -> Tensor:
        shape, dtype, device = self._like
        return torch.empty((0, *shape), dtype=dtype, device=device)

    @property
    def num_open(self) -> int:
        """Nodes with a value that wait for their sibling."""
        return sum(value is not None for value in self._open.values())

    def nodes(self) -> Nodes:
        """What is held now, in key order; the accumulator keeps it."""
        if self.tree is None:
            raise TreeError("no nodes were added, so the tree is not known")
        held = sorted((k << h, h, k) for (h, k), v in self._open.items() if v is not None)
        keys = tuple((h, k) for _, h, k in held)
        empties = tuple(key for key, v in self._open.items() if v is None)
        values = [self._open[key] for key in keys]
        stacked = torch.stack([v for v in values if v is not None]) if values else None
        return Nodes(
            tree=self.tree,
            num_samples=self.num_samples,
            keys=keys,
            empties=empties,
            values=self._no_values() if stacked is None else stacked,
        )

    def _beyond(self, key: Key) -> bool:
        """Whether a node covers only samples past the batch's end: EMPTY for everybody."""
        height, index = key
        return index << height >= self.num_samples << SAMPLE_BITS

    def finish(self) -> Tensor | None:
        """The root, unrounded; None if no sample holds a position. Raises TreeError."""
        root = (self._root_height, 0)
        if root not in self._open and self.num_samples:
            missing = _complement(self._open, self.num_samples << SAMPLE_BITS)
            start, stop = missing[0]
            raise TreeError(
                f"the tree is not complete: nobody brought {_place(start)} to {_place(stop)}"
                + (f", and {len(missing) - 1} more ranges" if len(missing) > 1 else "")
            )
        found = self._open.get(root)
        return None if found is None else found.clone()


def merge(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right; None is EMPTY."""
    if left is None or right is None:
        return left if right is None else right
    return left + right


def sum_nodes(nodes: Nodes) -> Tensor:
    """The nodes of one call folded into one value, for callers that keep no tree across calls.

    A whole batch gives the root. Part of a batch gives the sum of what is there, in key order;
    such sums of different calls have no common order.
    """
    accumulator = Accumulator(nodes.num_samples)
    accumulator.add(nodes)
    held = accumulator.nodes() if accumulator.num_open else None
    if held is None:
        return torch.zeros_like(nodes.values.sum(0))
    total = held.values[0]
    for value in held.values[1:]:
        total = total + value
    return total


def _complement(keys: Iterable[Key], end: int) -> list[tuple[int, int]]:
    out, at = [], 0
    for start, stop in _joined([(k << h, (k + 1) << h) for h, k in keys]):
        if start > at:
            out.append((at, start))
        at = stop
    if at < end:
        out.append((at, end))
    return out


def _place(key: int) -> str:
    sample, block = key >> SAMPLE_BITS, key & ((1 << SAMPLE_BITS) - 1)
    return f"sample {sample}" + (f" block {block}" if block else "")


def _name(key: Key) -> str:
    height, index = key
    return f"({height}, {index}), which begins at {_place(index << height)},"
