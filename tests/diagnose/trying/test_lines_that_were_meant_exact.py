"""A line as an engineer may have it wrong, and as it was meant: that is among what is tried."""

from __future__ import annotations

import ast

import pytest
from sumgrad.diagnose.modules.trying.edits.order import edits_to_try
from sumgrad.record.trial import Edit, edited_source

SQUARE, WIDE = "tensor float64 4x4", "tensor float64 3x4"
KINDS = {
    "x": WIDE, "y": WIDE, "a": SQUARE, "b": SQUARE, "mask": "tensor bool 3x4", "n": "int",
    "w": "float", "i": "tensor int64 3x1", "j": "tensor int64 1x3", "p": "parameter float64 4x4",
    "batch": "dict", "self.eps": "float", "total": "tensor float64 ",
}  # fmt: skip
HEAD = "def step(x, y, a, b, mask, n, w, i, j, p, batch, total, temperature):\n"
KINDS_UNREAD = KINDS | {"temperature": "float"}


def tried(lines, kinds=None, more="", axes=("dp", "tp"), *, is_run=True):
    """What the function's lines become, each edit alone. is_run: whether more of the file is."""
    code = HEAD + "".join(f"    {line}\n" for line in lines.splitlines()) + more
    first = code.count("\n", 0, code.find("def whole")) + 1
    single = {f"s.py:{first} whole"} if more and is_run else set()
    found = edits_to_try(
        {"s.py": code}, {"s.py:1 step": kinds or KINDS}, single, axes, "", {}, frozenset()
    )
    return code, found


def plain(text):
    return ast.dump(ast.parse(text))


def becomes(code, edit: Edit):
    return plain(edited_source(code, edit))


@pytest.mark.parametrize(("wrong", "meant"), [
    # numbers and shares
    ("z = x[1:n]", "z = x[1 : n + 1]"), ("z = x[n:, 1]", "z = x[n - 1 :, 1]"),
    ("z = x.narrow(0, 1, n)", "z = x.narrow(0, 1, n - 1)"), ("m = i < n", "m = i < n + 1"),
    ("m = n >= i", "m = n - 1 >= i"), ("z = x.tril(n)", "z = x.tril(n - 1)"),
    ("z = torch.arange(n) * 2", "z = (torch.arange(n) + 1) * 2"),
    ("z = w * x + y", "z = (1 - w) * x + y"),
    ("z = x.lerp(y, w)", "z = y.lerp(x, w)"),
    ("z = x.lerp(y, w)", "z = x.lerp(y, (1 - w))"),
    ("z = torch.lerp(x, y, 0.9)", "z = torch.lerp(y, x, 0.9)"),
    ("z = 0.9 * x", "z = (1 - 0.9) * x"),
    ("z = x / w + y.sum(0)", "z = x / w + y.sum(0) * w"),
    ("z = x / w - y", "z = x / w - y / w"),
    ("z = x * n ** -0.5", "z = x * n ** -1"),
    ("z = x * n ** -1", "z = x * n ** -0.5"),
    ("z = (x - y) ** 2", "z = (x - y)"),
    ("z = x.sum(2)", "z = x.sum(1)"),
    # masks and comparisons
    ("m = i >= j", "m = i > j"), ("m = i >= j", "m = i <= j"), ("m = i < j", "m = i > j"),
    ("m = x.lt(y)", "m = x.le(y)"),
    ("z = x.masked_fill(mask, 0)", "z = x.masked_fill(~mask, 0)"),
    ("z = torch.where(mask, x, y)", "z = torch.where(mask, y, x)"),
    ("z = x.where(mask, y)", "z = y.where(mask, x)"),
    ("z = x.clamp(min=1)", "z = x.clamp(max=1)"),
    ("z = x.clamp_min(1)", "z = x.clamp_max(1)"),
    # products and dimensions
    ("z = a @ b", "z = b @ a"), ("z = a @ b", "z = a.mT @ b"), ("z = x @ p", "z = x @ p.mT"),
    ("z = x @ p.T", "z = x @ p"),
    ("z = x / y.sum(1)[:, None]", "z = x / y.sum(1)[None, :]"),
    ("z = x[None]", "z = x[:, None]"),
    ("z = torch.einsum('bij,bjk->bik', x, y)", "z = torch.einsum('bji,bjk->bik', x, y)"),
    ("z = torch.einsum('ij,jk', a, b)", "z = torch.einsum('ji,jk', a, b)"),
    ("z = torch.einsum('ij,jk->ik', a, b)", "z = torch.einsum('ij,jk->ki', a, b)"),
    # orders
    ("z = x.roll(1, 0)", "z = x.roll(-1, 0)"), ("z = torch.roll(x, n, 0)", "z = x.roll(-n, 0)"),
    ("z = x.roll(-1, 0)", "z = x.roll(1, 0)"),
    ("z = x.roll(shifts=n, dims=0)", "z = x.roll(-n, dims=0)"),
    ("z = x.cumsum(0)", "z = (x.cumsum(0) - x)"),
    ("z = x.cumsum(0)", "z = x.flip(0).cumsum(0).flip(0)"),
    ("z = torch.cumprod(x, dim=1)", "z = x.flip(1).cumprod(1).flip(1)"),
    ("return x * w, y.sum(0)", "return (y.sum(0), x * w)"),
    # copies and places
    ("z = x.repeat(1, n)", "z = x.repeat_interleave(n, 1)"),
    ("z = x.repeat(n)", "z = x.repeat_interleave(n, 0)"),
    ("z = x.repeat(1, n, 2)", "z = x.repeat_interleave(n, 1).repeat_interleave(2, 2)"),
    ("return x, y", "return x.clone(), y.clone()"), ("return x, y", "return x, y.clone()"),
    ("return a[:, :n], a[:, n:]", "return a[:, :n] - a[:, n:], a[:, n:]"),
    ("return a[:n], a[n:]", "return a[:n], a[n:] + a[:n]"),
    ("x = x * w\ny = x.exp()\nz = x.sum()\nreturn y, z",
     "z = x.sum()\nx = x * w\ny = x.exp()\nreturn y, z"),
    ("z = x.sum()\ny = x.exp()\nx = x * w\nreturn y, z",
     "y = x.exp()\nx = x * w\nz = x.sum()\nreturn y, z"),
    # other functions, words and reductions
    ("z = F.mse_loss(x * w, y * w)", "z = (F.mse_loss(x, y) * w)"),
    ("z = F.huber_loss(x * w, w * y, delta=2)", "z = (F.huber_loss(x, y, delta=2) * w)"),
    ("z = x.abs()", "z = x.square()"), ("z = x.square()", "z = x.norm()"),
    ("z = F.l1_loss(x, y)", "z = F.mse_loss(x, y)"),
    ("p.mul_(w).add_(x)", "p.mul_(w).sub_(x)"),
    ("dist.all_reduce(x, op=dist.ReduceOp.MAX)", "dist.all_reduce(x, op=dist.ReduceOp.SUM)"),
    ("dist.all_reduce(x, op=ReduceOp.SUM)", "dist.all_reduce(x, op=ReduceOp.AVG)"),
    ("z = batch['a'] - batch['b']", "z = batch['b'] - batch['b']"),
    # of other ranks
    ('z = x * ctx.axes["dp"]', 'z = x * (ctx.axes["dp"] * ctx.axes["tp"])'),
    ('z = x[ctx.coords["tp"]]', 'z = x[(ctx.coords["dp"] * ctx.axes["tp"] + ctx.coords["tp"])]'),
    ('z = x[ctx.coords["tp"]]', 'z = x[(ctx.coords["tp"] * ctx.axes["dp"] + ctx.coords["dp"])]'),
    ('g = ctx.group("tp")', 'g = ctx.group("dp", "tp")'),
    ('g = ctx.group("dp", "tp")', 'g = ctx.group("tp")'),
    ("dist.broadcast(x, src=0, group=b)", "dist.all_reduce(x, group=b)"),
    ("dist.broadcast(x, 0)", "dist.all_reduce(x, op=dist.ReduceOp.MAX)"),
    ("z = sum(batch)", "z = batch[0]"), ("z = x[n * batch[n]]", "z = x[sum(batch[:n])]"),
    ("z = x[max(batch) * n]", "z = x[sum(batch[:n])]"),
    ("z = torch.cat(batch, 1)[:, :sum(b)]",
     "z = torch.cat([p[:, :n] for p, n in zip(batch, b)], 1)"),
    ("z = torch.cat(batch)[:sum(b)]", "z = torch.cat([p[:n] for p, n in zip(batch, b)])"),
    ("z = x.to_local()", "z = x.full_tensor()"),
    # where numbers stand
    ("u, v = x.chunk(2, -1)", "u, v = (x[..., 0::2], x[..., 1::2])"),
    ("u, v = x.chunk(2)", "u, v = (x[0::2], x[1::2])"),
    ("z = x.flip(1).cumsum(1).flip(1)", "z = x.cumsum(1)"),
    ("z = table(0, w)", "z = table(n, w)"), ("z = torch.arange(0, w)", "z = torch.arange(n, w)"),
    ("z = moved(x, n, n)", "z = moved(x, -n, -n)"), ("z = x[n : n + len(i)]", "z = x[i]"),
    ("z = x / y", "z = (x / y).clamp(max=1.0)"), ("m = n == len(batch) - 1", "m = n == 0"),
    ("z = x * torch.linalg.inv(a)", "z = x * torch.linalg.inv(a).mT"),
    ("x[i] = y", "x.index_put_((i,), y, accumulate=True)"),
    ("x[i] += y", "x.index_put_((i,), y, accumulate=True)"),
    # what goes through a function elsewhere, and what is made of each
    ("z = f(x) + y\nreturn z, x[:, -1]", "z = f(x) + y\nreturn z, f(x)[:, -1]"),
    ("c = f(batch)\nfor one in batch:\n    total = total + c * one",
     "c = f(batch)\nfor one in batch:\n    total = total + f(one) * one"),
    ("c = a + x\nfor i, one in enumerate(x):\n    y = y * c",
     "c = a + x\nfor i, one in enumerate(x):\n    y = y * (a + one)"),
    ("c = f(y)\nfor one, each in zip(x, y):\n    total = total + c",
     "c = f(y)\nfor one, each in zip(x, y):\n    total = total + f(each)"),
    ("kept = [one.grad for one in batch]", "kept = [one.grad.clone() for one in batch]"),
    ("z = x.contiguous()", "z = x.contiguous().clone()"),
    ("h.register_forward_hook(f)", "h.register_forward_hook(f, prepend=True)"),
    # ways that are cut
    ("z = x.data * y", "z = x * y"), ("z = x * total.item()", "z = x * total"),
    ("with torch.no_grad():\n    z = x * y", "with torch.enable_grad():\n    z = x * y"),
])  # fmt: skip
def test_a_line_as_it_was_meant_is_tried(wrong, meant):
    code, found = tried(wrong)
    wanted = HEAD + "".join(f"    {line}\n" for line in meant.splitlines())
    assert plain(wanted) in [becomes(code, one) for one in found], [one.becomes for one in found]


@pytest.mark.parametrize(("wrong", "other"), [
    ("z = x.cumsum(0, 1)", "flip"), ("z = x.roll((1, 2), (0, 1))", "roll(-"),
    ("z = x.clamp(min=1, max=2)", "clamp(max=1"), ("z = x[1]", "None"),
    ("z = x[:, None, mask]", "[None, :"), ("return 1, x", "(x, 1)"),
    ("z = ctx.rank + 1", "ctx.rank - 1)"), ("z = x / n", "n + 1"), ("z = n * x", "n - 1"),
    ("z = x / 3", "x / 4"), ("z = x ** n", "** -"),
    ("z = x.sum(0)", "x.sum(n)"),
    ("for k in range(n):\n    z = x", "range(-n"), ("z = x[:n]", "z = x[i]"),
    ("x[i] = 1", "accumulate"), ("x[i] -= y", "accumulate"), ("z = x.chunk(3)", "::2"),
    ("z = a + f(x)\nx = y", "f(f(x))"), ("z = sum(batch, n)", "batch[0]"),
    ("z = f(i)\nfor i in y:\n    w = z", "w = f(i)"), ('z = ctx.group("ep")', '"dp"'),
    ("with torch.enable_grad():\n    z = x", "no_grad"), ("return n, w", "n - w"),
    ("x = x * w\ny = x.exp()\nz = x.sum() + y\nreturn z", "z = x.sum() + y x = x * w"),
    ("x = x * w\ny = z = x.exp()\nz = x.sum()\nreturn z", "z = x.sum() x = x * w"),
    ("z = x @ a[0]", "x.mT"), ("m = (i < j) == mask", "~(")
])  # fmt: skip
def test_what_is_not_tried(wrong, other):
    _, found = tried(wrong)
    assert not any(other in one.becomes for one in found), [one.becomes for one in found]


def test_a_number_that_nothing_reads_is_a_factor():
    code, found = tried("z = (x @ p).sum(1)\nreturn z", KINDS_UNREAD)
    for meant in ("z = ((x @ p) / temperature).sum(1)", "z = (((x @ p).sum(1)) * temperature)"):
        wanted = plain(f"{HEAD}    {meant}\n    return z\n")
        assert wanted in [becomes(code, one) for one in found], [one.becomes for one in found]
    _, found = tried("z = (x @ p).sum(1) / temperature\nreturn z", KINDS_UNREAD)
    assert not any("(x @ p) * temperature" in one.becomes for one in found)


WITH_OPTIONS = """

def whole(x, y, n):
    return F.cross_entropy(x, y, reduction="sum", ignore_index=-100, weight=held, at=f(n))
"""


def test_an_option_that_is_given_elsewhere():
    _, found = tried('z = F.cross_entropy(x, y, reduction="sum")', more=WITH_OPTIONS)
    is_there = [one.becomes for one in found]
    assert 'z = F.cross_entropy(x, y, reduction="sum", n=-100)' not in is_there
    _, found = tried(
        'z = F.cross_entropy(x, y, reduction="sum")',
        more=WITH_OPTIONS.replace("-100", "0").replace("held", "w"),
    )
    is_there = [one.becomes for one in found]
    assert 'z = F.cross_entropy(x, y, reduction="sum", ignore_index=0)' in is_there
    assert 'z = F.cross_entropy(x, y, reduction="sum", weight=w)' in is_there
    assert not any("at=f" in one for one in is_there)
    _, found = tried('z = F.cross_entropy(x, y, reduction="sum")', more=WITH_OPTIONS, is_run=False)
    assert not any("ignore_index" in one.becomes for one in found)  # of what is not run
    _, found = tried("z = F.cross_entropy(*x)", more=WITH_OPTIONS)
    assert not any("weight" in one.becomes for one in found)


LATE = """for name in batch:
    s = w / n
    p.register_hook(lambda g: g * s)"""


def test_rows_in_an_order_that_is_there():
    kinds = {"x": WIDE, "back": "tensor int64 3", "y": SQUARE, "far": "tensor int64 7"}
    _, found = tried("z = x + y", kinds)
    is_there = [one.becomes for one in found]
    assert "z = x[back] + y" in is_there
    assert "z = x[back.argsort()] + y" in is_there
    assert not any("y[" in one or "far" in one for one in is_there)


def test_a_mask_that_nothing_reads():
    _, found = tried("z = x.exp()\nreturn z", KINDS | {"temperature": "tensor bool 3x4"})
    is_there = [one.becomes for one in found]
    assert "z = ((x.exp()) * temperature)" in is_there or "z = (x.exp() * temperature)" in is_there
    assert "z = (x.exp() * ~temperature)" in is_there
    _, found = tried("z = x.exp() * temperature", KINDS | {"temperature": "tensor bool 3x4"})
    assert not any("* ~temperature) * temperature" in one.becomes for one in found)


def test_a_function_made_in_a_loop_reads_its_own_turn():
    code, found = tried(LATE)
    wanted = plain(HEAD + "".join(f"    {one}\n" for one in LATE.splitlines()).replace(
        "lambda g: g * s", "lambda g, s=s: g * s"))  # fmt: skip
    assert wanted in [becomes(code, one) for one in found]
    for harmless in (
        LATE.replace("* s", "* w"), LATE.replace("lambda g:", "lambda g, s=s:"),
        LATE.replace("lambda g:", "lambda *g:"), "s = w\np.register_hook(lambda g: g * s)",
    ):  # fmt: skip
        _, found = tried(harmless)
        assert not any("s=s: g" in one.becomes and "s=s:" not in one.was for one in found)


def test_a_function_with_a_name_made_in_a_loop():
    _, found = tried(
        "for name in batch:\n    def hook(g, k=2):\n        t = g * k\n        return t * name\n"
        "    p.register_hook(hook)"
    )
    assert any("2, name=name" in one.new for one in found)
    assert not any("t=t" in one.new for one in found)
