"""Kernels where a mutant once survived: partial tiles, a user's own eps and scale, unrounded nodes.

The oracle is held against torch's own operators first, in float64, so that it cannot be wrong
together with a kernel. Small tensors: the kernels run interpreted.
"""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from sumgrad.kernels import oracle
from sumgrad.kernels.attention import AttentionTiles, attention
from sumgrad.kernels.cross_entropy import cross_entropy
from sumgrad.kernels.embedding import check_tokens, default_leaf, embedding, embedding_nodes
from sumgrad.kernels.layer_norm import layer_norm
from sumgrad.kernels.layout import Layout, Piece
from sumgrad.kernels.linear import Tiles, column_nodes, linear, weight_nodes
from sumgrad.kernels.primitives import empty_rows
from sumgrad.kernels.rms_norm import rms_norm
from sumgrad.kernels.rope import rope
from sumgrad.kernels.runtime import KernelError
from sumgrad.kernels.swiglu import swiglu
from sumgrad.kernels.tree import Accumulator
from torch.nn import functional as F

TILES = AttentionTiles(query=16, key=16)


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def gradients(function, *inputs: torch.Tensor, seed: torch.Tensor | None = None):
    """The value, and the gradient of each input."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    y.backward(torch.ones_like(y) if seed is None else seed)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def close(got, wanted, *, rtol: float = 1e-11) -> None:
    """Each within rtol of its largest element."""
    for a, b in zip(got, wanted, strict=True):
        have, want = torch.as_tensor(a).double(), torch.as_tensor(b).double()
        assert have.shape == want.shape
        assert float((have - want).abs().max()) <= rtol * float(want.abs().max())


def of_oracle(found: dict, *names: str):
    return [torch.from_numpy(np.asarray(found[name])) for name in names]


# ---- the oracle against torch --------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_the_oracles_norms_are_torchs(eps):
    x, w, b, dy = draw(5, 6), draw(6), draw(6, seed=1), draw(5, 6, seed=2)
    arrays = [t.numpy() for t in (x, w, b, dy)]
    found = oracle.rms_norm(arrays[0], arrays[1], arrays[3], eps=eps)
    wanted = gradients(lambda a, c: F.rms_norm(a, (6,), c, eps), x, w, seed=dy)
    close(of_oracle(found, "y", "dx", "dweight"), wanted)
    found = oracle.layer_norm(*arrays, eps=eps)
    wanted = gradients(lambda a, c, d: F.layer_norm(a, (6,), c, d, eps), x, w, b, seed=dy)
    close(of_oracle(found, "y", "dx", "dweight", "dbias"), wanted)


def test_the_oracles_products_are_torchs():
    x, w, b, dy = draw(5, 6), draw(4, 6), draw(4), draw(5, 4)
    found = oracle.linear(*(t.numpy() for t in (x, w, b, dy)))
    close(of_oracle(found, "y", "dx", "dweight", "dbias"), gradients(F.linear, x, w, b, seed=dy))
    gate, up, dy = draw(5, 6), draw(5, 6, seed=1), draw(5, 6, seed=2)
    found = oracle.swiglu(*(t.numpy() for t in (gate, up, dy)))
    wanted = gradients(lambda g, u: F.silu(g) * u, gate, up, seed=dy)
    close(of_oracle(found, "y", "dgate", "dup"), wanted)
    tokens, table, dy = torch.tensor([2, 0, 2]), draw(4, 3), draw(3, 3)
    found = oracle.embedding(tokens.numpy(), table.numpy(), dy.numpy())
    wanted = gradients(lambda t: F.embedding(tokens, t), table, seed=dy)
    close(of_oracle(found, "y", "dweight"), wanted)


def torch_attention(q, k, v, scale=None):
    """Causal attention of one sample; (R, H, D) and (R, G, D)."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return F.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True, scale=scale
    ).transpose(0, 1)


def test_the_oracles_attention_rope_and_cross_entropy_are_torchs():
    q, k, v, do = draw(7, 4, 6), draw(7, 2, 6, seed=1), draw(7, 2, 6, seed=2), draw(7, 4, 6, seed=3)
    found = oracle.attention(*(t.numpy() for t in (q, k, v, do)), lengths=(4, 3))

    def two(a, b, c):
        return torch.cat([torch_attention(*(t[s] for t in (a, b, c)))
                          for s in (slice(0, 4), slice(4, 7))])  # fmt: skip

    close(of_oracle(found, "y", "dq", "dk", "dv"), gradients(two, q, k, v, seed=do))
    logits, targets = draw(5, 4), torch.tensor([1, 3, -1, 0, 2])
    found = oracle.cross_entropy(logits.numpy(), targets.numpy(), 0.5)
    wanted = gradients(
        lambda z: F.cross_entropy(z, targets, ignore_index=-1, reduction="sum"), logits,
        seed=torch.tensor(0.5).double(),
    )  # fmt: skip
    close(of_oracle(found, "loss", "dlogits"), wanted)
    x, dy = draw(5, 2, 4), draw(5, 2, 4, seed=1)
    angle = torch.tensor([0.0, 1, 2, 0, 1]).double()[:, None] * torch.tensor(
        [1, 0.1], dtype=torch.float64
    )

    def turn(z, sign=1):
        a, b = z[..., :2], z[..., 2:]
        c, s = angle.cos()[:, None], sign * angle.sin()[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    found = oracle.rope(x.numpy(), dy.numpy(), lengths=(3, 2), base=100.0)
    close(of_oracle(found, "y", "dx"), [turn(x), turn(dy, -1)])
    got = gradients(lambda z: rope(z, layout=Layout.packed((3, 2)), base=100.0), x, seed=dy)
    close(got, [turn(x), turn(dy, -1)])


# ---- the kernels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 0.25])
def test_a_users_eps_counts_forward_and_backward(eps):
    x, w, b, dy = draw(5, 6) / 4, draw(6), draw(6, seed=1), draw(5, 6, seed=2)
    arrays = [t.numpy() for t in (x, w, b, dy)]
    found = oracle.rms_norm(arrays[0], arrays[1], arrays[3], eps=eps)
    close(gradients(lambda a, c: rms_norm(a, c, eps=eps), x, w, seed=dy),
          of_oracle(found, "y", "dx", "dweight"))  # fmt: skip
    found = oracle.layer_norm(*arrays, eps=eps)
    close(gradients(lambda a, c, d: layer_norm(a, c, d, eps=eps), x, w, b, seed=dy),
          of_oracle(found, "y", "dx", "dweight", "dbias"))  # fmt: skip
    close([rms_norm(x, w)], of_oracle(oracle.rms_norm(arrays[0], arrays[1], arrays[3]), "y"))
    close([layer_norm(x, w, b)], of_oracle(oracle.layer_norm(*arrays), "y"))


@pytest.mark.parametrize("scale", [None, 1.0, -0.2])
def test_a_users_scale_counts_in_every_gradient(scale):
    q, k, v, do = draw(21, 4, 5), draw(21, 2, 5, seed=1), draw(21, 2, 5, seed=2), draw(21, 4, 5)
    got = gradients(lambda *t: attention(*t, scale=scale, tiles=TILES), q, k, v, seed=do)
    close(got, gradients(lambda *t: torch_attention(*t, scale=scale), q, k, v, seed=do))


def test_tiles_of_attention_are_powers_of_two_and_fit_into_each_other():
    for query, key in ((16, 16), (64, 16), (128, 128)):
        assert AttentionTiles(query=query, key=key).query == query
    for query, key in ((8, 8), (24, 8), (32, 24), (16, 32), (48, 16), (0, 16)):
        with pytest.raises(KernelError, match="query a multiple of key"):
            AttentionTiles(query=query, key=key)


def test_the_largest_head_and_none_larger():
    q = draw(3, 1, 128)
    close([attention(q, q, q, tiles=TILES)], [torch_attention(q, q, q)])
    for size in (0, 129):
        with pytest.raises(KernelError, match=f"a head of {size} elements, expected 1 to 128"):
            attention(*(torch.zeros(3, 1, size) for _ in range(3)))


@pytest.mark.parametrize("rows", [15, 16, 17, 33])
@pytest.mark.parametrize("width", [16, 17])
def test_partial_tiles_of_a_product_hold_their_last_row_and_column(rows, width):
    x, w, b, dy = draw(rows, width), draw(width, width), draw(width), draw(rows, width, seed=1)
    tiles = Tiles(rows=16, columns=16, depth=16, leaf=32)
    got = gradients(lambda *t: linear(*t, tiles=tiles), x, w, b, seed=dy)
    found = oracle.linear(*(t.numpy() for t in (x, w, b, dy)))
    close(got, of_oracle(found, "y", "dx", "dweight", "dbias"))


@pytest.mark.parametrize("vocabulary", [1024, 1025, 1026, 2049])
def test_the_last_column_of_a_vocabulary_counts(vocabulary):
    """One column more than a block: its logit is the largest, and it is a target."""
    logits = draw(3, vocabulary)
    logits[:, -1] = 5.0
    targets = torch.tensor([vocabulary - 1, 0, -100])
    got = gradients(lambda z: cross_entropy(z, targets)[0], logits)
    close(got, gradients(lambda z: F.cross_entropy(z, targets, reduction="sum"), logits))
    assert cross_entropy(logits, targets)[1] == 2


def test_rows_that_do_not_count_and_where_the_sum_goes():
    logits, targets = draw(5, 4), torch.tensor([1, 7, 3, 0, 2])
    layout = Layout.packed((2, 2), gap=1).__class__(
        num_samples=2, num_rows=5,
        pieces=(Piece(sample=0, stop=2, row=0), Piece(sample=1, stop=2, row=3)),
    )  # fmt: skip
    loss, count = cross_entropy(logits, targets, layout=layout, ignore_index=7)
    assert count == 3
    wanted = F.cross_entropy(logits[[0, 3, 4]], targets[[0, 3, 4]], reduction="sum")
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-13)
    sink = Accumulator(2)
    cross_entropy(logits, targets, layout=layout, ignore_index=7, sinks={"loss": sink})
    assert sink.finish().item() == pytest.approx(wanted.item(), rel=1e-13)
    with pytest.raises(KeyError, match="cross_entropy: sinks has no accumulator for 'loss'"):
        cross_entropy(logits, targets % 4, sinks={})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nodes_are_not_rounded(dtype):
    """3 + 2**-6 is no bfloat16: two gradients meet in a node, which keeps every digit."""
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    dy = torch.tensor([[3.0, 1.0], [2.0**-6, 2.0**-6], [1.0, 1.0]]).to(dtype)
    tokens, layout = torch.tensor([1, 1, 0]), Layout.single(3)
    nodes = embedding_nodes(dy, tokens, 2, layout, 16)
    assert nodes.values.dtype == acc
    assert nodes.values[0].tolist() == [[1, 1], [3 + 2.0**-6, 1 + 2.0**-6]]
    assert nodes.tree.dtype == str(dtype)
    nodes = column_nodes(dy, layout, "u", 16)
    assert nodes.values.dtype == acc
    assert nodes.values[0].tolist() == [4 + 2.0**-6, 2 + 2.0**-6]
    tiles = Tiles(rows=16, columns=16, depth=16, leaf=16)
    nodes = weight_nodes(dy, torch.ones(3, 1, dtype=dtype), layout, tiles)
    assert nodes.values.dtype == acc
    assert nodes.values[0].tolist() == [[4 + 2.0**-6], [2 + 2.0**-6]]


def test_an_embedding_of_long_rows_and_its_refusals():
    tokens, weight = torch.tensor([1, 0, 1]), draw(2, 4098)
    dy = draw(3, 4098, seed=4)
    y, grad = gradients(lambda w: embedding(tokens, w), weight, seed=dy)
    assert torch.equal(y, weight[tokens])
    assert torch.equal(grad, torch.stack([dy[1], dy[0] + dy[2]]))
    counted = torch.tensor([True, False, True])
    assert check_tokens("t", torch.tensor([3, 9, 0]), 3, 4, counted).tolist() == [3, 9, 0]
    for ids, words in (([4, 0, 0], r"t\[0\]: got 4"), ([0, 0, -1], r"t\[2\]: got -1")):
        with pytest.raises(KernelError, match=words):
            check_tokens("t", torch.tensor(ids), 3, 4, counted)
    last = Layout.packed((2,), gap=1)  # a row of padding, which may name any token
    assert embedding(torch.tensor([-7, 1, 0]), weight, layout=last)[0].tolist() == [0] * 4098
    with pytest.raises(KernelError, match=r"tokens\[2\]: got 2, expected 0 to 1"):
        embedding(torch.tensor([-7, 1, 2]), weight, layout=last)
    with pytest.raises(KernelError, match=r"tokens\[1\]: got -1"):
        embedding(torch.tensor([-7, -1, 1]), weight, layout=last)
    with pytest.raises(KernelError, match=r"tokens\[1\]: got 2"):
        embedding(torch.tensor([5, 2, 1]), weight, layout=last)
    assert (default_leaf(torch.bfloat16), default_leaf(torch.float16)) == (1024, 1024)
    assert (default_leaf(torch.float32), default_leaf(torch.float64)) == (256, 256)


def test_activations_and_turns_refuse_what_does_not_fit():
    for shape in ((2, 3), ((1 << 16) + 3,)):  # the second is more than one block
        given = draw(*shape), draw(*shape, seed=1)
        close(gradients(swiglu, *given), gradients(lambda g, u: F.silu(g) * u, *given))
    far = torch.tensor([-800.0, 800.0]).double()
    assert swiglu(far, torch.ones(2).double()).tolist() == [0, 800]
    with pytest.raises(KernelError, match="up: got shape"):
        swiglu(draw(2, 3), draw(3, 2))
    with pytest.raises(KernelError, match=r"gate: got torch.int64"):
        swiglu(torch.ones(2).long(), torch.ones(2).long())
    for head in (0, 3, 1026):
        with pytest.raises(KernelError, match=f"a head of {head} elements"):
            rope(torch.zeros(1, 1, head))
    for head in (2, 1024):
        assert rope(torch.ones(1, 1, head)).tolist() == [[[1.0] * head]]
    with pytest.raises(KernelError, match=r"x: got torch.int64"):
        rope(torch.ones(1, 1, 2).long())


def test_only_the_last_block_mode_takes_its_backward(monkeypatch):
    """Its sum depends on how many blocks there are; the default's must not."""

    def refused(*_):
        raise AssertionError("the sum that is not invariant")

    module = importlib.import_module("sumgrad.kernels.rms_norm")
    monkeypatch.setattr(module, "_backward_last_block", refused)
    gradients(rms_norm, draw(5, 6), draw(6))
    with pytest.raises(AssertionError, match="not invariant"):
        gradients(lambda x, w: rms_norm(x, w, mode="last_block"), draw(5, 6), draw(6))


def test_an_operator_of_the_package_is_its_function():
    """Also where its module was imported, before or after, in whatever way."""
    import sumgrad.kernels as package

    names = package.OPERATORS
    assert sorted(package.__all__) == sorted((*names, *package.OTHERS))
    for name in names:
        module = importlib.import_module(f"sumgrad.kernels.{name}")
        assert getattr(package, name) is getattr(module, name)
        assert getattr(package, name).__module__ == module.__name__
    for name in package.OTHERS:
        assert isinstance(getattr(package, name), type)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_memory_for_gradients_is_zero_in_padding_whatever_lay_there(monkeypatch):
    own = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda x, **more: own(x, **more).fill_(float("nan"))
    )  # fmt: skip
    x = torch.ones(6, 3, dtype=torch.bfloat16)
    padded = empty_rows(x, Layout.padded([2, 1], width=3), torch.float32)
    assert (padded.dtype, padded.tolist()) == (torch.float32, [[0.0] * 3] * 6)
    packed = empty_rows(x, Layout.packed([4, 2]), torch.float32)
    assert packed.shape == (6, 3)
    assert packed.isnan().all()  # every row will be written
