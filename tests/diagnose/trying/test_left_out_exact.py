"""What a function may have left out, or done once too often."""

from __future__ import annotations

import ast

import pytest
from sumgrad.diagnose.modules.trying.edits.factors import of_terms, of_what_is_returned
from sumgrad.diagnose.modules.trying.edits.left_out import left_out, options_of, shared_by_all
from sumgrad.diagnose.modules.trying.edits.order import edits_to_try

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


def text_of(code):
    return lambda node: ast.get_source_segment(code, node)


SHARED = """class Queue:
    waiting: list[int] = []
    known = dict()
    size = 3

    def __init__(self, group):
        self.group = group

    def put(self, x, seen=[], *, held={}, n=()):
        seen.append(x)


def step(x, parts=None):
    return x
"""


def test_what_all_objects_or_calls_share():
    text = text_of(SHARED)
    found = {
        function.name: [(name, text(value)) for name, value in held]
        for function, held in shared_by_all(ast.parse(SHARED)).items()
    }
    assert found == {
        "__init__": [("self.waiting", "[]"), ("self.known", "dict()")],
        "put": [("seen", "[]"), ("held", "{}")],
    }
    names = {"q.py:6 Queue.__init__": {"group": "x"}, "q.py:9 Queue.put": {"x": "int"}}
    become = [e.becomes for e in edits_to_try({"q.py": SHARED}, names, set(), (), "", {})]
    for one in (
        "self.waiting = []; self.group = group",
        "self.known = dict(); self.group = group",
        "seen = []; seen.append(x)",
        "held = {}; seen.append(x)",
    ):
        assert one in become, become


BACKWARD = """def backward(ctx, grad):
    x, gain = ctx.saved_tensors
    bare = grad * x
    return bare, grad.sum(0), None, other(grad)
"""


def test_factors_of_what_a_backward_returns():
    kinds = {"grad": "tensor float64 4x3", "x": "tensor float64 4x3", "gain": "tensor float64 3",
             "bare": "tensor float64 4x3", "scale": "float", "rows": "tensor int64 4",
             "wide": "tensor float64 2x3", "ctx": "object"}  # fmt: skip
    code = BACKWARD.replace("other(grad)", "other(grad, scale, rows, wide)")
    (function,) = ast.parse(code).body
    found = [new for _, new in of_what_is_returned(function, text_of(code), kinds)]
    for one in ("bare * gain", "bare / gain", "bare * x", "bare * scale", "bare * (1 - scale)",
                "grad.sum(0) * gain"):  # fmt: skip
        assert one in found, found
    assert not any(one.startswith("bare") and "wide" in one for one in found)  # of another shape
    assert not any(one.endswith(("* rows", "/ rows")) for one in found)
    assert "bare * ctx" not in found


def test_twice_one_of_two_terms():
    code = "def f(a, b, n):\n    x = a + n\n    return (a * b).sum() - within(a) + (n + 1)\n"
    (function,) = ast.parse(code).body
    found = {new for _, new in of_terms(function, text_of(code))}
    assert found == {"2 * (a * b).sum()", "2 * within(a)"}


PLACES = """def look(self, ids, dense):
    return F.embedding(ids, self.weight, None, 2.0, self.dense, sparse=False)


def best(x, n):
    return x.topk(n), f(x, x)
"""


def test_switches_by_their_places_and_the_last_argument_less():
    kinds = {"ids": "tensor int64 3", "dense": "tensor float64 3", "self.dense": "bool",
             "self.weight": "parameter float64 4x2"}  # fmt: skip
    names = {"p.py:1 T.look": kinds, "p.py:5 best": {"x": "tensor float64 3", "n": "int"}}
    become = [e.becomes for e in edits_to_try({"p.py": PLACES}, names, set(), (), "", {})]
    assert "return F.embedding(ids, self.weight, None, 2.0, not self.dense, sparse=False)" in become
    assert "return F.embedding(ids, self.weight, None, 2.0, sparse=False)" in become
    assert not any("f(x)" in one for one in become)  # a tensor is no switch


def test_what_one_loop_uses_up_is_kept():
    code = "def way(self, x):\n    both = zip(x, x)\n    return reversed(x)\n"
    become = [e.becomes for e in edits_to_try({"w.py": code}, {"w.py:1 way": {}}, set(), (), "",
                                              {})]  # fmt: skip
    assert "both = list(zip(x, x))" in become
    assert "return list(reversed(x))" in become


def test_a_method_that_replaces_another_is_edited_though_nothing_of_torchs_runs_in_it():
    code = (
        "class A:\n    def way(self, x):\n        return self.parts(x)\n\n"
        "    def parts(self, x):\n        return x\n\n\n"
        "class B(A):\n    def parts(self, x):\n        return reversed(x)\n"
    )
    way = "m.py:2 A.way"
    found = edits_to_try({"m.py": code}, {way: {}}, {way}, (), "", {})
    assert "return list(reversed(x))" in [e.becomes for e in found]
    alone = code.replace("class B(A):\n    def parts", "class B(A):\n    def other")
    assert edits_to_try({"m.py": alone}, {way: {}}, {way}, (), "", {}) == []


def test_only_those_that_are_taken():
    found = edits_to_try({"q.py": SHARED}, {"q.py:9 Queue.put": {"x": "int"}}, set(), (), "", {},
                         taken=lambda edit: edit.new == "pass")  # fmt: skip
    assert {edit.new for edit in found} == {"pass"}
