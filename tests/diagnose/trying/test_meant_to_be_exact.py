"""What an expression may have been meant to be: operations the other way round, other ends."""

from __future__ import annotations

import ast

import pytest
import torch
from sumgrad.diagnose.modules.trying.edits.alternatives import added_one_by_one, alternatives
from sumgrad.diagnose.modules.trying.edits.layouts import laid_out_otherwise
from sumgrad.diagnose.modules.trying.edits.nesting import otherwise_nested
from sumgrad.diagnose.modules.trying.edits.offsets import begun_after_others


def text_in(code):
    return lambda node: ast.get_source_segment(code, node)


def nested(code, tensors=("x", "y", "h", "logits")):
    node = ast.parse(code, mode="eval").body
    may_be = lambda one: ast.unparse(one) != "model"  # noqa: E731
    return [*otherwise_nested(node, text_in(code), lambda o: ast.unparse(o) in tensors, may_be)]


@pytest.mark.parametrize(("code", "other"), [
    ("logits.log_softmax(-1)[..., :n]", "logits[..., :n].log_softmax(-1)"),
    ("ids[:, own].roll(-1, 1)", "ids.roll(-1, 1)[:, own]"),
    ("Gather.apply(front(own), lo, group)", "front(Gather.apply(own, lo, group))"),
    ("model.head(Gather.apply(h, group))", "Gather.apply(model.head(h), group)"),
    ("torch.log(x.sum(0))", "torch.log(x).sum(0)"),
    ("x.sum(0).sqrt()", "x.sqrt().sum(0)"),
    ("(x * y).sum(0)", "(x.sum(0) * y.sum(0))"),
    ("Sum.apply(h.sum(1) + v, group)", "(Sum.apply(h.sum(1), group) + v)"),
    ("Sum.apply(q * r, group)", "(Sum.apply(q, group) * Sum.apply(r, group))"),
    ("Sum.apply(q * r, group)", "(q * Sum.apply(r, group))"),
    ("Sum.apply(q / r, group)", "(Sum.apply(q, group) / r)"),
    ("Sum.apply(q / r.sum(0).clamp(min=1), g)",
     "(Sum.apply(q, g) / Sum.apply(r.sum(0), g).clamp(min=1))"),
    ("total(z) + ridge()", "total(z + ridge())"),
    ("bias + Sum.apply(x, group)", "Sum.apply(bias + x, group)"),
    ("x.sum(0) * y", "(x * y).sum(0)"),
    ("(x - y).exp() - z", "((x - y) - z).exp()"),
    ("torch.logsumexp(x, dim=-1).mean() ** 2", "(torch.logsumexp(x, dim=-1) ** 2).mean()"),
    ("Sum.apply(x, group) ** n", "Sum.apply(x ** n, group)"),
    ("torch.addmm(b, x * r, y)", "(torch.addmm(b, x, y) * r)"),
    ("torch.addmm(b, x * r, y)", "(torch.addmm(b, r, y) * x)"),
    ("F.linear(h, y / n, bias=b)", "(F.linear(h, y, bias=b) / n)"),
])  # fmt: skip
def test_two_operations_the_other_way_round(code, other):
    found = nested(code)
    wanted = ast.dump(ast.parse(other, mode="eval"))
    assert wanted in [ast.dump(ast.parse(one, mode="eval")) for one in found], found


@pytest.mark.parametrize("code", [
    "rows['x']", "x", "x.flatten(0, 1).contiguous()", "self.loss(model, x) / n", "len(x)",
    "x.shape[0]", "f(*args)", "f(a for a in x)", "self.norm()",
])  # fmt: skip
def test_what_is_no_operation_on_another_stays(code):
    assert nested(code) == []


def test_what_is_given_is_no_receiver():
    """A model is no tensor: its method is a function of what it is given."""
    assert nested("model.f(model.g(x))") == ["model.g(model.f(x))"]
    assert nested("x.add(y.exp())") == []


def meant(code, axes=("dp", "tp"), indices=("order",)):
    node = ast.parse(code, mode="eval").body
    is_index = {*indices}
    return [*alternatives(node, text_in(code), axes, lambda one: ast.unparse(one) in is_index)]


@pytest.mark.parametrize(("code", "others"), [
    ("ctx.world_size", ['ctx.axes["dp"]', 'ctx.axes["tp"]']),
    ("ctx.rank", ['ctx.coords["dp"]', 'ctx.coords["tp"]']),
    ('ctx.axes["dp"]', ["ctx.world_size"]),
    ('ctx.coords["tp"]', ["ctx.rank"]),
    ("a // b", ["-(-a // b)", "a / b", "a % b"]),
    ("(a + c) % b", ["(a + c) // b"]),
    ("[x.clone()] * n", ["[x.clone() for _ in range(n)]"]),
    ("[x, y] * n", []),
    ("saved.pop()", ["saved.pop(0)"]),
    ("saved.pop(0)", ["saved.pop()"]),
    ("zip(a, b, strict=True)", ["zip(reversed(list(a)), b, strict=True)",
                                "zip(a, reversed(list(b)), strict=True)"]),
    ("y[order]", ["y[order.argsort()]"]),
    ("y[n]", ["y[n + 1]", "y[n - 1]"]),
    ("y[self.n]", ["y[self.n + 1]", "y[self.n - 1]"]),
    ("x[:high - low]", ["x[low:high]", "x[:]", "x[high - low:]", "x[-(high - low):]",
                           "x[(high - low):2 * (high - low)]"]),
    ("x[n:]", ["x[:]", "x[:n]", "x[:-n]"]),
    ("x[:, -1]", ["x[:, 0]"]),
    ("x[-1]", ["x[0]"]),
    ("x[-2]", []),
    ("x[-n:]", ["x[len(x) - n:]", "x[:]", "x[:-n]", "x[:n]"]),
    ("x[:, -(n + 1):]", ["x[:, x.shape[1] - (n + 1):]", "x[:, :]", "x[:, :-(n + 1)]",
                         "x[:, :(n + 1)]"]),
    ("x[..., :-n]", ["x[..., :x.shape[-1] - n]", "x[..., :]", "x[..., -n:]", "x[..., n:]"]),
    ("x[:-2]", ["x[:]", "x[-2:]", "x[2:]"]),
    ("groupby(x, key=k)", ["groupby(sorted(x, key=k), key=k)"]),
    ("itertools.groupby(x, k)", ["itertools.groupby(sorted(x, key=k), k)"]),
    ("groupby(x)", ["groupby(sorted(x))"]),
    ("sorted(x)", ["list(x)"]),
    ("x.argsort(1, descending=True)", ["x.argsort(1, descending=True).argsort(1)"]),
    ("torch.argsort(x, dim=-1)", ["torch.argsort(x, dim=-1).argsort(-1)"]),
    ("x.argsort()", ["x.argsort().argsort()"]),
    ("sorted(x, key=k)", []),
    ("min(rank * each, n - each)", ["rank * each", "n - each"]),
    ("min(own)", []),
    ("max(x, key=k)", []),
    ("torch.where(a > b, a, b)", ["a", "b"]),
    ("torch.where(a)", []),
    ("checkpoint(f, reversed(x), use_reentrant=False)",
     ["checkpoint(f, list(reversed(x)), use_reentrant=False)"]),
    ("f(a for a in b)", ["f(list((a for a in b)))"]),
    ("Optimizer((a for a in b), lr)", ["Optimizer(list((a for a in b)), lr)"]),
    ("sum(a for a in b)", []),
    ("list(zip(a, c, d))", []),
    ("x[n:2 * n]", ["x[n + 1:2 * n + 1]", "x[n - 1:2 * n - 1]", "x[:2 * n]", "x[n:]",
                    "x[:2 * n - (n)]"]),
    ("x[::2]", []),
    ("x[:, lo:hi]", ["x[:, lo + 1:hi + 1]", "x[:, lo - 1:hi - 1]", "x[:, :hi]", "x[:, lo:]",
                     "x[:, :hi - (lo)]"]),
])  # fmt: skip
def test_other_sizes_ends_and_slices(code, others):
    assert meant(code) == others


def test_lists_of_tensors_are_added_one_by_one():
    """The first of them may be empty yet."""

    def added(code, several=("total", "grads")):
        node = ast.parse(code, mode="eval").body
        is_several = lambda one: ast.unparse(one) in several  # noqa: E731
        return [*added_one_by_one(node, text_in(code), is_several)]

    (found,) = added("total + grads")
    for total, wanted in (((), [1, 2]), ((3, 4), [4, 6])):
        assert list(eval(found, {"zip": zip, "total": total, "grads": [1, 2]})) == wanted
    assert added("total - grads") == added("total + x") == added("x + grads") == []


def laid_out(code):
    return [*laid_out_otherwise(ast.parse(code, mode="eval").body, text_in(code))]


@pytest.mark.parametrize(("code", "others"), [
    ("x.chunk(2)", ["x.unflatten(0, (-1, 2)).unbind(1)"]),
    ("x.chunk(3, dim=-1)", ["x.unflatten(-1, (-1, 3)).unbind(-1)"]),
    ("torch.chunk(x, 2, 1)", ["x.unflatten(1, (-1, 2)).unbind(2)"]),
    ("x.chunk(2, d)", []),
    ("x.chunk(n, 1)[i]", ["x[:, i::n]"]),
    ("x.tensor_split(a + b, -1)[i]", ["x[..., i::(a + b)]"]),
    ("x.chunk(n, -2)[i]", []),
    ("x.chunk(n)[1:]", []),
    ("x[i::n]", ["x.tensor_split(n, 0)[i]"]),
    ("x[..., 1::2]", ["x.tensor_split(2, -1)[1]"]),
    ("x[:, i::n, 0]", []),
    ("x[::2]", []),
    ("(x[..., ::2], x[..., 1::2])", ["x.chunk(2, -1)"]),
    ("[x[:, 0::3], x[:, 1::3], x[:, 2::3]]", ["x.chunk(3, 1)"]),
    ("(x[..., 1::2], x[..., ::2])", []),
    ("(x[..., ::2], x[..., 1::2], y)", []),
    ("(x[..., ::2], y[..., 1::2])", []),
    ("(x[::2], x[:, 1::2])", []),
    ("(x[0], x[1])", []),
    ("range(rank, heads, n)", ["range(rank * (heads // n), (rank + 1) * (heads // n))"]),
    ("range(a, b)", []),
    ("x.unflatten(1, (a, b))", ["x.unflatten(1, (b, a)).transpose(1, 2)"]),
    ("x.unflatten(-1, (a, -1))", ["x.unflatten(-1, (-1, a)).transpose(-2, -1)"]),
    ("x.view(b, h, 2)", ["x.view(h, b, 2).transpose(0, 1)", "x.view(b, 2, h).transpose(1, 2)"]),
    ("x.reshape(n, 1)", []),
    ("x.view(*n, 4, 2).sum(-2, keepdim=True)", ["x.view(*n, 2, 4).sum(-1, keepdim=True)"]),
    ("x.unflatten(-1, (4, 2)).unbind(-1)", ["x.unflatten(-1, (2, 4)).unbind(-2)"]),
    ("x.unflatten(0, (4, 2)).unbind(-1)", []),
    ("x.view(4, 2).sum(0)", []),
    ("[a * b for a in x for b in y]", ["[a * b for b in y for a in x]"]),
    ("[b for a in x for b in a]", []),
    ("[a * b for a in x for b in y if b]", []),
    ("[a for a in x]", []),
    ("x.view(4, 2).exp(-1)", []),
    ("x.view(*shape)", []),
    ("x.flatten(1, 2)", ["x.transpose(1, 2).flatten(1, 2)"]),
    ("x.flatten(1, 3)", []),
    ("x.permute(2, 1, 0)", ["x.permute(1, 2, 0)", "x.permute(0, 1, 2)", "x.permute(2, 0, 1)"]),
    ("torch.movedim(x, 0, -1)", ["x.movedim(-1, 0)"]),
    ("x.permute(*dims)", []),
    ("F.pad(x, (0, n), value=1)", ["F.pad(x, (n, 0), value=1)"]),
    ("F.pad(x, (1, 0, 0, 0), 'reflect')", ["F.pad(x, (0, 1, 0, 0), 'reflect')"]),
    ("F.pad(x, ends)", []),
    ("x.repeat_interleave(n, 1)", ["torch.cat([x] * n, 1)"]),
    ("x.repeat_interleave(n)", []),
    ("x.repeat(1, n, 1)", ["x.repeat_interleave(n, 1)"]),
    ("x.repeat(2, n)", ["x.repeat_interleave(2, 0).repeat_interleave(n, 1)"]),
    ("torch.cat([x] * (a + b), dim=1)", ["x.repeat_interleave(a + b, 1)"]),
    ("torch.cat([x, y] * n)", []),
    ("torch.cat([x, y], 1)", ["torch.cat(list([x, y])[::-1], 1)"]),
    ("torch.stack(parts, dim=0)", ["torch.stack(list(parts)[::-1], dim=0)"]),
    ("torch.cat([*parts])", ["torch.cat(list([*parts])[::-1])"]),
    ("multiply(grad, conjugate(a))", ["multiply(conjugate(a), grad)"]),
    ("self.pair(a, b, scale=2)", ["self.pair(b, a, scale=2)"]),
    ("Pair.apply(a, b)", ["Pair.apply(b, a)"]),
    ("torch.matmul(a, b)", ["torch.matmul(b, a)"]),
    ("torch.add(a, b)", []),
    ("pair(a, a)", []),
    ("pair(a, 2)", []),
    ("pair(*both, b)", []),
    ("pair(a, b, c)", []),
    ("zip(a, b)", []),
    ("x.shape[-2:]", ["x.shape[-2:][::-1]"]),
    ("x.size()[1:3]", ["x.size()[1:3][::-1]"]),
    ("x.shape[-2]", []),
    ("x[-2:]", []),
])  # fmt: skip
def test_numbers_that_lie_otherwise(code, others):
    assert laid_out(code) == others


def test_parts_in_turn_and_one_after_the_other_are_what_they_say():
    x = torch.arange(24).view(2, 12)
    for code in ("x.chunk(3, 1)", "x.chunk(3, -1)"):
        (other,) = laid_out(code)
        found = eval(other)
        assert [part.tolist() for part in found] == [x[:, i::3].tolist() for i in range(3)]
    (other,) = laid_out("x.unflatten(1, (3, 4))")
    assert torch.equal(eval(other), x.view(2, 4, 3).transpose(1, 2))
    (other,) = laid_out("x.unflatten(-1, (3, 4))")
    assert torch.equal(eval(other), x.view(2, 4, 3).transpose(1, 2))
    (other,) = laid_out("(x[..., ::2], x[..., 1::2])")
    assert torch.equal(eval(other)[1], x[:, 6:])


def begun(code, axes=("dp",)):
    node = ast.parse(code, mode="eval").body
    return [(o.new, o.size, o.axis) for o in begun_after_others(node, text_in(code), axes)]


@pytest.mark.parametrize(("code", "new", "size"), [
    ("torch.arange(n)", "torch.arange({n}, {n} + n)", "n"),
    ("torch.arange(x.shape[1], device=d)", "torch.arange({n}, {n} + x.shape[1], device=d)",
     "x.shape[1]"),
    ("range(a - b)", "range({n}, {n} + (a - b))", "a - b"),
    ("range(rank * n, (rank + 1) * n)", "range({n}, {n} + n)", "n"),
    ("enumerate(rows)", "enumerate(rows, {n})", "len(rows)"),
    ("ctx.rank * len(x)", "{n}", "len(x)"),
    ("n * ctx.coords['tp']", "{n}", "n"),
    ("rank * counts[rank]", "{n}", "counts[rank]"),
    ("x[:n]", "x[{n}:{n} + n]", "n"),
    ("x[:, : y.shape[1]]", "x[:, {n}:{n} + y.shape[1]]", "y.shape[1]"),
    ("x[rank * n:(rank + 1) * n]", "x[{n}:{n} + n]", "n"),
    ("F.pad(x, (0, -n % r))", "F.pad(x, ({n} % r, -({n} % r + n) % r))", "n"),
    ("F.pad(x, (0, r - n % (a + r)), value=1)",
     "F.pad(x, ({n} % (a + r), -({n} % (a + r) + n) % (a + r)), value=1)", "n"),
])  # fmt: skip
def test_what_begins_after_the_parts_of_the_ranks_before(code, new, size):
    before = f'__before__({size}, "dp")'
    assert begun(code) == [(new.format(n=before), size, "dp")]


@pytest.mark.parametrize("code", [
    "torch.arange(3)", "torch.arange(a, b)", "range(*given)", "enumerate(rows, 1)",
    "enumerate(x for x in rows)", "rank * 2", "rank * stage", "a * b", "rank + n", "x[:3]",
    "F.pad(x, (0, n))", "F.pad(x, (1, -n % r))", "F.pad(x, (0, 0, 0, -n % r))", "F.pad(x, ends)",
    "x[:-n]", "x[a:b]", "x[::2]", "x[:n:2]", "x[n:]", "x[rank * n:(rank + 1) * m]", "len(x)",
])  # fmt: skip
def test_what_needs_no_offset(code):
    assert begun(code) == []


def test_each_axis_may_be_the_one():
    assert [axis for *_, axis in begun("torch.arange(n)", ("dp", "tp"))] == ["dp", "tp"]
