"""What an expression may have been meant to be: operations the other way round, other ends."""

from __future__ import annotations

import ast

import pytest
from sumgrad.diagnose.modules.trying.edits.alternatives import alternatives
from sumgrad.diagnose.modules.trying.edits.nesting import otherwise_nested


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
    ("total(z) + ridge()", "total(z + ridge())"),
    ("bias + Sum.apply(x, group)", "Sum.apply(bias + x, group)"),
    ("x.sum(0) * y", "(x * y).sum(0)"),
    ("(x - y).exp() - z", "((x - y) - z).exp()"),
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
    ("x.scatter_reduce(1, i, y, 'mean')",
     ["x.scatter_reduce(1, i, y, 'mean', include_self=False)"]),
    ("x.scatter_reduce(1, i, y, 'mean', include_self=True)", []),
    ("model.zero_grad()", ["model.zero_grad(set_to_none=False)"]),
    ("y[order]", ["y[order.argsort()]"]),
    ("y[n]", []),
    ("x[:high - low]", ["x[low:high]", "x[:]", "x[high - low:]"]),
    ("x[n:]", ["x[:]", "x[:n]"]),
    ("x[::2]", []),
    ("x[:, lo:hi]", ["x[:, lo + 1:hi + 1]", "x[:, lo - 1:hi - 1]", "x[:, :hi]", "x[:, lo:]",
                     "x[:, :hi - (lo)]"]),
])  # fmt: skip
def test_other_sizes_ends_and_slices(code, others):
    assert meant(code) == others
