"""The canonical tree without any kernel: plans, accumulators, bounds, errors."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sumgrad.kernels.layout import Layout, LayoutError, Piece, UnalignedCut
from sumgrad.kernels.tree import (
    Accumulator,
    Nodes,
    TreeError,
    TreeId,
    dyadic,
    merge,
    plan_tree,
    sum_nodes,
)

LEAF = 16
TREE = TreeId(leaf=LEAF)
LENGTHS = (37, 16, 1, 50, 0, 23, 31)


def leaf_values(keys) -> np.ndarray:
    """float32 (n, 3): a leaf's value follows from its key alone."""
    out = [np.random.default_rng(key % 2**63).standard_normal(3) * 2.0 ** (key % 9) for key in keys]
    return np.array(out, dtype=np.float32).reshape(-1, 3)


def fold_oracle(values: dict[int, np.ndarray], height: int, index: int) -> np.ndarray | None:
    """The definition: left + right, the only child that is not EMPTY, or EMPTY."""
    inside = [key for key in values if key >> height == index]
    if not inside:
        return None
    if height == 0:
        return values[index]
    left = fold_oracle({k: values[k] for k in inside}, height - 1, 2 * index)
    right = fold_oracle({k: values[k] for k in inside}, height - 1, 2 * index + 1)
    if left is None or right is None:
        return left if right is None else right
    return left + right


def whole_root(lengths) -> np.ndarray | None:
    keys = [(s << 32) + b for s, n in enumerate(lengths) for b in range(-(-n // LEAF))]
    values = dict(zip(keys, leaf_values(keys), strict=True))
    return fold_oracle(values, 32 + max(0, len(lengths) - 1).bit_length(), 0)


def stack_fold(plan, values: np.ndarray) -> np.ndarray:
    """What a kernel does with `merges`: a stack for each node."""
    out = []
    for begin, end in zip(plan.first, plan.first[1:], strict=False):
        stack: list[np.ndarray] = []
        for i in range(begin, end):
            value = values[i]
            for _ in range(plan.merges[i]):
                value = stack.pop() + value
            stack.append(value)
            assert len(stack) <= plan.depth
        assert len(stack) == 1
        out.append(stack[0])
    return np.array(out, dtype=np.float32).reshape(-1, 3)


def stage_fold(plan, values: np.ndarray) -> np.ndarray:
    """What the fold kernel does with `stages`: a pair tree over 16 slots."""
    for table in plan.stages:
        slots = np.where((table >= 0)[..., None], values[np.maximum(table, 0)], np.float32(0))
        while slots.shape[1] > 1:
            slots = slots[:, 0::2] + slots[:, 1::2]
        values = slots[:, 0]
    return values


def nodes_of(layout: Layout) -> Nodes:
    plan = plan_tree(layout, LEAF)
    values = leaf_values(plan.keys.tolist())
    folded = stack_fold(plan, values)
    assert folded.tobytes() == stage_fold(plan, values).tobytes()
    return Nodes(
        tree=TREE,
        num_samples=layout.num_samples,
        keys=plan.nodes,
        empties=plan.empties,
        values=torch.from_numpy(folded),
    )


def pieces_of(lengths, cuts) -> list[Piece]:
    """Samples cut at the given (sample, position) pairs, rows numbered one after another."""
    out, row = [], 0
    for sample, length in enumerate(lengths):
        inner = sorted({p for s, p in cuts if s == sample and 0 < p < length})
        for start, stop in zip([0, *inner], [*inner, length], strict=True):
            out.append(Piece(sample=sample, start=start, stop=stop, row=row, ends=stop == length))
            row += stop - start
    return out


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=9), seed=st.integers(0, 10**6))
def test_any_cuts_in_any_order_give_the_bits_of_the_definition(lengths, seed):
    draw = random.Random(seed)
    cuts = [(draw.randrange(len(lengths)), LEAF * draw.randrange(6)) for _ in range(6)]
    pieces = pieces_of(lengths, cuts)
    draw.shuffle(pieces)
    num_calls = draw.randint(1, len(pieces))
    calls = [pieces[i::num_calls] for i in range(num_calls)]
    accumulator = Accumulator(len(lengths))
    for call in calls:
        layout = Layout(num_samples=len(lengths), num_rows=1000, pieces=tuple(call))
        accumulator.add(nodes_of(layout))
    root, expected = accumulator.finish(), whole_root(lengths)
    if expected is None:
        assert root is None
    else:
        assert root is not None
        assert root.numpy().tobytes() == expected.tobytes()


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 60), min_size=2, max_size=12), ranks=st.integers(2, 5))
def test_ranks_that_pass_their_nodes_on_give_the_same_bits(lengths, ranks):
    whole = Accumulator(len(lengths))
    for rank in range(ranks):
        own = list(range(len(lengths)))[rank * len(lengths) // ranks :][
            : (rank + 1) * len(lengths) // ranks - rank * len(lengths) // ranks
        ]
        layout = Layout.packed(
            [lengths[s] for s in own], samples=own, num_samples=len(lengths), gap=2
        )
        local = Accumulator(len(lengths))
        local.add(nodes_of(layout))
        whole.add(local.nodes())
    expected = whole_root(lengths)
    root = whole.finish()
    assert (root is None) == (expected is None)
    assert root is None or root.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("num", [12, 100, 1000])
def test_in_key_order_few_nodes_are_open(num):
    accumulator = Accumulator(num)
    for sample in range(num):
        layout = Layout.packed([20], samples=[sample], num_samples=num)
        accumulator.add(nodes_of(layout))
    assert accumulator.most_open <= 2 * math.ceil(math.log2(num)) + 1
    assert accumulator.finish() is not None


@pytest.mark.parametrize("num", [2, 3, 7, 64, 1000])
def test_a_contiguous_range_owns_few_nodes(num):
    bound = max(1, 2 * math.ceil(math.log2(num)) - 2)
    draw = random.Random(num)
    for _ in range(50):
        a, b = sorted(draw.sample(range(num + 1), 2))
        layout = Layout.packed([20] * (b - a), samples=range(a, b), num_samples=num)
        assert len(plan_tree(layout, LEAF).nodes) <= bound


def test_random_order_holds_more_but_gives_the_same_bits():
    order = list(range(64))
    random.Random(1).shuffle(order)
    accumulator = Accumulator(64)
    for sample in order:
        layout = Layout.packed([20], samples=[sample], num_samples=64)
        accumulator.add(nodes_of(layout))
    assert 10 < accumulator.most_open <= 33
    assert accumulator.finish().numpy().tobytes() == whole_root([20] * 64).tobytes()


@given(st.integers(0, 2**40), st.integers(0, 2**20))
def test_dyadic_tiles_a_range_without_gap_or_overlap(start, size):
    at = start
    for height, index in dyadic(start, start + size):
        assert index << height == at
        at = (index + 1) << height
    assert at == start + size


def test_a_plain_sum_would_not_have_the_same_bits():
    """The inputs of these tests can tell orders apart: else they would prove nothing."""
    keys = [(s << 32) + b for s, n in enumerate(LENGTHS) for b in range(-(-n // LEAF))]
    values = leaf_values(keys)
    plain = values[0].copy()
    for value in values[1:]:
        plain = plain + value
    assert plain.tobytes() != whole_root(LENGTHS).tobytes()


def test_an_unaligned_cut_is_named():
    piece = Piece(sample=0, start=0, stop=21, row=0, ends=False)
    layout = Layout(num_samples=1, num_rows=21, pieces=(piece,))
    with pytest.raises(UnalignedCut, match=r"sample 0 is cut at position 21.*multiple of 16"):
        plan_tree(layout, LEAF)
    with pytest.raises(UnalignedCut, match=r"position 16.*multiple of 64"):
        Layout(
            num_samples=1, num_rows=9, pieces=(Piece(sample=0, start=16, stop=25, row=0),)
        ).check_cuts(64, "attention")


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([Piece(sample=0, stop=5, row=0), Piece(sample=1, stop=5, row=4)], "rows 4 to 5 belong"),
        (
            [Piece(sample=0, stop=16, row=0, ends=False), Piece(sample=0, stop=20, row=18)],
            "positions of sample 0",
        ),
        ([Piece(sample=7, stop=5, row=0)], "the batch has samples 0 to 1"),
        ([Piece(sample=0, stop=50, row=0)], "leaves the 40 physical rows"),
        ([Piece(sample=0, start=9, stop=5, row=0)], "start <= stop"),
    ],
)
def test_impossible_layouts_are_refused(pieces, words):
    with pytest.raises(LayoutError, match=words):
        Layout(num_samples=2, num_rows=40, pieces=tuple(pieces))


def test_missing_and_repeated_samples_are_named():
    accumulator = Accumulator(4)
    accumulator.add(nodes_of(Layout.packed([20, 20], samples=[0, 3], num_samples=4)))
    with pytest.raises(TreeError, match="nobody brought sample 1 to sample 3"):
        accumulator.finish()
    with pytest.raises(TreeError, match="begins at sample 3, was counted before"):
        accumulator.add(nodes_of(Layout.packed([20], samples=[3], num_samples=4)))


def test_trees_of_different_kinds_never_merge():
    accumulator = Accumulator(2)
    accumulator.add(nodes_of(Layout.packed([20], samples=[0], num_samples=2)))
    nodes = nodes_of(Layout.packed([20], samples=[1], num_samples=2))
    other = Nodes(
        tree=TreeId(leaf=32),
        num_samples=2,
        keys=nodes.keys,
        empties=nodes.empties,
        values=nodes.values,
    )
    with pytest.raises(TreeError, match="never merge"):
        accumulator.add(other)
    with pytest.raises(TreeError, match="nodes of 3 samples"):
        accumulator.add(nodes_of(Layout.packed([20], samples=[1], num_samples=3)))


def test_empty_batches_have_no_root():
    assert Accumulator(0).finish() is None
    accumulator = Accumulator(2)
    accumulator.add(nodes_of(Layout.packed([0, 0])))
    assert accumulator.finish() is None
    assert sum_nodes(nodes_of(Layout.packed([0, 0]))).tolist() == [0, 0, 0]


def test_keys_beyond_64_bits_do_not_wrap():
    """The last sample of the largest batch, whose node indices need more than 32 bits."""
    last = 2**31 - 2
    layout = Layout.packed([20], samples=[last], num_samples=2**31 - 1)
    plan = plan_tree(layout, LEAF)
    assert plan.keys.tolist() == [(last << 32), (last << 32) + 1]
    assert plan.nodes == ((32, last),)


def test_an_accumulator_checks_and_copies_what_it_is_given():
    def nodes(samples, shape=(3,), dtype=torch.float32):
        keys = tuple((32, s) for s in samples)
        values = torch.ones(len(samples), *shape, dtype=dtype)
        return Nodes(tree=TREE, num_samples=4, keys=keys, empties=(), values=values)

    accumulator = Accumulator(4)
    first = nodes([0])
    accumulator.add(first)
    for other in (nodes([1], shape=(1,)), nodes([1], dtype=torch.float64)):
        with pytest.raises(TreeError, match="shape, dtype, device"):
            accumulator.add(other)
    with pytest.raises(TreeError, match="was counted before"):
        accumulator.add(nodes([1, 0]))
    first.values.add_(7)
    accumulator.add(nodes([1, 2, 3]))  # sample 1 was not half taken
    assert accumulator.finish().tolist() == [4, 4, 4]
    accumulator.finish().mul_(2)
    assert accumulator.finish().tolist() == [4, 4, 4]


def test_layouts_that_contradict_themselves_are_refused():
    pieces = (Piece(sample=0, stop=16, row=0), Piece(sample=0, start=16, stop=20, row=16))
    with pytest.raises(LayoutError, match="a piece that ends is not its last"):
        Layout(num_samples=1, num_rows=20, pieces=pieces)
    tensors = Layout.packed(torch.tensor([20, 20]), samples=np.array([1, 0]))
    assert tensors == Layout.packed([20, 20], samples=[1, 0])


def test_nothing_merged_with_a_node_is_the_node():
    node = torch.tensor([1.0, 2.0])
    assert merge(None, None) is None
    assert merge(node, None) is node
    assert merge(None, node) is node
