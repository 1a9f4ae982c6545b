"""What kernels share, at its bounds: checks of arguments, sinks, layouts, the cache, the tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sumgrad.kernels.interpreted import product, use_even_products
from sumgrad.kernels.kv_cache import KeyValueCache
from sumgrad.kernels.layout import Layout, LayoutError, Piece, UnalignedCut, resolve
from sumgrad.kernels.linear import column_nodes
from sumgrad.kernels.runtime import (
    ALIGNMENT,
    KernelError,
    accumulator_dtype,
    block_of,
    check_eps,
    check_floats,
    check_row,
    check_shape,
    compute,
    compute_dtype,
    launch,
)
from sumgrad.kernels.sink import check_sinks, deliver
from sumgrad.kernels.tree import Accumulator, Nodes, TreeError, TreeId, plan_tree, sum_nodes


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def test_arguments_are_checked():
    assert check_floats(a=draw(2), b=draw(3)) == torch.float64
    with pytest.raises(KernelError, match="expected a dense tensor"):
        check_floats(a=torch.eye(2).to_sparse())
    check_shape("x", draw(2, 3), ("R", 3))
    for shape in ((3, 3), ("R", 4), ("R",), ("R", 3, "D")):
        with pytest.raises(KernelError, match=r"x: got shape \(2, 3\)"):
            check_shape("x", draw(2, 3), shape)
    for eps in (0, 1e-6, 5):
        check_eps(eps)
    for eps in (-1e-9, float("inf"), float("nan")):
        with pytest.raises(KernelError, match="eps: got"):
            check_eps(eps)
    for length in (1, 1 << 16):
        check_row("x", length)
    for length in (0, (1 << 16) + 1):
        with pytest.raises(KernelError, match=f"rows of {length} elements, expected 1 to 65536"):
            check_row("x", length)
    assert [block_of(n) for n in (0, 1, 2, 3, 4, 5, 1000)] == [1, 1, 2, 4, 4, 8, 1024]
    assert block_of(3, least=16) == 16


def test_what_a_kernel_is_given():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert accumulator_dtype(dtype) == compute_dtype(dtype) == torch.float32
        assert compute(torch.ones(2, dtype=dtype)).dtype == torch.float32
    assert accumulator_dtype(torch.float64) == compute_dtype(torch.float64) == torch.float64
    base = torch.arange(9.0)
    assert compute(base) is base
    odd = compute(base[1:])
    assert odd.tolist() == list(range(1, 9))
    assert odd.data_ptr() % ALIGNMENT == 0
    assert ALIGNMENT == 16
    assert base[4:].data_ptr() == compute(base[4:]).data_ptr()
    assert compute(torch.ones(2, 3).T).is_contiguous()
    launch(None, (3, 0))  # an empty grid runs nothing


def test_sinks_take_nodes_and_without_them_a_gradient_is_rounded_once():
    nodes = column_nodes(torch.tensor([[3.0], [2.0**-6]]), Layout.single(2), "u", 16)
    assert deliver(nodes, "w", None, torch.bfloat16).tolist() == [3.015625]
    sinks = {"w": Accumulator(1)}
    assert deliver(nodes, "w", sinks, torch.bfloat16) is None
    assert sinks["w"].finish().tolist() == [3 + 2.0**-6]
    check_sinks("op", None, ["a", "b"])
    check_sinks("op", {"a": None, "b": None}, ["a", "b"])
    for held, missing in (({"a": None}, "b"), ({"b": None}, "a"), ({}, "a")):
        with pytest.raises(KeyError, match=f"op: sinks has no accumulator for '{missing}'"):
            check_sinks("op", held, ["a", "b"])


def test_layouts_name_rows():
    packed = Layout.packed((2, 0, 1), samples=(4, 0, 2), num_samples=5, gap=1)
    assert packed.positions.tolist() == [-1, 0, 1, -1, -1, 0]
    assert packed.samples.tolist() == [-1, 4, 4, -1, -1, 2]
    assert (packed.num_tokens, packed.num_rows, packed.num_samples) == (3, 6, 5)
    assert Layout.packed((2, 1)).num_samples == 2
    right, left = Layout.padded((1, 3)), Layout.padded((1, 3), width=4, side="left")
    assert right.positions.tolist() == [0, -1, -1, 0, 1, 2]
    assert left.positions.tolist() == [-1, -1, -1, 0, -1, 0, 1, 2]
    assert Layout.padded((3,), width=3).num_rows == 3
    for bad in ({"width": 2}, {"side": "up"}):
        with pytest.raises(LayoutError):
            Layout.padded((1, 3), **bad)
    assert resolve(None, 3).pieces == (Piece(sample=0, stop=3, row=0),)
    assert resolve(right, 6) is right
    with pytest.raises(LayoutError, match="has 6 physical rows, the tensor 5"):
        resolve(right, 5)


def piece_layout(*pieces: Piece, num_samples: int = 2, num_rows: int = 8) -> Layout:
    return Layout(num_samples=num_samples, num_rows=num_rows, pieces=pieces)


def test_layouts_up_to_their_bounds_and_not_past_them():
    top = 2**32
    piece_layout(Piece(sample=1, start=top - 2, stop=top, row=6))
    piece_layout(num_samples=2**31 - 1)
    piece_layout(Piece(sample=0, stop=4, row=0), Piece(sample=1, stop=4, row=4))
    piece_layout(
        Piece(sample=0, start=2, stop=4, row=0), Piece(sample=0, stop=2, row=4, ends=False)
    )
    for bad in (
        {"num_samples": 2**31}, {"num_samples": -1},
    ):  # fmt: skip
        with pytest.raises(LayoutError, match="num_samples"):
            piece_layout(**bad)
    for piece in (
        Piece(sample=2, stop=1, row=0), Piece(sample=-1, stop=1, row=0),
        Piece(sample=0, start=3, stop=2, row=0), Piece(sample=0, start=-1, stop=2, row=0),
        Piece(sample=0, start=top - 1, stop=top + 1, row=0), Piece(sample=0, stop=2, row=7),
        Piece(sample=0, stop=2, row=-1),
    ):  # fmt: skip
        with pytest.raises(LayoutError):
            piece_layout(piece)
    with pytest.raises(LayoutError, match="rows 3 to 4 belong to two pieces"):
        piece_layout(Piece(sample=0, stop=4, row=0), Piece(sample=1, stop=4, row=3))
    with pytest.raises(LayoutError, match="positions of sample 0 1 to 2 belong to two"):
        piece_layout(
            Piece(sample=0, stop=2, row=0, ends=False), Piece(sample=0, start=1, stop=4, row=4)
        )
    with pytest.raises(LayoutError, match="a piece that ends is not its last"):
        piece_layout(Piece(sample=0, stop=2, row=0), Piece(sample=0, start=2, stop=4, row=4))


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (Piece(sample=0, start=4, stop=8, row=0, ends=False), None),
        (Piece(sample=0, start=4, stop=7, row=0), None),
        (Piece(sample=0, start=5, stop=8, row=0), "cut at position 5; .* of 4 .*example 4 or 8"),
        (Piece(sample=0, stop=6, row=0, ends=False), "cut at position 6; .* of 4 .*example 4 or 8"),
        (Piece(sample=0, stop=3, row=0, ends=False), "cut at position 3; .*example 4 or 4"),
    ],
)
def test_cuts_inside_a_sample_are_multiples(piece, words):
    layout = piece_layout(piece)
    if words is None:
        layout.check_cuts(4, "x")
    else:
        with pytest.raises(UnalignedCut, match=words):
            layout.check_cuts(4, "x")


def test_a_cache_takes_chunks_in_order_and_knows_its_room():
    whole = Layout.packed((20, 16))
    cache = KeyValueCache(whole, num_heads=1, head=2, dtype=torch.float32)
    k = draw(16, 1, 2, dtype=torch.float32)
    first = Piece(sample=1, stop=16, row=0)
    cache.write(k, k + 1, Layout(num_samples=2, num_rows=16, pieces=(first,)))
    assert torch.equal(cache.keys[20:36], k)
    assert torch.equal(cache.values[20:36], k + 1)
    assert not cache.keys[:20].any()
    assert cache.first_row(first) == 20
    with pytest.raises(LayoutError, match="no room for positions up to 21"):
        cache.room(Piece(sample=0, start=16, stop=21, row=0))
    with pytest.raises(LayoutError, match="no room"):
        cache.room(Piece(sample=7, stop=1, row=0))
    with pytest.raises(LayoutError, match="the sample ends at 20"):
        cache.room(Piece(sample=0, stop=16, row=0))
    carry = cache.carry()
    assert [c.dtype for c in carry] == [torch.float32] * 2
    carry[0][20:36] = 2.0
    carry[1][20:36] = 3.0
    carry[1][:20] = 4.0
    taken = cache.take(
        Layout(num_samples=2, num_rows=18, pieces=(Piece(sample=1, stop=16, row=2),))
    )
    assert [t[2:].unique().tolist() for t in taken] == [[2], [3]]
    assert [t[:2].unique().tolist() for t in taken] == [[0], [0]]
    again = cache.carry()
    assert again[0] is carry[0]
    assert not again[0].any()
    assert again[1].unique().tolist() == [0, 4]
    for pieces in ((Piece(sample=0, start=2, stop=4, row=0),),
                   (Piece(sample=0, stop=4, row=0, ends=False),)):  # fmt: skip
        with pytest.raises(LayoutError, match="must hold whole samples"):
            KeyValueCache(piece_layout(*pieces), num_heads=1, head=2, dtype=torch.float32)


def test_a_stack_is_as_deep_as_leaves_wait_for_their_siblings():
    for leaves, depth in ((1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4)):
        assert plan_tree(Layout.single(16 * leaves), 16).depth == depth, leaves
    assert plan_tree(Layout.packed((16, 16)), 16).depth == 2
    assert plan_tree(Layout.packed((0,)), 16).depth == 1


def test_errors_of_a_tree_say_where():
    tree = TreeId(leaf=16)

    def nodes(*keys, empties=()):
        values = torch.ones(len(keys), 1)
        return Nodes(tree=tree, num_samples=4, keys=keys, empties=empties, values=values)

    held = Accumulator(4)
    held.add(nodes((32, 0), (32, 3)))
    with pytest.raises(TreeError, match=r"nobody brought sample 1 to sample 3$"):
        held.finish()
    held = Accumulator(4)
    held.add(nodes((0, (1 << 32) + 2), (32, 3)))
    with pytest.raises(TreeError, match=r"sample 0 to sample 1 block 2, and 1 more ranges"):
        held.finish()
    with pytest.raises(
        TreeError, match=r"node \(0, 4294967298\), which begins at sample 1 block 2,"
    ):
        held.add(nodes((0, (1 << 32) + 2)))
    part = nodes((32, 0), (32, 2), (32, 3))
    assert sum_nodes(part).tolist() == [3]
    assert sum_nodes(nodes(empties=((34, 0),))).tolist() == [0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_a_product_of_tiles_rounds_every_row_and_column_alike(dtype):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(s).astype(dtype) for s in ((2, 16, 48), (2, 48, 32)))
    found = product(a, b, dtype)
    rows, columns = rng.permutation(16), rng.permutation(32)
    assert np.array_equal(product(a[:, rows], b[..., columns], dtype), found[:, rows][..., columns])
    wide = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(found - wide).max() < 48 * np.finfo(dtype).eps * np.abs(wide).max()
    assert np.array_equal(product(a[0, :, :1], b[0, :1], dtype), a[0, :, :1] * b[0, :1])


def test_the_interpreter_multiplies_tiles_so():
    from triton.runtime.interpreter import InterpreterBuilder

    use_even_products()
    use_even_products()
    assert InterpreterBuilder.create_dot.__module__ == "sumgrad.kernels.interpreted"
