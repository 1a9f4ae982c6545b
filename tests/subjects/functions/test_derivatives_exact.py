"""A user's Function, and whether its backward gives the derivative of its forward."""

from __future__ import annotations

import json

import pytest
import torch
from sumgrad.record.computed import (
    Computed,
    computed_as_json,
    computed_as_tensors,
    computed_from,
    computed_together,
)
from sumgrad.record.reference import write_tensors
from sumgrad.subjects.program.functions import derivatives
from sumgrad.subjects.program.functions.derivatives import Derivatives
from sumgrad.subjects.program.functions.every_apply import around_every_apply
from sumgrad.subjects.program.watched.computations import Computations
from torch.autograd import Function

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def told(function, *args, operations=lambda: 0):
    """What is told of one call, by the names of arguments."""
    computations = Computations(lambda: ((), 0), Derivatives(operations))
    with computations:
        held = [a * 1.0 if isinstance(a, torch.Tensor) else a for a in args]
        out = function.apply(*held)
        out = out if isinstance(out, tuple) else (out,)
        weights = torch.arange(1.0, 1 + out[0].numel()).view_as(out[0])
        sum((o * (i + 1) * weights).sum() for i, o in enumerate(out)).backward()
    return {one.argument: one for one in computations.computed().derivatives}


def leaf(value=X):
    return value.clone().requires_grad_()


class Product(Function):
    """Of what it gives in the backward, a part may be changed."""

    @staticmethod
    def forward(ctx, x, y, change):
        ctx.save_for_backward(x, y)
        ctx.change = change
        return x * y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return ctx.change(grad * y), (grad * x).sum(0), None


def test_a_right_formula_agrees_in_all_of_its_arguments():
    found = told(Product, leaf(), leaf(Y), lambda g: g)
    assert {name: one.agrees for name, one in found.items()} == {"x": True, "y": True}
    assert found["x"].off is None
    assert found["x"].function == "Product"
    assert found["x"].line[1] == "out = function.apply(*held)"
    assert found["x"].call == 0
    assert found["x"].written.rpartition(":")[0] == __file__


APPLIED = Product.apply  # before anything is watched, as in a user's module


def test_an_apply_under_another_name_is_seen():
    computations = Computations(lambda: ((), 0), Derivatives())
    with computations:
        APPLIED(leaf() * 1.0, leaf(Y) * 1.0, lambda g: 2 * g).square().sum().backward()
        assert isinstance(APPLIED(X, Y, None), torch.Tensor)
    found = computations.computed()
    (first, _) = [c for c in found.computations if c.function == "Product"]
    assert first.part == "APPLIED(leaf() * 1.0, leaf(Y) * 1.0, lambda g: 2 * g)"
    assert {d.argument: d.agrees for d in found.derivatives} == {"x": False, "y": True}


def test_what_stands_around_every_apply_ends_and_may_stand_in_another():
    order = []

    def around(name):
        def one(cls, call, args, kwargs):
            order.append((name, cls.__name__))
            return call(*args, **kwargs)

        return one

    ends = [around_every_apply(around(name)) for name in "ab"]
    assert torch.equal(APPLIED(X, Y, None), X * Y)
    assert order == [("b", "Product"), ("a", "Product")]
    for end in reversed(ends):
        end()
    assert torch.equal(APPLIED(X, Y, None), X * Y)
    assert "apply" not in Function.__mro__[1].__dict__
    assert len(order) == 2


class Talks(Function):
    operations = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Talks.operations += Talks.talks
        return grad * 3


@pytest.mark.parametrize("talks", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_a_function_of_which_some_backward_communicates_is_not_alone(talks):
    kept = Derivatives(lambda: Talks.operations)
    with Computations(lambda: ((), 0), kept):
        y = Talks.apply(leaf() * 1.0)
        for Talks.talks in talks:
            y.sum().backward(retain_graph=True)
    (one,) = kept.calls()
    assert one.is_alone == (talks == (0, 0))
    assert one.ended - one.began == talks[0]


def zero_in_row(g):
    g = g.clone()
    g[2] = 0
    return g


def other_in_column(g):
    g = g.clone()
    g[:, 1] *= torch.arange(2.0, 6.0)
    return g


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda g: -2 * g, {"factors": (-2.0,), "differ": 12, "where": ()}),
        (lambda g: g * 0, {"factors": (0.0,), "differ": 12, "zero": True}),
        (zero_in_row, {"factors": (), "differ": 3, "zero": True, "where": ((0, (2,)),)}),
        (other_in_column, {"factors": (), "differ": 4, "zero": False, "where": ((1, (1,)),)}),
        (lambda g: g.flip(0), {"factors": (), "moved": True}),
    ],
)
def test_how_a_formula_is_off(change, expected):
    found = told(Product, leaf(), leaf(Y), change)
    one = found["x"]
    assert not one.agrees
    assert found["y"].agrees
    for name, value in expected.items():
        got = getattr(one.off, name)
        assert got == (pytest.approx(value, abs=1e-6) if name == "factors" else value), name
    assert one.off.numel == 12
    held = Computed(derivatives=tuple(found.values()))
    said = json.loads(json.dumps(computed_as_json(held)))
    assert computed_from(said, {}).derivatives == held.derivatives
    assert computed_together([held, Computed()]).derivatives == held.derivatives


class TwoResults(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x * x

    @staticmethod
    def backward(ctx, first, second):
        return first * ctx.saved_tensors[0].cos()


def test_the_result_whose_gradient_is_dropped():
    assert told(TwoResults, leaf())["x"].off.factors == pytest.approx((1.0, 0.0), abs=1e-6)


class SetUp(Function):
    """No ctx in the forward."""

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, (grad * x).sum(0) * 2


class AnyNumber(Function):
    @staticmethod
    def forward(ctx, *given):
        ctx.save_for_backward(*given)
        return given[0] * given[1]

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, (grad * x).sum(0) * 2


@pytest.mark.parametrize(
    ("function", "names"), [(SetUp, "xy"), (AnyNumber, ("number 1", "number 2"))]
)
def test_arguments_have_the_names_of_the_forward(function, names):
    found = told(function, leaf(), leaf(Y))
    assert {name: one.agrees for name, one in found.items()} == dict(
        zip(names, (True, False), strict=True)
    )


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_a_forward_that_changes_its_argument_is_told_of_what_it_was_given():
    assert told(InPlace, leaf())["x"].agrees


class Random(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = torch.rand_like(x) > 0.5
        return x * ctx.mask

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask * 2


class Rounded(Function):
    """Its forward has no slope, and lets gradients through as they are."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Kinked(Function):
    @staticmethod
    def forward(ctx, x):
        return x.abs()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Relu(Function):
    """It takes one side where there are two."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[0] > 0)


class Elsewhere(Function):
    """What it gives none may be put into a buffer of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return None


class Raises(Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Raises.calls += 1
        if Raises.calls > 1:
            raise RuntimeError("once only")
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (Random, X),
        (Rounded, X),  # what it does not depend on
        (Kinked, torch.tensor([0.0, 2e-6, -2e-6, 1.0], dtype=torch.float64)),
        (Raises, X),
        (Relu, X.clamp(min=0)),
        (Elsewhere, X),
        (TwoResults, X.float()),
    ],
)
def test_what_cannot_be_told_is_not(function, value):
    assert not told(function, leaf(value))


def test_what_has_no_gradient_or_is_not_asked_for_one_is_not_told():
    assert {*told(Product, leaf(), Y, lambda g: g * 2)} == {"x"}


def test_a_function_that_communicates_is_not_run_again():
    count = [0]

    class Sends(Function):
        runs = 0

        @staticmethod
        def forward(ctx, x):
            Sends.runs += 1
            count[0] += 1
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    class SendsBack(Function):
        runs = 0

        @staticmethod
        def forward(ctx, x):
            SendsBack.runs += 1
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            count[0] += 1
            return grad

    for function in (Sends, SendsBack):
        assert not told(function, leaf(), operations=lambda: count[0])
        assert function.runs == 1
    assert not told(Sends, leaf())["x"].agrees  # none that is seen


def test_few_calls_of_a_place_are_kept_and_no_large_ones(monkeypatch):
    def all_told(shapes):
        computations = Computations(lambda: ((), 0))
        with computations:
            for shape in shapes:
                x = torch.ones(shape, dtype=torch.float64).requires_grad_()
                TwoResults.apply(x * 1.0)[0].sum().backward()
        return [one.call for one in computations.computed().derivatives]

    assert all_told([3, 3, 3, 3, 4]) == [0, 1, 4]
    assert all_told(range(1, 10)) == [*range(derivatives.MOST_CALLS)]
    monkeypatch.setattr(derivatives, "MOST_NUMBERS", 8)
    assert all_told([3, 2]) == [1]  # 3 and its two results are 9


def test_a_random_state_is_as_it_was_and_no_gradient_is_left():
    computations = Computations(lambda: ((), 0))
    with computations:
        x = leaf()
        Product.apply(x * 1.0, Y * 1.0, lambda g: g).sum().backward()
    before, gradient = torch.random.get_rng_state(), x.grad.clone()
    assert computations.computed().derivatives
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(x.grad, gradient)


def test_a_large_argument_is_told_along_directions_alone(monkeypatch):
    monkeypatch.setattr(derivatives, "MOST_ELEMENTS", 11)
    one = told(Product, leaf(), leaf(Y), lambda g: g * 2)["x"]
    assert not one.agrees
    assert one.off.factors == pytest.approx((2.0,), abs=1e-6)  # along all directions
    one = told(Product, leaf(), leaf(Y), other_in_column)["x"]
    assert not one.agrees
    assert one.off is None


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [("process_time", derivatives.SECONDS), ("monotonic", derivatives.MOST_SECONDS)],
)
def test_the_clocks_are_looked_at_before_each_forward(monkeypatch, asked, seconds):
    clock = [0.0]

    class Slow(Function):
        runs = 0

        @staticmethod
        def forward(ctx, x):
            Slow.runs += 1
            clock[0] += seconds / 4
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    monkeypatch.setattr(derivatives.time, asked, lambda: clock[0])
    assert not told(Slow, leaf())
    assert Slow.runs == 1 + 4 + 1


def test_a_users_hook_on_what_a_forward_gives_as_a_view_is_kept():
    class Same(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    x, seen = leaf(), []
    with Computations(lambda: ((), 0)):
        h = Same.apply(x * 1.0)
        h.register_hook(lambda g: seen.append(g) or g * 3)
        h.sum().backward()
    assert len(seen) == 1
    assert torch.equal(x.grad, torch.full_like(X, 3.0))


def test_leaves_are_told():
    found = told(AnyNumber, leaf(), leaf(Y))
    assert not any(one.leaf for one in found.values())
    computations = Computations(lambda: ((), 0))
    with computations:
        Product.apply(leaf() * 1.0, leaf(Y), lambda g: g).sum().backward()
    assert {d.argument: d.leaf for d in computations.computed().derivatives} == {
        "x": False, "y": True,
    }  # fmt: skip


def test_no_time_is_taken_that_is_not_there(monkeypatch):
    monkeypatch.setattr(derivatives, "SECONDS", -1.0)
    assert not told(Product, leaf(), leaf(Y), lambda g: g * 2)


def test_beside_what_gives_none_the_others_are_told():
    assert {*told(Product, leaf(), leaf(Y), lambda g: None)} == {"y"}


def test_a_forward_that_gives_something_else_the_second_time_is_not_told():
    class Turns(Function):
        runs = 0

        @staticmethod
        def forward(ctx, x):
            Turns.runs += 1
            return x * (2 if Turns.runs == 1 else 3)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    assert not told(Turns, leaf())


class Turned(Function):
    """Complex numbers of real ones; in the backward wrong by a factor, or not."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.times = times
        return x * (1 + 2j)

    @staticmethod
    def backward(ctx, grad):
        return ctx.times * (grad * (1 - 2j)).real, None


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_a_complex_result_counts_with_both_of_its_parts(times, tmp_path):
    computations = Computations(lambda: ((), 0), Derivatives(lambda: 0))
    with computations:
        z = Turned.apply(leaf() * 1.0, times)
        weights = torch.arange(1.0, 13.0).view(4, 3)
        (z.real * weights + 3 * z.imag.square()).sum().backward()
    found = computations.computed()
    (one,) = found.derivatives
    assert one.agrees == (times == 1.0)
    (back,) = found.backs
    assert [tuple(g.shape) for g in back.outer if g is not None] == [(4, 3, 2)]
    write_tensors(tmp_path / "kept.safetensors", computed_as_tensors(found))  # as pairs of floats
