"""What a function may have left out, or done once too often."""

from __future__ import annotations

import ast

import pytest
from sumgrad.diagnose.modules.trying.edits.left_out import left_out, options_of

OTHER = "def f(x, mask=None, causal=True, *, n=1, clean=False):\n    return x\n"


def meant(body, no_tensors=("n",)):
    code = f"{OTHER}\n\ndef step(self, x, y, n):\n" + "".join(
        f"    {s}\n" for s in body.split("; ")
    )
    tree = ast.parse(code)
    (function,) = (one for one in tree.body if getattr(one, "name", "") == "step")
    text = lambda node: ast.get_source_segment(code, node)  # noqa: E731
    may_be = lambda node: text(node) not in no_tensors  # noqa: E731
    return [(text(node), new) for node, new in left_out(function, text, options_of(tree), may_be)]


@pytest.mark.parametrize(("body", "found"), [
    ("x = x * n; return g(x + y)", [("y", "y * n")]),
    ("x *= n; z = y - x", [("y", "y * n")]),
    ("x = self.a(y) / (n + 1); return x + self.b(y)", [("self.b(y)", "self.b(y) / (n + 1)")]),
    ("x = x * n; y = y * n; return x + y", []),
    ("x = x * n; return x + y * n", []),
    ("x = x + n; return x + y", []),
    ("z = x + y; x = x * n", []),
])  # fmt: skip
def test_a_factor_that_another_term_has(body, found):
    assert meant(body) == found


@pytest.mark.parametrize(("body", "found"), [
    ("return f(x)", ["f(x, causal=False)", "f(x, clean=True)"]),
    ("return self.f(x, causal=n)", ["self.f(x, causal=n, clean=True)"]),
    ("return f(*x)", []),
    ("return f(x, **y)", []),
    ("return F.scaled_dot_product_attention(x, y, y)",
     ["F.scaled_dot_product_attention(x, y, y, is_causal=True)"]),
    ("return torch.bucketize(x, y, right=True)", []),
    ("x.scatter_reduce(1, n, y, 'sum')",
     ["x.scatter_reduce(1, n, y, 'sum', include_self=False)"]),
    ("x.scatter_reduce(1, n, y, 'mean', include_self=True)", []),
    ("x.zero_grad()", ["x.zero_grad(set_to_none=False)"]),
])  # fmt: skip
def test_an_option_that_stays_at_its_default(body, found):
    assert [new for _, new in meant(body)] == found


@pytest.mark.parametrize(("body", "found"), [
    ("return self.g(x, y)", [("self.g(x, y)", "(x, y)")]),
    ("x, y = self.g(x, y)", [("self.g(x, y)", "(x, y)")]),
    ("z = self.g(x, y)", []),
    ("x, y = self.g(x)", []),
    ("return self.g(x, n)", []),
    ("return self.g(x, y, k=1)", []),
])  # fmt: skip
def test_what_is_there_already(body, found):
    assert meant(body) == found
