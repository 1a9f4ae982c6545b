"""Small edits of a user's code: which there are, in which order, and what they become."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
from sumgrad.diagnose.modules.trying.edits.order import edits_to_try
from sumgrad.record.trial import Edit, edited_source
from sumgrad.subjects.program.tried.edited import UsersFunctions
from sumgrad.subjects.program.watched.names_in_scope import NamesInScope, kind_of
from torch import nn, zeros

CODE = """import os


def loss(x, own, total, scale, unused):
    if scale > 1:
        x = x.detach()
    part = (total - own) / (scale - 1)
    return part.std(1, unbiased=True) * x


def outside(x, own):
    os.remove("f")
    return x - own


def exchange(x, group):
    dist.send(x, 1)
    return x
"""
TENSOR = "tensor float64 3x4"
KINDS = {"x": TENSOR, "own": TENSOR, "total": TENSOR, "unused": TENSOR, "scale": "float"}
LOSS, OUTSIDE = "step.py:4 loss", "step.py:11 outside"


def become(names=None, *, said="", single=(), axes=(), suspicion=None, code=CODE):
    names = {LOSS: KINDS} if names is None else names
    found = edits_to_try({"step.py": code}, names, {*single}, axes, said, suspicion or {})
    return [edit.becomes for edit in found]


def test_names_of_one_kind_conditions_terms_and_statements():
    found = become()
    for one in (
        "part = (total - unused) / (scale - 1)", "part = (x - own) / (scale - 1)",
        "part = (total + own) / (scale - 1)", "part = (total) / (scale - 1)",
        "if True:", "if False:", "if scale >= 1:", "pass", "x = x",
        "return part.std(1, unbiased=False) * x", "return part.std(1) * x",
    ):  # fmt: skip
        assert one in found, one
    assert not any("(scale - own" in one for one in found)  # of another kind
    assert "part = (total - total) / (scale - 1)" in found


SHARD = """def places(x, rank, states):
    at = torch.arange(x.shape[0])
    first = [states]
    every = [1, 2, 3, 4, rank]
    return at, first, x[:, : x.shape[1]], every
"""


def test_where_a_part_begins_and_a_list_with_one_less():
    names = {"step.py:1 places": {"x": TENSOR, "rank": "int", "states": TENSOR}}
    found = edits_to_try({"step.py": SHARD}, names, set(), ("cp",), "", {})
    offsets = [edit for edit in found if edit.before]
    assert [(edit.before, edit.over, edit.becomes) for edit in offsets] == [
        ("x.shape[0]", "cp", 'at = torch.arange(__before__(x.shape[0], "cp"), '
                             '__before__(x.shape[0], "cp") + x.shape[0])'),
        ("x.shape[1]", "cp", 'return at, first, x[:, __before__(x.shape[1], "cp"):'
                             '__before__(x.shape[1], "cp") + x.shape[1]], every'),
    ]  # fmt: skip
    assert [edit.sure for edit in found if edit.becomes == "first = []"] == [False]
    assert found.index(offsets[0]) < len(found) / 4
    assert "every = [2, 3, 4, rank]" not in [edit.becomes for edit in found]


def test_what_nothing_reads_comes_first():
    first = become()[:8]
    assert "part = (total - unused) / (scale - 1)" in first
    assert "return part.std(1, unbiased=False) * x" in first


def test_what_reaches_outside_or_makes_groups_is_left_alone():
    assert become({OUTSIDE: {"x": TENSOR, "own": TENSOR}}) == []
    code = "def exchange(x, y):\n    y = y.detach()\n    g = dist.new_group(y)\n    return x * y\n"
    found = become({"step.py:1 exchange": {"x": TENSOR, "y": TENSOR}}, code=code)
    assert "y = x.detach()" in found
    assert not any("new_group" in one for one in found)
    assert found.count("pass") == 1  # of the line before


def test_what_calls_one_that_reaches_outside_is_left_alone():
    code = CODE + "\n\ndef step(x, own):\n    keep(x)\n    return x - own\n"
    step = {"step.py:21 step": {"x": TENSOR, "own": TENSOR}}
    assert become(step, code=code) != []
    assert become(step, code=code.replace("keep(x)", "self.outside(x, own)")) == []


@pytest.mark.parametrize(("other", "left"), [
    ("def keep(x):\n    torch.save(x, 'f')\n", True),
    ("def keep(x):\n    return helper(x)\n\n\ndef helper(x):\n    save_checkpoint(x)\n", True),
    ("from subprocess import run\n\n\ndef keep(x):\n    run(['true'])\n", True),
    ("def keep(ctx, x):\n    ctx.save_for_backward(x)\n", False),
])  # fmt: skip
def test_what_calls_one_of_another_file_that_reaches_outside_is_left_alone(other, left):
    code = "def step(x, own):\n    keep(x)\n    return x - own\n"
    names = {"step.py:1 step": {"x": TENSOR, "own": TENSOR}}
    found = edits_to_try({"step.py": code, "kept.py": other}, names, set(), (), "", {})
    assert (found == []) == left


def test_what_may_go_on_for_ever_is_left_alone():
    code = (
        "def step(xs, n):\n    i = 0\n    while i < n:\n        i += 1\n"
        "    for x, y in zip(itertools.count(), xs):\n        n = n - x\n        n = n / 2\n"
        "    for x in itertools.count():\n        n = n - x\n    return n\n"
    )
    found = become({"step.py:1 step": {"n": "int", "i": "int"}}, code=code)
    assert not any("reversed" in one or one.startswith("i -=") for one in found)
    assert "n = n / 2 once, after the loop" in found


def test_functions_of_the_single_process_are_edited_where_the_cause_names_a_line():
    assert become(single=[LOSS]) == []
    assert become(single=[LOSS], said="look at step.py:7") != []


def test_what_helpers_of_the_ranks_alone_call_is_edited_too():
    """In which nothing of torch's runs; not what the single process calls as well."""
    code = (
        "def step(x, total):\n    total = keep(total, x)\n    return -x\n\n\n"
        "def keep(total, x):\n    return put_together(total, shared(x))\n\n\n"
        "def put_together(total, more):\n    return total + more\n\n\n"
        "def shared(x):\n    return x + 1\n\n\n"
        "def loss(x):\n    return shared(x)\n"
    )
    names = {"step.py:1 step": {"x": TENSOR}, "step.py:18 loss": {"x": TENSOR}}
    found = become(names, single=["step.py:18 loss"], code=code)
    assert "return ([a + b for a, b in zip(total, more)] if total else more)" in found
    assert not any("x - 1" in one or "x + 2" in one for one in found)


def test_lines_that_are_named_come_before_those_that_are_not():
    (first, *_) = become(said="step.py:8 gives", suspicion={"step.py:7": (3, 0)})
    assert first.startswith("return part.std")


def test_of_lines_that_are_not_named_those_that_feed_one_come_first():
    code = "def mask(x):\n    return -x\n\n\ndef other(x):\n    return -x\n"
    names = {"step.py:1 mask": {"x": TENSOR}, "step.py:5 other": {"x": TENSOR}}
    for feeding, lines in ((names, [2, 6]), (["step.py:5 other"], [6, 2])):
        found = edits_to_try({"step.py": code}, names, set(), (), "", {}, {*feeding})
        assert list(dict.fromkeys(edit.start[0] for edit in found)) == lines


def test_axes_are_changed_last():
    code = "def step(x, ctx):\n    dist.all_reduce(x, group=ctx.group('dp'))\n    return -x\n"
    found = become({"step.py:1 step": {"x": TENSOR}}, axes=["dp", "tp"], code=code)
    assert found[-1] == 'dist.all_reduce(x, group=ctx.group("tp"))'
    assert "return x" in found[:-1]


def test_functions_that_take_the_same_and_brackets_elsewhere():
    code = (
        "def loss(x, y):\n    a = (x - y) * x.exp()\n    return F.mse_loss(a, y / x + y, 'sum')\n"
    )
    found = become({"step.py:1 loss": {"x": TENSOR, "y": TENSOR}}, code=code)
    for one in (
        "a = (x - y) * x.exp2()", "a = (x * x.exp() - y)", "a = (x - y * x.exp())",
        """return F.mse_loss(a, y / x + y, "mean")""", "return F.mse_loss(a, (y + y) / x, 'sum')",
    ):  # fmt: skip
        assert one in found, one


def test_a_carry_is_added_to_a_loop_turned_and_a_bracket_opened():
    code = (
        "def scan(states, decay, left):\n    rest = left\n    for state in states:\n"
        "        rest = decay * (state + left)\n        new = left\n    return rest\n"
    )
    kinds = {name: TENSOR for name in ("rest", "decay", "left", "state")}
    found = become({"step.py:1 scan": {**kinds, "states": "list of 3 tensor"}}, code=code)
    for one in (
        "rest = rest + (decay * (state + left))", "for state in reversed(list(states)):",
        "rest = (decay * state + left)", "rest = (state + decay * left)",
    ):  # fmt: skip
        assert one in found, one
    assert not any(one.startswith("new = new +") for one in found)  # it is not there before


def test_what_says_of_which_shape_something_is_stays():
    code = "def loss(x):\n    return x.sum(-1, keepdim=True).to(dtype=x.dtype)\n"
    found = become({"step.py:1 loss": {"x": TENSOR}}, code=code)
    assert found
    assert all("keepdim=True" in one or "x.sum" not in one for one in found)


def test_of_a_line_some_then_some_of_the_others():
    code = "def loss(a, b, c, d, e):\n    f = a - b - c - d - e\n    return f.exp()\n"
    names = {name: TENSOR for name in "abcde"}
    found = become({"step.py:1 loss": names}, code=code, said="step.py:2")
    assert "return f.exp2()" in found[:20]
    assert sum(one.startswith("f = ") for one in found[:8]) >= 6


def test_what_a_named_function_calls_comes_as_soon_as_itself():
    code = (
        "def part(x, y):\n    return x - y\n\n\ndef other(x, y):\n    return x - y\n\n\n"
        "def step(x, y):\n    z = part(x, y)\n    return z\n"
    )
    kinds = {"x": TENSOR, "y": TENSOR}
    names = {"step.py:5 other": kinds, "step.py:1 part": kinds, "step.py:9 step": kinds}
    edits = edits_to_try({"step.py": code}, names, set(), (), "step.py:11", {})
    lines = [edit.start[0] for edit in edits]
    assert lines.index(2) < lines.index(6)


FUNCTIONS = """class Base(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        part = of(grad)
        return part, grad * 2, None


class Other(nn.Module):
    def forward(self, x):
        return -x


class Own(Base):
    @staticmethod
    def inner(x):
        count = len(Base.forward(None, x))
        return x + count


def of(grad):
    total = grad.sum()
    return total
"""


def test_what_is_compared_before_bits_are():
    code = "def f(a, b, c):\n    d = a == b | ~c\n    e = a < b | c < d\n    return c & a < b\n"
    found = become({"step.py:1 f": dict.fromkeys("abc", TENSOR)}, code=code)
    assert "d = ((a == b) | (~c))" in found
    assert "return (c & (a < b))" in found
    assert not any(one.startswith("e = ((a < b)") for one in found)  # of three


def test_what_ranks_alone_call_for_a_number_is_edited_and_its_own_rank_left_out_soon():
    code = (
        "def step(x, ctx, names):\n    return x * seed(ctx) * size(x) + names.place\n\n\n"
        "def loss(x):\n    return x / size(x)\n\n\n"
        "def seed(ctx):\n    place = 7 + ctx.rank\n    return TABLE[place]\n\n\n"
        "def size(x):\n    return 7 + x.rank\n\n\n"
        "def place(x):\n    return 7 + x.rank\n"
    )
    kinds = {"step.py:1 step": {"x": TENSOR}, "step.py:5 loss": {"x": TENSOR}}
    edits = edits_to_try({"step.py": code}, kinds, {"step.py:5 loss"}, (), "", {})
    found = [(edit.start[0], edit.becomes) for edit in edits if edit.start[0] >= 9]
    told = [found.index(one) for one in ((10, "place = 7"), (11, "return TABLE"),
                                         (10, "place = 7 - ctx.rank"))]  # fmt: skip
    assert told == sorted(told)
    assert {line for line, _ in found} == {10, 11}  # not what both call, nor what is but a name


def test_sums_are_put_into_functions_and_what_they_call():
    names = {
        "step.py:6 Base.backward": {"grad": TENSOR, "part": "tensor float64 "},
        "step.py:13 Other.forward": {"x": TENSOR},
        "step.py:18 Own.inner": {"x": TENSOR, "count": "int"},
        "step.py:24 of": {"grad": TENSOR, "total": "tensor float64 "},
    }
    edits = edits_to_try({"step.py": FUNCTIONS}, names, set(), ["dp", "tp"], "", {})
    sums = {(edit.start[0], edit.old, edit.over) for edit in edits if edit.over}
    wanted = {(8, "of(grad)"), (20, "len(Base.forward(None, x))"), (9, "part"),
              (9, "grad * 2"), (21, "x + count"), (25, "grad.sum()"),
              (26, "total")}  # fmt: skip
    assert sums == {(*one, axis) for one in wanted for axis in ("dp", "tp")}


def test_how_much_of_something_a_rank_has_is_summed():
    code = (
        "def shift(x, rows, n):\n    a = len(rows) + x.shape[1] + x.numel() / x.size(-1)\n"
        "    return a + x.shape[:1].sum() + x.size() + n\n"
    )
    kinds = {"step.py:1 shift": {"x": TENSOR, "n": "int"}}
    edits = edits_to_try({"step.py": code}, kinds, set(), ["sp"], "", {})
    sums = {edit.old for edit in edits if edit.over}
    assert sums == {"len(rows)", "x.shape[1]", "x.numel()", "x.size(-1)"}


def test_another_name_wherever_one_is_read():
    code = "def loss(x, y, n):\n    a = x.exp()\n    b = a * n\n    return a + b\n"
    kinds = {"x": TENSOR, "y": TENSOR, "a": TENSOR, "b": TENSOR, "n": "int"}
    found = become({"step.py:1 loss": kinds}, code=code)
    assert "b = x * n return x + b" in found
    assert "b = y * n return y + b" in found
    edits = edits_to_try({"step.py": code}, {"step.py:1 loss": kinds}, set(), (), "", {})
    assert not next(one for one in edits if one.becomes == "b = x * n return x + b").sure
    assert not any("b * n" in one and "b + b" in one for one in found)  # it is not there yet


def test_a_copy_of_what_is_kept_or_handed_on():
    code = (
        "def step(self, x, n, p):\n    self.kept = x\n    self.all.append(p.grad)\n"
        "    y = x\n    self.n = n\n    return x, y.exp()\n"
    )
    found = become({"step.py:1 step": {"x": TENSOR, "n": "int", "y": TENSOR}}, code=code)
    copies = {one for one in found if "clone" in one}
    assert copies == {"self.kept = x.clone()", "self.all.append(p.grad.clone())",
                      "y = x.clone()", "return x.clone(), y.exp()"}  # fmt: skip


@pytest.mark.parametrize(("iter", "other"), [
    ("ys", "for y in ys: for x, i in zip(xs, n):"), ("x.chunk(2)", None),
])  # fmt: skip
def test_the_inner_of_two_loops_as_the_outer(iter, other):
    code = (
        "def step(xs, ys, n, out):\n    for x, i in zip(xs, n):\n"
        f"        for y in {iter}:\n            out.append(x * y)\n"
    )
    found = become({"step.py:1 step": {"x": TENSOR, "y": TENSOR}}, code=code)
    turned = [one for one in found if one.startswith("for y in") and ": for x" in one]
    assert turned == ([other] if other else [])


def test_a_copy_of_a_view_of_what_is_kept():
    code = "def step(x, kept):\n    kept.append(x.detach())\n    kept.append(x.exp())\n"
    found = become({"step.py:1 step": {"x": TENSOR}}, code=code)
    assert [one for one in found if "clone" in one] == ["kept.append(x.detach().clone())"]


STATE = """def turn(layer, x):
    with no_grad():
        v = layer.weight @ layer.u
        {}
    return layer.u + v
"""


@pytest.mark.parametrize(("written", "is_copied"), [
    ("layer.u.copy_(v)", True), ("layer.u.mul_(0.9).add_(v)", True), ("layer.u[0] = v", True),
    ("layer.u.add(v)", False), ("layer.v.copy_(v)", False), ("layer.u.__len__()", False),
])  # fmt: skip
def test_a_step_on_a_copy_of_what_it_writes_into(written, is_copied):
    code = STATE.format(written)
    found = become({"step.py:1 turn": {"layer.u": TENSOR, "v": TENSOR}}, code=code)
    copies = [one for one in found if "own_u" in one]
    own = written.replace("layer.u", "own_u")
    wanted = f"own_u = layer.u.clone(); v = layer.weight @ own_u {own} return own_u + v"
    assert copies == ([wanted] if is_copied else [])


def test_a_gradient_that_is_put_is_added_where_there_is_one():
    code = "def step(p, held):\n    p.grad = held + 1\n    p.kept = held\n"
    found = become({"step.py:1 step": {"held": TENSOR}}, code=code)
    assert "p.grad = held + 1 if p.grad is None else p.grad + (held + 1)" in found
    assert "p.kept += held" in found


def test_gradients_by_hand_are_summed_as_a_functions():
    kinds = {"step.py:1 head": {"x": TENSOR, "w": TENSOR}}

    def sums(given):
        code = f"def head(x, {given}):\n    w = x * {given}\n    return w\n"
        edits = edits_to_try({"step.py": code}, kinds, set(), ["tp"], "", {})
        return {edit.old for edit in edits if edit.over}

    assert sums("y") == set()
    assert sums("grad_y") == {"x * grad_y", "w"}


def test_each_edit_is_code_that_no_other_is():
    code = CODE.splitlines()
    found = edits_to_try({"step.py": CODE}, {LOSS: KINDS}, set(), (), "", {})
    made = [edited_source(CODE, edit) for edit in found]
    assert len({*made}) == len(made)
    for one in made:
        compile(one, "step.py", "exec")
        assert len(one.splitlines()) == len(code)
        assert one != CODE


def test_a_file_that_is_no_code_has_none():
    assert become(code="def loss(:\n") == []


def edit(old, new, line, column):
    return Edit(file="f", start=(line, column), end=(line, column + len(old)), old=old, new=new)


def test_an_edit_is_of_what_stands_there():
    assert edited_source("a = b\n", edit("b", "c", 1, 4)) == "a = c\n"
    assert edited_source("ä = b\n", edit("b", "c", 1, 5)) == "ä = c\n"  # columns are bytes
    with pytest.raises(ValueError, match="line 1"):
        edited_source("a = b\n", edit("c", "d", 1, 4))


def users_module(tmp_path, code):
    file = tmp_path / "users.py"
    file.write_text(code)
    module = types.ModuleType("users")
    exec(compile(code, str(file), "exec"), module.__dict__)
    return file, module


def test_functions_run_what_was_edited_and_then_what_they_were(tmp_path):
    code = "def f(x):\n    return [x + n for n in range(2)]\n\n\ndef g(x):\n    return x\n"
    file, module = users_module(tmp_path, code)
    own = Edit(file=str(file), start=(2, 12), end=(2, 17), old="x + n", new="x - n")
    functions = UsersFunctions()
    with functions.edited(own):
        assert (module.f(1), module.g(1)) == ([1, 0], 1)
    assert module.f(1) == [1, 2]
    assert file.read_text() == code


def test_edited_code_may_use_what_it_is_given_and_nobody_after_it(tmp_path):
    file, users = users_module(tmp_path, "def twice(x):\n    return x\n")
    edit = Edit(file=str(file), start=(2, 11), end=(2, 12), old="x", new="__more__(x)")
    with UsersFunctions().edited(edit, {"__more__": lambda x: x + 1}):
        assert users.twice(2) == 3
    assert users.twice(2) == 2
    assert "__more__" not in vars(users)


def test_what_does_not_run_is_not_edited(tmp_path):
    file, module = users_module(tmp_path, "def f(x):\n    return x + 1\n")
    own = Edit(file=str(file), start=(2, 11), end=(2, 16), old="x + 1", new="x - 1")
    file.write_text("def f(x):\n    y = 2\n    return x + 1\n")
    with pytest.raises(ValueError, match="line 2"), UsersFunctions().edited(own):
        pass
    file.write_text("def f(x):\n    return x + 2\n")  # the same, but for a number
    other = replace(own, old="x + 2", new="x - 2")
    with pytest.raises(ValueError, match="line 2"), UsersFunctions().edited(other):
        pass
    assert module.f(1) == 2


def test_kinds():
    assert kind_of(zeros(3, 4)) == "tensor float32 3x4"
    assert kind_of(nn.Linear(4, 3)) == "Linear 3x4 3"
    assert kind_of(nn.Parameter(zeros(2))) == "parameter float32 2"
    assert kind_of([1, 2]) == "list of 2 int"
    assert kind_of(True) == "bool"


def test_names_are_those_of_the_frames_that_call(tmp_path):
    code = "def f(x, see):\n    y = x + 1\n    see()\n    return y\n\n\n"
    code += "def g(see):\n    z = 1.5\n    return f(1, see) + z\n"
    _, module = users_module(tmp_path, code)
    names = NamesInScope()
    module.g(lambda: names.see(sys._getframe(1)))
    held = {name.rpartition(" ")[2]: own for name, own in names.found().items()}
    assert held["f"] == {"x": "int", "y": "int", "see": "function"}
    assert held["g"] == {"z": "float", "see": "function"}


def test_names_of_all_functions_that_end(tmp_path):
    """Whatever they call, and of those that a user wrote."""
    file = tmp_path / "setup.py"
    file.write_text("def inner(n):\n    half = n // 2\n    return half\n\n\n"
                    "def outer(self):\n    return inner(7)\n")  # fmt: skip
    held = {}
    exec(compile(file.read_text(), str(file), "exec"), held)
    names = NamesInScope()
    with names.of_all_that_ends():
        held["outer"](types.SimpleNamespace(size=3))
    held["inner"](9.0)  # it is not looked at any more
    found = names.found()
    assert found[f"{file}:1 inner"] == {"n": "int", "half": "int"}
    assert found[f"{file}:6 outer"] == {"self.size": "int"}
    assert not any("pathlib" in one for one in found)
