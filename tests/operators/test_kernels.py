"""Every kernel against its float64 oracle, gradcheck, awkward shapes, and arguments it must refuse.

The kernels run interpreted where there is no GPU; the plugin chose that before torch was imported.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from sumgrad.kernels import oracle
from sumgrad.kernels.attention import AttentionTiles, attention
from sumgrad.kernels.cross_entropy import cross_entropy
from sumgrad.kernels.embedding import embedding
from sumgrad.kernels.kv_cache import KeyValueCache
from sumgrad.kernels.layer_norm import layer_norm
from sumgrad.kernels.layout import Layout, LayoutError, Piece, UnalignedCut
from sumgrad.kernels.linear import default_tiles, linear
from sumgrad.kernels.rms_norm import rms_norm
from sumgrad.kernels.rope import rope
from sumgrad.kernels.runtime import InterpreterError, KernelError
from sumgrad.kernels.swiglu import swiglu
from sumgrad.kernels.tree import Accumulator

LENGTHS = (5, 0, 1, 21, 8)
ROWS = sum(LENGTHS)
EPS = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}
TILES = AttentionTiles(query=16, key=16)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, dtype=torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def agrees(got: torch.Tensor, wanted, dtype: torch.dtype, factor: float) -> None:
    """Within `factor` roundings of the largest value."""
    wanted = np.asarray(wanted, dtype=np.float64)
    assert tuple(got.shape) == wanted.shape
    assert torch.isfinite(got).all()
    error = np.abs(got.detach().double().numpy() - wanted).max(initial=0.0)
    assert error <= factor * EPS[dtype] * np.abs(wanted).max(initial=0.0), (error, dtype)


CASES = {
    "rms_norm": (
        {"x": (ROWS, 24), "weight": (24,)},
        (ROWS, 24),
        lambda t, layout: rms_norm(t["x"], t["weight"], layout=layout, leaf=16),
        lambda v, dy: oracle.rms_norm(v["x"], v["weight"], dy),
    ),
    "rms_norm, last block": (
        {"x": (ROWS, 24), "weight": (24,)},
        (ROWS, 24),
        lambda t, layout: rms_norm(t["x"], t["weight"], mode="last_block"),
        lambda v, dy: oracle.rms_norm(v["x"], v["weight"], dy),
    ),
    "layer_norm": (
        {"x": (ROWS, 23), "weight": (23,), "bias": (23,)},
        (ROWS, 23),
        lambda t, layout: layer_norm(t["x"], t["weight"], t["bias"], layout=layout, leaf=16),
        lambda v, dy: oracle.layer_norm(v["x"], v["weight"], v["bias"], dy),
    ),
    "linear": (
        {"x": (ROWS, 20), "weight": (19, 20), "bias": (19,)},
        (ROWS, 19),
        lambda t, layout: linear(
            t["x"], t["weight"], t["bias"], layout=layout, tiles=default_tiles(t["x"].dtype, 16)
        ),
        lambda v, dy: oracle.linear(v["x"], v["weight"], v["bias"], dy),
    ),
    "attention": (
        {"q": (ROWS, 4, 12), "k": (ROWS, 2, 12), "v": (ROWS, 2, 12)},
        (ROWS, 4, 12),
        lambda t, layout: attention(t["q"], t["k"], t["v"], layout=layout, tiles=TILES),
        lambda v, dy: oracle.attention(v["q"], v["k"], v["v"], dy, lengths=LENGTHS),
    ),
    "swiglu": (
        {"gate": (ROWS, 7), "up": (ROWS, 7)},
        (ROWS, 7),
        lambda t, layout: swiglu(t["gate"], t["up"]),
        lambda v, dy: oracle.swiglu(v["gate"], v["up"], dy),
    ),
    "rope": (
        {"x": (ROWS, 3, 10)},
        (ROWS, 3, 10),
        lambda t, layout: rope(t["x"], layout=layout),
        lambda v, dy: oracle.rope(v["x"], dy, lengths=LENGTHS),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_oracle(name, dtype):
    """float64 within 1e-12; the others within a small multiple of one rounding of the result.

    The oracle gets the rounded inputs: only the kernel's own arithmetic is judged. Sums of 35 rows
    may cancel, so 32 roundings of the largest value are allowed; measured: at most 5.
    """
    shapes, out, function, mathematics = CASES[name]
    tensors = {n: draw(*s, dtype=dtype, seed=i).requires_grad_() for i, (n, s) in
               enumerate(shapes.items())}  # fmt: skip
    seed = draw(*out, dtype=dtype, seed=9)
    y = function(tensors, Layout.packed(LENGTHS))
    assert y.dtype == dtype
    y.backward(seed)
    wanted = mathematics(
        {n: t.detach().double().numpy() for n, t in tensors.items()}, seed.double().numpy()
    )
    factor = 1e-12 / EPS[dtype] if dtype == torch.float64 else 32
    agrees(y, wanted["y"], dtype, factor)
    for n, tensor in tensors.items():
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        agrees(tensor.grad, wanted["d" + n], dtype, factor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_agrees_with_the_oracle(dtype):
    weight = draw(11, 6, dtype=dtype).requires_grad_()
    tokens = torch.randint(0, 11, (ROWS,), generator=torch.Generator().manual_seed(3))
    seed = draw(ROWS, 6, dtype=dtype)
    embedding(tokens, weight, layout=Layout.packed(LENGTHS), leaf=16).backward(seed)
    values = weight.detach().double().numpy()
    wanted = oracle.embedding(tokens.numpy(), values, seed.double().numpy())
    agrees(embedding(tokens, weight), wanted["y"], dtype, 0)
    agrees(weight.grad, wanted["dweight"], dtype, 32)


@pytest.mark.parametrize("vocabulary", [1, 2, 17, 2500])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_agrees_with_the_oracle(dtype, vocabulary):
    logits = (3 * draw(ROWS, vocabulary)).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (ROWS,), generator=torch.Generator().manual_seed(1))
    targets[4] = targets[9] = -100
    loss, count = cross_entropy(logits, targets, layout=Layout.packed(LENGTHS))
    assert count == ROWS - 2
    (loss * 0.37).backward()
    wanted = oracle.cross_entropy(logits.detach().double().numpy(), targets.numpy(), 0.37)
    agrees(loss, wanted["loss"], torch.float64 if dtype == torch.float64 else torch.float32, 64)
    agrees(logits.grad, wanted["dlogits"], dtype, 64 if vocabulary > 1 else 0)


def gradcheck(function, *inputs) -> None:
    leaves = tuple(t.requires_grad_() for t in inputs)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=False)


def test_gradcheck_of_every_operator():
    """torch's own finite differences, in float64, on layouts with padding and an empty sample."""
    layout = Layout.packed((2, 0, 1), gap=1)
    rows = layout.num_rows
    valid = (layout.positions >= 0)[:, None]

    def masked(y):
        return torch.where(valid if y.dim() == 2 else valid[..., None], y, 0)

    x = draw(rows, 5)
    gradcheck(lambda x, w: masked(rms_norm(x, w, layout=layout)), x, draw(5))
    gradcheck(
        lambda x, w, b: masked(layer_norm(x, w, b, layout=layout)), draw(rows, 5), draw(5), draw(5)
    )
    gradcheck(
        lambda x, w, b: masked(linear(x, w, b, layout=layout)), draw(rows, 5), draw(3, 5), draw(3)
    )
    gradcheck(
        lambda q, k, v: attention(q, k, v, layout=layout, tiles=TILES),
        draw(rows, 2, 3), draw(rows, 1, 3), draw(rows, 1, 3),
    )  # fmt: skip
    tokens = torch.arange(rows) % 4
    gradcheck(lambda w: embedding(tokens, w, layout=layout), draw(4, 3))
    gradcheck(swiglu, draw(rows, 2), draw(rows, 2))
    gradcheck(lambda x: masked(rope(x, layout=layout)), draw(rows, 1, 4))
    gradcheck(lambda z: cross_entropy(z, tokens, layout=layout)[0], draw(rows, 5))


@pytest.mark.parametrize("length", [1, 2, 3, 17, 100, 1000])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_norms_of_any_row_length(rows, length):
    x, weight, bias = (draw(*s) for s in ((rows, length), (length,), (length,)))
    dy = draw(rows, length, seed=5)
    for mode in ("tree", "last_block") if rows else ("tree",):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y = rms_norm(*leaves, mode=mode)
        y.backward(dy)
        wanted = oracle.rms_norm(x.numpy(), weight.numpy(), dy.numpy())
        for got, name in ((y, "y"), (leaves[0].grad, "dx"), (leaves[1].grad, "dweight")):
            np.testing.assert_allclose(got.detach(), wanted[name], rtol=1e-10, atol=1e-12)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = layer_norm(*leaves)
    y.backward(dy)
    wanted = oracle.layer_norm(x.numpy(), weight.numpy(), bias.numpy(), dy.numpy())
    names = ("dx", "dweight", "dbias")
    for got, name in ((y, "y"), *zip((t.grad for t in leaves), names, strict=True)):
        np.testing.assert_allclose(got.detach(), wanted[name], rtol=1e-9, atol=1e-11)


def test_last_block_has_a_second_stage_for_long_rows():
    x, weight, dy = draw(19, 9000), draw(9000), draw(19, 9000, seed=2)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    rms_norm(*leaves, mode="last_block").backward(dy)
    wanted = oracle.rms_norm(x.numpy(), weight.numpy(), dy.numpy())
    np.testing.assert_allclose(leaves[1].grad, wanted["dweight"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 130), (130, 1), (129, 257)])
@pytest.mark.parametrize("rows", [0, 1, 300])
def test_linear_of_any_shape(rows, k, n):
    x, weight, bias, dy = draw(rows, k), draw(n, k), draw(n), draw(rows, n)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = linear(*leaves)
    y.backward(dy)
    wanted = oracle.linear(x.numpy(), weight.numpy(), bias.numpy(), dy.numpy())
    names = ("dx", "dweight", "dbias")
    for got, name in ((y, "y"), *zip((t.grad for t in leaves), names, strict=True)):
        np.testing.assert_allclose(got.detach(), wanted[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("lengths", [(), (0,), (1,), (0, 0), (64,), (65, 1, 128)])
def test_attention_of_any_length(lengths):
    rows = sum(lengths)
    q, k, v, do = (draw(rows, 2, 8, seed=i) for i in range(4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    y = attention(*leaves, layout=Layout.packed(lengths))
    y.backward(do)
    wanted = oracle.attention(*(t.numpy() for t in (q, k, v, do)), lengths=lengths)
    for got, name in ((y, "y"), *zip((t.grad for t in leaves), ("dq", "dk", "dv"), strict=True)):
        np.testing.assert_allclose(got.detach(), wanted[name], rtol=1e-9, atol=1e-11)


def test_views_that_are_not_contiguous_give_the_right_result():
    x = draw(12, ROWS).T
    weight = draw(24)[::2]
    y = rms_norm(x, weight)
    assert torch.equal(y, rms_norm(x.contiguous(), weight.contiguous()))
    w = draw(12, 19).T
    assert torch.equal(linear(x, w), linear(x.contiguous(), w.contiguous()))
    wide = draw(ROWS, 2, 24)
    q = wide[:, :, ::2]
    assert torch.equal(rope(q), rope(q.contiguous()))


def test_padding_rows_take_no_part():
    """Poison in padding: no NaN reaches a valid row or a weight's gradient."""
    layout = Layout.padded(LENGTHS, width=25, side="left")
    valid = layout.positions >= 0
    x = draw(layout.num_rows, 6)
    x[~valid] = float("nan")
    dy = draw(layout.num_rows, 6, seed=3)
    dy[~valid] = float("nan")
    leaves = [x.clone().requires_grad_(), draw(6).requires_grad_()]
    rms_norm(*leaves, layout=layout).backward(dy)
    assert torch.isfinite(leaves[1].grad).all()
    assert torch.isfinite(leaves[0].grad).all()
    weight = draw(4, 6).requires_grad_()
    linear(x, weight, layout=layout).backward(dy[:, :4])
    assert torch.isfinite(weight.grad).all()
    q = x[:, None].repeat(1, 2, 1)
    assert torch.isfinite(attention(q, q, q, layout=layout, tiles=TILES)).all()
    table = draw(5, 6).requires_grad_()
    tokens = torch.where(valid, 1, -77)
    embedding(tokens, table, layout=layout).backward(dy)
    assert torch.isfinite(table.grad).all()
    loss, count = cross_entropy(x, tokens, layout=layout)
    assert torch.isfinite(loss)
    assert count == ROWS


def cut(sample: int, start: int, stop: int, row: int, length: int) -> Piece:
    return Piece(sample=sample, start=start, stop=stop, row=row, ends=stop == length)


def test_chunks_through_the_cache_can_be_differentiated_twice():
    """The carry starts anew for every backward pass, and chunks that nobody used bring nothing."""
    whole = Layout.packed((40,))
    q, k, v, do = (draw(40, 2, 8, seed=i) for i in range(4))

    def chunked(leaves):
        cache = KeyValueCache(whole, num_heads=2, head=8, dtype=torch.float64)
        parts = []
        for start, stop in ((0, 16), (16, 32), (32, 40)):
            rows = slice(start, stop)
            layout = Layout(
                num_samples=1, num_rows=stop - start, pieces=(cut(0, start, stop, 0, 40),)
            )
            parts.append(
                attention(*(t[rows] for t in leaves), layout=layout, cache=cache, tiles=TILES)
            )
        return torch.cat(parts)

    leaves = [t.requires_grad_() for t in (q, k, v)]
    wanted = torch.autograd.grad(attention(*leaves, tiles=TILES), leaves, do)
    y = chunked(leaves)
    for _ in range(2):
        got = torch.autograd.grad(y, leaves, do, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    first = torch.autograd.grad(y[:16], leaves, do[:16])
    alone = torch.autograd.grad(attention(*(t[:16] for t in leaves), tiles=TILES), leaves, do[:16])
    assert all(torch.equal(a, b) for a, b in zip(first, alone, strict=True))


def test_chunks_out_of_order_or_cut_inside_a_tile_are_refused():
    whole = Layout.packed((40,))
    x = draw(8, 1, 4)
    cache = KeyValueCache(whole, num_heads=1, head=4, dtype=torch.float64)
    later = Layout(num_samples=1, num_rows=8, pieces=(cut(0, 32, 40, 0, 40),))
    with pytest.raises(LayoutError, match="only 0 positions of the sample are cached"):
        attention(x, x, x, layout=later, cache=cache, tiles=TILES)
    odd = Layout(num_samples=1, num_rows=8, pieces=(cut(0, 0, 8, 0, 40),))
    with pytest.raises(UnalignedCut, match=r"position 8.*multiple of 16"):
        attention(x, x, x, layout=odd, cache=cache, tiles=TILES)
    with pytest.raises(LayoutError, match="a part of its sample; that needs a cache"):
        attention(x, x, x, layout=later, tiles=TILES)


def test_micro_batches_meet_in_an_accumulator_not_in_grad():
    x, weight, dy = draw(ROWS, 6), draw(6).requires_grad_(), draw(ROWS, 6, seed=1)
    whole = Accumulator(5)
    rms_norm(x, weight, layout=Layout.packed(LENGTHS), sinks={"weight": whole}).backward(dy)
    assert weight.grad is None
    parts = Accumulator(5)
    for samples, rows in (([3, 4], slice(6, 35)), ([0, 1, 2], slice(0, 6))):
        layout = Layout.packed([LENGTHS[s] for s in samples], samples=samples, num_samples=5)
        y = rms_norm(x[rows], weight, layout=layout, sinks={"weight": parts})
        y.backward(dy[rows])
    assert torch.equal(parts.finish(), whole.finish())


F32 = torch.zeros(4, 6)
BAD = {
    "shape": (lambda: rms_norm(F32, torch.zeros(5)), r"weight: got shape \(5,\), expected \(6\)"),
    "rank": (lambda: rms_norm(F32[0], torch.zeros(6)), r"x: got shape \(6,\), expected \(R, D\)"),
    "dtype": (lambda: rms_norm(F32, torch.zeros(6).double()), "expected one dtype"),
    "integer": (lambda: swiglu(F32.int(), F32.int()), r"gate: got torch.int32, expected a float"),
    "no tensor": (lambda: swiglu([1.0], F32), "gate: got list, expected a tensor"),
    "meta": (lambda: swiglu(F32.to("meta"), F32.to("meta")), "expected a CPU or a GPU"),
    "two devices": (lambda: swiglu(F32, F32.to("meta")), "different devices"),
    "mode": (lambda: rms_norm(F32, torch.zeros(6), mode="fast"), "mode: got 'fast'"),
    "no column": (lambda: rms_norm(F32[:, :0], torch.zeros(0)), "rows of 0 elements"),
    "inner": (lambda: linear(F32, torch.zeros(3, 5)), "weight: got shape"),
    "empty side": (lambda: linear(F32, torch.zeros(0, 6)), "no empty side"),
    "heads": (
        lambda: attention(torch.zeros(4, 3, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)),
        "k: got 2 heads, expected a divisor of q's 3",
    ),
    "head": (
        lambda: attention(*(torch.zeros(4, 1, 300) for _ in range(3))), "a head of 300 elements"
    ),
    "odd head": (lambda: rope(torch.zeros(4, 1, 5)), "a head of 5 elements, expected an even"),
    "token": (
        lambda: embedding(torch.tensor([0, 1, 4, 0]), torch.zeros(4, 6)),
        r"tokens\[2\]: got 4, expected 0 to 3",
    ),
    "negative": (
        lambda: embedding(torch.tensor([0, -1]), torch.zeros(4, 6)), r"tokens\[1\]: got -1"
    ),
    "float ids": (
        lambda: embedding(torch.zeros(4), torch.zeros(4, 6)), "tokens: got torch.float32"
    ),
    "target": (
        lambda: cross_entropy(F32, torch.tensor([0, 6, 0, 0])), r"targets\[1\]: got 6"
    ),
    "vocabulary": (lambda: cross_entropy(F32[:, :0], torch.zeros(4).long()), "empty vocabulary"),
    "layout": (
        lambda: rms_norm(F32, torch.zeros(6), layout=Layout.packed((3,))),
        "has 3 physical rows, the tensor 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_a_kernel_cannot_take_is_named(name):
    call, words = BAD[name]
    with pytest.raises((KernelError, LayoutError), match=words):
        call()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )


def test_a_process_that_chose_the_interpreter_too_late_gets_the_line_to_add():
    code = (
        "import torch._dynamo, os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from sumgrad.kernels.swiglu import swiglu\n"
        "swiglu(torch.ones(3), torch.ones(3))"
    )
    found = run_python(code)
    assert found.returncode == 1
    assert InterpreterError.__name__ in found.stderr
    assert 'import os; os.environ["TRITON_INTERPRET"] = "1"' in found.stderr


def test_without_triton_layouts_trees_and_oracles_work_and_kernels_say_so():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import sumgrad.kernels.tree, sumgrad.kernels.layout, sumgrad.kernels.oracle\n"
        "import sumgrad.workloads.three_pool.workload\n"
        "import sumgrad.kernels.swiglu"
    )
    found = run_python(code)
    assert "Triton is not installed here" in found.stderr
    assert "import sumgrad.kernels.swiglu" not in found.stderr.splitlines()[0]


ENOUGH = 14 * 2**30


@pytest.mark.skipif(
    os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < ENOUGH,
    reason="the table takes 9 GB of memory",
)
def test_row_offsets_do_not_wrap_at_two_to_the_31():
    """The last row of a table of more than 2**31 elements."""
    vocabulary = 2**31 // 64 + 3
    weight = torch.zeros(vocabulary, 64)
    weight[-1] = torch.arange(64.0)
    y = embedding(torch.tensor([vocabulary - 1, 0]), weight)
    assert y.tolist() == [list(range(64)), [0] * 64]


@pytest.mark.parametrize("offset", [0.0, 1e4, -3e4])
def test_layer_norm_stays_accurate_far_from_zero(offset):
    """float32, rows around an offset: the mean is kept as two numbers. One pass fails here."""
    x = (draw(8, 512) + offset).float().requires_grad_()
    weight, bias = (draw(512, seed=i).float().requires_grad_() for i in (1, 2))
    dy = draw(8, 512, seed=3).float()
    y = layer_norm(x, weight, bias)
    y.backward(dy)
    wide = [t.detach().double().numpy() for t in (x, weight, bias, dy)]
    wanted = oracle.layer_norm(*wide)
    for got, name in ((y, "y"), (x.grad, "dx"), (weight.grad, "dweight"), (bias.grad, "dbias")):
        agrees(got, wanted[name], torch.float32, 16)
    values = x.detach()
    one_pass = values.square().mean(1) - values.mean(1).square()
    exact = torch.from_numpy(wide[0]).var(1, unbiased=False)
    wrong = (one_pass - exact).abs().max()
    assert bool(wrong > 0.5) == bool(offset)


def test_layer_norm_of_constant_rows_and_single_columns():
    """Nothing but the shift comes out, nothing but a rounding goes back."""
    for x in (torch.full((5, 64), 1e4 + 0.1), torch.full((5, 1), 7.0)):
        leaves = [x.clone().requires_grad_()] + [
            torch.randn(x.shape[1]).requires_grad_() for _ in range(2)
        ]
        y = layer_norm(*leaves)
        y.backward(torch.ones_like(x))
        assert torch.equal(y, leaves[2].expand_as(y))
        assert torch.equal(leaves[1].grad, torch.zeros(x.shape[1]))
        assert torch.isfinite(leaves[0].grad).all()
    assert torch.equal(leaves[0].grad, torch.zeros(5, 1))


def test_layer_norm_of_tiny_variance():
    x = (draw(6, 256) * 1e-5).float().requires_grad_()
    weight, bias = torch.ones(256), torch.zeros(256)
    dy = draw(6, 256, seed=3).float()
    y = layer_norm(x, weight, bias, eps=1e-12)
    y.backward(dy)
    wide = [t.detach().double().numpy() for t in (x, weight, bias, dy)]
    wanted = oracle.layer_norm(*wide, eps=1e-12)
    agrees(y, wanted["y"], torch.float32, 16)
    agrees(x.grad, wanted["dx"], torch.float32, 16)


# ---- what a review found: each of these gave wrong numbers, or an error that nobody understands


def gradient_penalty(operator, *shapes):
    leaves = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    y = operator(*leaves).square().sum()
    (slope,) = torch.autograd.grad(y, leaves[0], create_graph=True)
    return torch.autograd.grad(y + slope.square().sum(), leaves[-1])


@pytest.mark.parametrize("operator", [swiglu, rope, rms_norm, layer_norm, linear, attention])
def test_second_derivatives_are_refused_not_dropped(operator):
    shapes = {
        swiglu: [(4, 6), (4, 6)],
        rope: [(4, 1, 6)],
        rms_norm: [(4, 6), (6,)],
        layer_norm: [(4, 6), (6,), (6,)],
        linear: [(4, 6), (3, 6)],
        attention: [(4, 1, 6), (4, 1, 6), (4, 1, 6)],
    }[operator]
    with pytest.raises(KernelError, match="no second derivatives"):
        gradient_penalty(operator, *shapes)


def cached_chunks(leaves, cuts, cache):
    """attention over positions 0 to cuts[0], to cuts[1], ..., one output for each chunk."""
    out, length = [], cuts[-1]
    for start, stop in zip([0, *cuts], cuts, strict=False):
        layout = Layout(
            num_samples=1, num_rows=stop - start, pieces=(cut(0, start, stop, 0, length),)
        )
        rows = slice(start, stop)
        out.append(attention(*(t[rows] for t in leaves), layout=layout, cache=cache, tiles=TILES))
    return out


def new_cache(length=40, dtype=torch.float64) -> KeyValueCache:
    return KeyValueCache(Layout.packed((length,)), num_heads=2, head=8, dtype=dtype)


def test_a_backward_that_did_not_run_every_chunk_leaves_nothing_behind():
    leaves = [draw(40, 2, 8, seed=i).requires_grad_() for i in range(3)]
    first, second = cached_chunks(leaves, [16, 40], new_cache())
    loss = first.square().sum() + second.square().sum()
    whole = attention(*leaves, tiles=TILES).square().sum()
    wanted = torch.autograd.grad(whole, leaves)
    torch.autograd.grad(second.sum(), second, retain_graph=True)
    torch.autograd.grad(loss, second, retain_graph=True)

    def fail(_):
        raise ValueError("lost between two chunks")

    handle = first.register_hook(fail)
    with pytest.raises(ValueError, match="lost between"):
        torch.autograd.grad(loss, leaves, retain_graph=True)
    handle.remove()
    got = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_cache_serves_one_layer_and_one_pass():
    leaves = [draw(40, 2, 8, seed=i).requires_grad_() for i in range(3)]
    others = [draw(40, 2, 8, seed=i + 7) for i in range(3)]
    cache = new_cache()
    cached_chunks(leaves, [16, 40], cache)
    cached_chunks(leaves, [16, 40], cache)  # the same bits again: recomputation
    with pytest.raises(LayoutError, match="cached already, with other contents"):
        cached_chunks(others, [16, 40], cache)
    out = cached_chunks(leaves, [16, 40], cache := new_cache())
    cache.keys.zero_()
    with pytest.raises(RuntimeError, match="changed from outside"):
        out[-1].sum().backward()


def test_what_a_cache_cannot_take_is_named():
    x = [draw(48, 2, 8, seed=i) for i in range(3)]
    pieces = (cut(0, 0, 16, 0, 48), cut(0, 16, 48, 16, 48))
    two = Layout(num_samples=1, num_rows=48, pieces=pieces)
    with pytest.raises(LayoutError, match="two pieces of one sample"):
        attention(*x, layout=two, cache=new_cache(48), tiles=TILES)
    with pytest.raises(KernelError, match="cache: holds"):
        attention(*x, cache=new_cache(48, torch.float32), tiles=TILES)
    unfinished = Layout(num_samples=1, num_rows=48, pieces=(
        Piece(sample=0, start=0, stop=48, row=0, ends=False),))  # fmt: skip
    with pytest.raises(LayoutError, match="that needs a cache"):
        attention(*x, layout=unfinished, tiles=TILES)
    with pytest.raises(LayoutError, match="by its room the sample ends at 48"):
        attention(*x, layout=unfinished, cache=new_cache(48), tiles=TILES)
    with torch.no_grad(), pytest.raises(KernelError, match="without grad mode"):
        attention(*(t.requires_grad_() for t in x), cache=new_cache(48), tiles=TILES)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_infinite_scores_do_not_spread_over_the_tile():
    """Keys at minus infinity hide themselves; a query that sees another key is as torch's."""
    q, k, v = (draw(20, 1, 8, seed=i) for i in range(3))
    q[:, 0, 0] = 1.0
    k[:16, 0, 0] = -1e308
    got = attention(q, k, v, tiles=TILES, scale=1e10)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True, scale=1e10
    ).transpose(0, 1)
    assert torch.allclose(got[16:], wanted[16:])
    assert got[:16].isnan().all()  # no key at all: torch says 0


def test_last_block_refuses_padding_instead_of_summing_it():
    with pytest.raises(KernelError, match="knows no padding"):
        rms_norm(draw(8, 6), draw(6), layout=Layout.padded([2, 3], width=4), mode="last_block")


def test_errors_come_forward_not_in_backward():
    x, w = draw(40, 6).requires_grad_(), draw(6)
    half = Layout(num_samples=1, num_rows=40, pieces=(
        Piece(sample=0, start=0, stop=40, row=0, ends=False),))  # fmt: skip
    with pytest.raises(UnalignedCut):
        rms_norm(x, w, layout=half)
    with pytest.raises(UnalignedCut):
        linear(x, draw(3, 6), layout=half)
    with pytest.raises(ValueError, match="power of two"):
        rms_norm(x, w, leaf=24)
    with pytest.raises(KeyError, match="layer_norm: sinks has no accumulator for 'bias'"):
        layer_norm(x, w, w, sinks={"weight": Accumulator(1)})
    with pytest.raises(KernelError, match="leaf a multiple of depth"):
        default_tiles(torch.float64).__class__(rows=64, columns=64, depth=64, leaf=16)
    with pytest.raises(KernelError, match="eps: got -1"):
        rms_norm(x, w, eps=-1)
    with pytest.raises(KernelError, match="targets: got shape"):
        cross_entropy(draw(4, 4), torch.zeros(5).long())


def test_a_layout_used_in_inference_mode_can_train_later():
    layout = Layout.packed((20, 3))
    x = [draw(23, 1, 8, seed=i) for i in range(3)]
    with torch.inference_mode():
        attention(*x, layout=layout, tiles=TILES)
        rope(x[0], layout=layout)
    leaves = [t.requires_grad_() for t in x]
    attention(
        rope(leaves[0], layout=layout), *leaves[1:], layout=layout, tiles=TILES
    ).sum().backward()
    assert leaves[0].grad is not None


def test_sinks_of_different_uses_never_meet():
    """The same shape is not the same tree: a gain of one norm never lands in another's."""
    tree, x, w = Accumulator(2), draw(20, 6), draw(6).requires_grad_()
    one, two = (Layout.packed((20,), samples=[s], num_samples=2) for s in (0, 1))
    rms_norm(x, w, layout=one, sinks={"weight": tree}).sum().backward()
    with pytest.raises(ValueError, match="never merge"):
        rms_norm(x.float(), w.detach().float().requires_grad_(), layout=two,
                 sinks={"weight": tree}).sum().backward()  # fmt: skip
    with pytest.raises(ValueError, match="never merge"):
        layer_norm(x, w, draw(6), layout=two, sinks={"weight": tree, "bias": Accumulator(2)}).sum(
        ).backward()  # fmt: skip
