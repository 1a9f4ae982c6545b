"""The line where what is right becomes what the single process has nowhere, or its gradient does.

Both sides are what lines really computed, recorded as in a run.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.in_code import lines as words
from sumgrad.diagnose.explainers.by_modules.in_code.lines import agreed, in_words
from sumgrad.diagnose.explainers.by_modules.looked import line_from_here
from sumgrad.diagnose.modules.in_code.lines import AtLine, Lines
from sumgrad.record.computed import Computation, computed_together
from sumgrad.record.derivative import Derivative
from sumgrad.subjects.program.watched.computations import Computations
from torch import nn
from torch.autograd import Function

G = torch.Generator().manual_seed(5)
X = torch.randn(6, 5, generator=G, dtype=torch.float64)
W = torch.randn(5, 5, generator=G, dtype=torch.float64)
OWN = slice(2, 5)
AXIS = [("dp", [(0, 1)])]


def recorded(function, *given):
    """What lines computed, with the gradients of the sum of what `function` gives."""
    with Computations(lambda: ((), 0)) as computations:
        given = [t.clone().requires_grad_() if torch.is_tensor(t) else t for t in given]
        function(*given).sum().backward()
    return computations.computed()


def lines(ranks, single, groups=(), params=()):
    traces = SimpleNamespace(
        ranks={r: SimpleNamespace(computed=computed) for r, computed in enumerate(ranks)},
        single=SimpleNamespace(computed=single, params=dict(enumerate(params))),
    )
    return Lines(traces, groups, 1e-8)


def parts(found):
    return [(one.mine.part, one.at) for one in found]


def everything(_):
    return True


def scaled(x, scale):
    y = x.sin()
    z = y * scale
    return z.cos() * x


def test_the_first_line_that_gives_what_is_nowhere_takes_what_is_there():
    there = recorded(scaled, X, X.mean(1)[:, None])
    one = recorded(scaled, X[OWN], X.mean(1)[OWN, None] * 0 + X[0, 0])
    (told,) = lines([one], there).first_forward(0, everything)
    assert not told.told  # one number is found anywhere
    mine = recorded(scaled, X[OWN], X[OWN, :1])
    told = list(lines([mine], there).first_forward(0, everything))
    assert parts(told) == [("y * scale", ())]
    assert told[0].told
    assert told[0].there


def test_what_is_right_is_a_slice_in_any_order_and_shape():
    mine = recorded(scaled, X[[4, 2]], X.mean(1)[[4, 2], None])
    there = recorded(scaled, X, X.mean(1)[:, None])
    both = lines([mine], there)
    assert not list(both.first_forward(0, everything))
    assert not list(both.first_backward(0, everything))
    assert not list(both.cuts(0, everything))


def test_numbers_that_come_from_outside_are_told_by_where_they_are_used():
    odd = recorded(scaled, X[OWN], X[OWN] * 0 + torch.rand(3, 1, generator=G, dtype=torch.float64))
    told = list(lines([odd], recorded(scaled, X, X.mean(1)[:, None])).first_forward(0, everything))
    assert parts(told) == [("y * scale", (1,))]
    assert "the second argument of" in next(iter(in_words(told)))


def again(x, k):
    y = (x + k).sin()
    return ((x + k) - k) * 1.5 * y.dim()


def test_what_is_right_again_is_marked():
    mine, there = recorded(again, X[OWN], 0.25), recorded(again, X, 0.75)
    told = list(lines([mine], there).first_forward(0, everything))
    assert [(one.mine.part, one.again) for one in told] == [("x + k", False), ("x + k", True)]


def like_it(x, k):
    y = (x + k).sin()
    return x * (torch.linspace(0.3, 1.7, 5).to(y) * torch.ones_like(y).mul(0.7))


def test_what_takes_only_its_kind_or_shape_is_not_made_of_it():
    mine, there = recorded(like_it, X[OWN], 0.25), recorded(like_it, X, 0.75)
    told = list(lines([mine], there).first_forward(0, everything))
    assert [(one.mine.part, one.again) for one in told] == [("x + k", False)]


def test_what_only_moves_numbers_is_at_no_fault():
    def turned(x):
        y = torch.tensor(x.detach().numpy() + 0.1)  # from outside
        return (y.T[1:] * x.T[1:]).exp()

    mine, there = recorded(turned, X[OWN]), recorded(scaled, X, 2)
    told = list(lines([mine], there).first_forward(0, everything))
    assert [part for part, _ in parts(told)] == ["y.T[1:] * x.T[1:]"]


@pytest.mark.parametrize(("sign", "told"), [(1.0, []), (-1.0, ["here * 0.7"])])
def test_a_sign_is_no_other_number(sign, told):
    """As of the outward normal of a neighbour's side."""

    def side(x, sign):
        y = x.sin()
        out = torch.tensor(-y.detach().numpy())  # what came from there
        here = -y
        return (here * 0.7).exp() * sign + out

    def whole(x):
        return (x.sin() * -0.7).exp() if sign > 0 else (x.sin() * 0.3).exp()

    mine, there = recorded(side, X[OWN], 1.0), recorded(whole, X)
    found = list(lines([mine], there).first_forward(0, everything))
    assert [part for part, _ in parts(found) if part in ("-y", "here * 0.7")] == told


def test_what_comes_with_the_other_sign_is_not_what_is_wrong_there():
    def side(x):
        out = torch.tensor(-x.sin().detach().numpy())
        return (x.cos() + out) * 0.7

    mine, there = recorded(side, X[OWN]), recorded(lambda x: (x.cos() - x.sin() * 2) * 0.7, X)
    found = list(lines([mine], there).first_forward(0, everything))
    assert parts(found)[:1] == [("x.cos() + out", ())]


def test_torchs_formula_is_not_accused_where_another_use_is_not_known():
    def uses(x, k):
        y = x.sin()
        return (y.cos() * y).sum() + (y * k).exp().sum()

    mine, there = recorded(uses, X[OWN], 0.37), recorded(uses, X, 0.91)
    found = list(lines([mine], there).first_backward(0, everything))
    assert not [part for part, _ in parts(found) if part == "y.cos() * y"]


def test_a_piece_of_a_value_may_get_the_rest_of_its_gradient_elsewhere():
    """A rank's third of the rows of what all of them use otherwise."""

    def pieces(x):
        y = x.sin()
        own = y[:2]
        return (own.cos() * own).sum() + (y * 3.0).sum()

    def whole(x):
        y = x.sin()
        return (y.cos() * y).sum() + (y * 3.0).sum()

    mine, there = recorded(pieces, X[OWN]), recorded(whole, X)
    found = list(lines([mine], there).first_backward(0, everything))
    assert not [part for part, _ in parts(found) if "own" in part]


def test_copies_of_one_value_are_no_parts_of_a_sum():
    """Half of the weight on both ranks: their sum is the weight, by chance."""

    def halved(x, w):
        return x @ (w * 0.5)

    def whole(x, w):
        return x @ (w * 0.75)

    ranks = [recorded(halved, X[OWN], W), recorded(halved, X[OWN], W)]
    told = list(lines(ranks, recorded(whole, X, W), AXIS).first_forward(0, everything))
    assert [(one.mine.part, one.parts) for one in told] == [("w * 0.5", False)]


def squared(x, cut):
    y = x[:, cut].sum(1, keepdim=True)
    return (y**2) * x[:1, :1]


def test_a_line_that_is_not_linear_before_a_sum():
    ranks = [recorded(squared, X, slice(0, 2)), recorded(squared, X, slice(2, 5))]
    there = recorded(squared, X, slice(0, 5))
    both = lines(ranks, there, AXIS)
    told = [list(both.first_forward(rank, everything)) for rank in (0, 1)]
    assert [parts(found)[0] for found in told] == [("y**2", ()), ("y**2", ())]
    assert told[0][0].parts
    assert not next(lines(ranks[:1], there).first_forward(0, everything)).parts
    assert "right before a sum is what is linear" in next(iter(in_words(told[0])))


class Doubled(Function):
    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return {"right": 2 * g, "thrice": 3 * g, "turned": 2 * g.flip(0)}[ctx.how], None


def with_function(x, how):
    y = x.sin()
    z = Doubled.apply(y, how) if how else y * 2
    return z.exp() * x


@pytest.mark.parametrize(("how", "found"), [("right", 0), ("thrice", 0), ("turned", 1)])
def test_a_function_whose_own_backward_is_wrong(how, found):
    """A factor of all of it is told elsewhere."""
    mine, there = recorded(with_function, X[OWN], how), recorded(with_function, X, "")
    both = lines([mine], there)
    told = list(both.first_backward(0, everything))
    assert parts(told) == [("Doubled.apply(y, how)", (0,))][:found]
    if found:
        (said,) = in_words(told)
        assert "Doubled.apply(y, how)` is right on rank 0, and that of its argument (back" in said
        assert "test_lines_exact.py" in said
    assert not list(both.cuts(0, everything))
    assert not list(both.first_forward(0, everything))


@pytest.mark.parametrize(("agrees", "found"), [
    ((True,), 0), ((True, False), 1), ((False,), 1), ((), 1),
])  # fmt: skip
def test_no_function_is_accused_whose_derivative_is_right(agrees, found):
    """By finite differences in every call that was looked at."""
    mine, there = recorded(with_function, X[OWN], "turned"), recorded(with_function, X, "")
    (doubled,) = [c for c in mine.computations if c.function == "Doubled"]
    told = tuple(
        Derivative(function="Doubled", line=(doubled.line, doubled.code), written="", call=number,
                   argument="x", agrees=one, at=0)
        for number, one in enumerate(agrees)
    )  # fmt: skip
    mine = replace(mine, derivatives=told)
    assert len(list(lines([mine], there).first_backward(0, everything))) == found


def test_of_several_ranks_what_is_wrong_on_all_is_said():
    mine, there = recorded(with_function, X[OWN], "turned"), recorded(with_function, X, "")
    (one,) = lines([mine], there).first_backward(0, everything)
    two = replace(one, mine=replace(one.mine, takes=(one.mine.takes[0],) * 2, keys=()))
    on_both = [replace(two, at=(0, 1)), replace(two, at=(1,), rank=1)]
    assert "that of its second tensor argument (" in next(iter(in_words(on_both)))
    apart = [replace(two, at=(0,)), replace(two, at=(1,), rank=1)]
    assert "that of its first, second tensor arguments (" in next(iter(in_words(apart)))


def test_of_two_that_take_the_same_both_are_named():
    class Again(Doubled):
        @staticmethod
        def backward(ctx, g):
            return Doubled.backward(ctx, g)

    def both_of_them(x, how):
        y = x.sin()
        first = Again.apply(y, "right") if how else y * 2
        second = Doubled.apply(y, how) if how else y * 2
        return first.exp() * second.cos()

    mine, there = recorded(both_of_them, X[OWN], "turned"), recorded(both_of_them, X, "")
    (one, *_) = lines([mine], there).first_backward(0, everything)
    assert one.mine.function == "Doubled"
    assert [other.function for other in one.beside] == ["Again"]
    assert "; Again (backward at" in next(iter(in_words([one])))


def test_of_a_function_and_torchs_formula_the_function_is_at_fault():
    def beside(x, how):
        y = x.sin()
        first = Doubled.apply(y, how) if how else y * 2
        return first.exp() + y * 3

    mine, there = recorded(beside, X[OWN], "turned"), recorded(beside, X, "")
    told = list(lines([mine], there).first_backward(0, everything))
    assert [one.mine.function for one in told] == ["Doubled"]
    assert told[0].untold == ()
    assert next(iter(in_words(told))).startswith("where it goes wrong first, ")


def test_another_use_that_is_not_known_to_be_right_is_told():
    def beside(x, how):
        y = x.sin()
        first = Doubled.apply(y, how) if how else y * 2
        return first.exp() + ((y * 7 + x).tanh() if how else 0)

    mine, there = recorded(beside, X[OWN], "turned"), recorded(beside, X, "")
    told = list(lines([mine], there).first_backward(0, everything))
    assert [one.part for one in told[0].untold] == ["y * 7"]
    said = next(iter(in_words(told)))
    assert said.startswith("the gradient that reaches the result of ")
    assert said.endswith("`y * 7` takes the same: what is wrong may come from there")


def test_a_loss_of_one_number_has_only_a_factor():
    class Summed(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum()

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0].flip(1) * g

    def loss(x, own):
        y = x.sin()
        return Summed.apply(y) if own else y.square().sum()

    told = list(lines([recorded(loss, X[OWN], True)], recorded(loss, X, False))
                .first_backward(0, everything))  # fmt: skip
    assert parts(told) == [("Summed.apply(y)", (0,))]


def hooked(x, hook):
    y = x.sin()
    if hook:
        y.register_hook(lambda g: g.flip(0))
    return (y * 3).exp()


def test_a_hook_changes_what_torchs_formula_gives():
    mine, there = recorded(hooked, X[OWN], True), recorded(hooked, X, False)
    assert parts(lines([mine], there).first_backward(0, everything)) == [("x.sin()", (0,))]


def shared(x, w, rows):
    return ((x[rows] @ w) * 2).exp()


def test_of_what_is_shared_a_part_of_the_rows_gives_a_part():
    """And its gradient is no slice of that of all rows."""
    there = recorded(shared, X[:5], W, slice(0, 5))
    mine = recorded(shared, X[:5], W, slice(2, 4))
    assert not list(lines([mine], there).first_backward(0, everything))


def cut_off(x, how):
    y = x.sin()
    if how == "cut":
        y = y.detach()
    if how == "leaf":
        y = y.detach().requires_grad_()
    return (y * x).exp()


@pytest.mark.parametrize(("how", "found"), [("", []), ("cut", ["y.detach()"]), ("leaf", [])])
def test_a_line_that_autograd_does_not_pass(how, found):
    mine, there = recorded(cut_off, X[OWN], how), recorded(cut_off, X, "")
    told = list(lines([mine], there).cuts(0, everything))
    assert [one.mine.part for one in told] == found
    assert [one.cut for one in told] == [True] * len(found)
    if found:
        assert "autograd knows nothing of what" in next(iter(in_words(told)))


def chosen(x, how):
    """The single process chooses by what autograd knows nothing of, or writes it down."""
    y = x.sin()
    if how == "chosen":
        some = y[2:4, :2].flatten()
        y = some[some.detach().topk(2).indices]
    elif how == "mask":
        y = y * (y.detach() > 0.1)
    elif how == "noted":
        y[2:4, :2].flatten().detach().sum()
    return (y * 2).exp()


@pytest.mark.parametrize(("there", "found"), [
    ("chosen", []), ("noted", ["y.detach()"]), ("", ["y.detach()"])])  # fmt: skip
def test_what_the_single_process_cuts_to_choose_by_is_cut_rightly(there, found):
    """Of some of these numbers; not what it only writes down."""
    mine = recorded(chosen, X[OWN], "mask")
    told = lines([mine], recorded(chosen, X, there)).cuts(0, everything)
    assert [one.mine.part for one in told] == found


def test_a_line_that_autograd_passes_and_does_not_in_the_single_process():
    def towards(x, how):
        y = x.sin()
        with torch.set_grad_enabled(how == "kept"):
            target = y * 3 + 1
        return (y.cos() - target) ** 2

    mine, there = recorded(towards, X[OWN], "kept"), recorded(towards, X, "")
    (one, *more) = lines([mine], there).kept(0, everything)
    assert (one.mine.part, one.kept) == ("y * 3", True)
    assert [o.mine.part for o in more] == ["y * 3 + 1"]
    assert "look for a detach or a no_grad that is missing" in next(iter(in_words([one])))
    for same in ("kept", ""):
        both = lines([recorded(towards, X[OWN], same)], recorded(towards, X, same))
        assert not list(both.kept(0, everything))
    assert not list(lines([there], mine).kept(0, everything))


def test_what_is_sent_is_detached_rightly():
    def sent(x):
        y = x.sin()
        y.detach().clone()
        return y.exp()

    mine, there = recorded(sent, X[OWN]), recorded(lambda x: x.sin().exp(), X)
    assert not list(lines([mine], there).cuts(0, everything))


def test_rows_that_are_weighed_otherwise_tell_nothing_of_what_mixes_them():
    class Mixed(Function):
        @staticmethod
        def forward(ctx, x, matrix):
            ctx.matrix = matrix
            return matrix @ x

        @staticmethod
        def backward(ctx, g):
            return ctx.matrix.T @ g, None

    def mixed(x, weights):
        return Mixed.apply(x.sin(), X @ X.T) * X.cos() * weights

    weights = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None]
    there = recorded(mixed, X, 1.0)
    for mine in (recorded(mixed, X, weights), recorded(mixed, X, 3.0)):
        assert not list(lines([mine], there).first_backward(0, everything))


def test_an_error_of_another_rank_is_handed_on_and_is_no_fault_of_the_line():
    class SumOfBoth(Function):
        @staticmethod
        def forward(ctx, x, other):
            return x + torch.tensor(other.detach().numpy())

        @staticmethod
        def backward(ctx, g):
            return g, None

    def summed(x, other, add):
        y = x.sin() + add
        return SumOfBoth.apply(y, other)

    there = recorded(lambda x: x.sin() * 2 + 0 * x, X)
    odd = X.sin() + torch.rand(6, 5, generator=G, dtype=torch.float64)
    ranks = [recorded(summed, X, odd, 0.0), recorded(summed, X, X.sin(), odd - X.sin())]
    both = lines(ranks, there)
    functions = [[o.mine.function for o in both.first_forward(r, everything)] for r in (0, 1)]
    assert functions == [["add"], ["add"]] or "SumOfBoth" not in functions[0]


def test_numbers_of_other_digits_tell_nothing():
    mine, there = recorded(scaled, X[OWN].float(), 3.0), recorded(scaled, X.float(), 2.0)
    assert not list(lines([mine], there).first_forward(0, everything))


def test_parameters_are_known_by_the_model():
    layer = nn.Linear(5, 5).double()
    there = recorded(layer, X)
    mine = recorded(lambda x: (x @ layer.weight.T + layer.bias).exp(), X[OWN])
    told = list(lines([mine], there).first_forward(0, everything))
    known = list(lines([mine], there, params=layer.parameters()).first_forward(0, everything))
    assert parts(told)[0][1] != ()
    assert parts(known)[0] == ("x @ layer.weight.T", ())


def test_terms_of_one_place_are_one_value_with_a_gradient_of_each():
    def term(x, k):
        y = x.sin()
        return y * k

    two = computed_together([recorded(term, X, 2.0), recorded(term, X, 5.0)])
    sines = [c for c in two.computations if c.function == "sin"]
    assert len({c.gives for c in sines}) == 1
    (number,) = sines[0].gives
    assert [float(own[number][0, 0]) for own in two.gradients] == [2.0, 5.0]
    mine = recorded(lambda x: term(x, 2.0) * 3 + term(x, 5.0) * 4, X[OWN])
    assert not list(lines([mine], two).first_backward(0, everything))


def at_line(site, rank, **more):
    mine = Computation(function="add", line=f"/x/step.py:{site}", code="a + b", takes=(0,),
                       made_at=(), inside=(), calls=0, gives=(1,), site=str(site))  # fmt: skip
    return AtLine(rank=rank, mine=mine, place=site, **more)


def test_lines_that_are_meant_on_one_rank_are_meant_on_every():
    """Line 3 gives new numbers of which something right is made again on rank 0, so it is meant on
    rank 1, too."""
    found = {0: [at_line(3, 0, again=True), at_line(7, 0)], 1: [at_line(3, 1), at_line(7, 1)]}
    told = agreed(lambda rank, asked: iter(found[rank]), dict.fromkeys(found, everything), [0, 1])
    assert [(one.rank, one.mine.site) for one in told] == [(0, "7"), (1, "7")]
    (said,) = in_words(told)
    assert said.startswith("this line gives what the single process has nowhere: step.py:7")
    assert said.endswith(", on rank 0-1")
    (said,) = in_words([at_line(7, 0, whole=True)])
    assert "has nowhere, of vectors that it has: step.py:7" in said
    (said,) = in_words([at_line(7, 0, whole=True), at_line(7, 1)])
    assert "of vectors that it has" not in said
    (said,) = in_words([at_line(7, 0, told=False)])
    assert said.endswith(", on rank 0; not all that it takes could be told")
    (said,) = in_words([at_line(7, 0, there=False, whole=True)])
    assert said.startswith(
        "this line, which the single process does not run, gives what was not seen there, of "
    )


def kept_over_calls(x, cut):
    table = x * 2
    kept = table.detach() if cut else table
    again = x * 2  # the same numbers, with a graph, as in the next micro-batch
    return kept * x.sin() + again * x


class Fused(torch.autograd.Function):
    """Inside of it nothing has a graph, by right."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin() * 1.5
        ctx.save_for_backward(x)
        return y.exp()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 1.5 * x.cos() * (x.sin() * 1.5).exp()


def test_what_a_function_of_the_single_process_computes_inside_has_no_graph_there():
    def written_out(x):
        y = x.sin() * 1.5
        return y.exp() * 2

    def fused(x):
        return Fused.apply(x) * 2

    def hidden(x):
        with torch.no_grad():
            y = x.sin() * 1.5
        return y.exp() * x

    mine = recorded(written_out, X[OWN])
    assert parts(lines([mine], recorded(fused, X)).kept(0, everything)) == []
    assert parts(lines([mine], recorded(hidden, X)).kept(0, everything)) != []


def test_a_cut_is_one_though_the_same_numbers_have_a_graph_later():
    both = lines([recorded(kept_over_calls, X, True)], recorded(kept_over_calls, X, False))
    assert parts(both.cuts(0, everything)) == [("table.detach()", ())]


def noted(x, use):
    """A line that the single process does not run: written down, or used."""
    y = x.sin()
    if use is None:
        return y.cos()
    size = y.detach().abs().square().flatten().cumsum(0)
    return y.cos() * (size[-1:] + 1.0) if use else y.cos()


@pytest.mark.parametrize("use", [False, True])
def test_a_line_that_is_run_here_alone_and_leads_to_no_gradient_is_at_no_fault(use):
    mine, there = recorded(noted, X[OWN], use), recorded(noted, X, None)
    told = list(lines([mine], there).first_forward(0, everything))
    assert bool(told) == use


def own_loss(x, w, scale):
    y = x @ w
    return (y * y * scale).sum()


def test_from_the_loss_down_the_first_line_that_gives_another_gradient():
    """Not of squares: what it takes is right, and gets another gradient."""
    there = recorded(own_loss, X, W, torch.ones(6, 1).double())

    def other(x, w):
        y = x @ w
        return (y.exp() - 1).sum()

    one = recorded(other, X[OWN], W)
    (first,) = lines([one], there).into_the_loss(0, everything)
    assert (first.mine.part, first.at, first.back) == ("y.exp()", (0,), True)


def test_no_line_into_the_loss_where_all_that_could_be_compared_is_right():
    there = recorded(own_loss, X, W, torch.ones(6, 1).double())
    one = recorded(own_loss, X[OWN], W, torch.ones(3, 1).double())
    assert not list(lines([one], there).into_the_loss(0, everything))


@pytest.mark.parametrize(("by", "said"), [
    (1.0, ["what that line gives is nothing that the single process has, of what it has, on rank "
           "0; its second argument, made at {line} `target = by * x.sin().detach()`, goes into "
           "that, too"]),
    (0.5, ["its second argument, made at {line} `target = by * x.sin().detach()`, is nothing that "
           "the single process has, on rank 0"]),
])  # fmt: skip
def test_what_else_the_line_into_the_loss_takes_is_told_where_it_or_its_result_is_nowhere(by, said):
    def to_target(x, w, by, own):
        y = x @ w
        target = by * x.sin().detach()
        return y[:, :3].sub(target, alpha=own).square().sum()

    there = recorded(to_target, X[:, :3], W[:3], 1.0, 1.0)
    every = lines([recorded(to_target, X[OWN, :3], W[:3], by, 3.0)], there)
    (first, *_) = [one for one in every.into_the_loss(0, everything)
                   if "sub" in one.mine.part]  # fmt: skip
    line = line_from_here(first.mine.made_at[1][0])
    assert words._beside_it(every, first) == [text.format(line=line) for text in said]


def test_nothing_is_told_beside_a_line_into_the_loss_that_gives_what_is_there():
    def to_loss(x, w, by):
        y = x @ w
        return (y.exp() - by * x[:, :1].detach()).square().sum()

    there = recorded(to_loss, X, W, 1.0)
    every = lines([recorded(to_loss, X[OWN], W, 0.5)], there)
    (told,) = [c for c in every.computed(0).computations if c.part == "y.exp()"]
    one = AtLine(rank=0, mine=told, place=0, at=(0,), back=True)
    assert words._beside_it(every, one) == []


@pytest.mark.parametrize(("more", "told"), [
    ({}, True), ({"told": False}, False), ({"at": (0,)}, False), ({"parts": True}, False),
    ({"again": True}, False), (None, False),
])  # fmt: skip
def test_what_a_line_gives_is_told_only_of_one_that_takes_what_is_there(more, told):
    mine = recorded(own_loss, X, W, torch.ones(6, 1).double()).computations[0]
    one = AtLine(rank=0, mine=mine, place=0)
    found = [] if more is None else [replace(one, **more)]
    every = SimpleNamespace(first_forward=lambda rank, asked: iter(found if asked(mine) else []))
    assert words._gives_something_else(every, one) == told


def test_what_autograd_does_not_know_is_no_line_into_the_loss():
    there = recorded(own_loss, X, W, torch.ones(6, 1).double())

    def noted(x, w):
        y = x @ w
        y.detach().exp().sum()
        torch.empty_like(y)
        return (y.exp() - 1).sum()

    told = list(lines([recorded(noted, X[OWN], W)], there).into_the_loss(0, everything))
    assert parts(told) == [("y.exp()", (0,))]


@pytest.mark.parametrize(("function", "uses"), [
    ("to", [3]), ("full_like", [5]), ("new_tensor", [5]), ("mul", [3, 5]), ("getitem", [3]),
    ("gather", [3]), ("embedding", [5]),
])  # fmt: skip
def test_of_which_arguments_the_numbers_are_used(function, uses):
    one = replace(at_line(1, 0).mine, function=function, takes=(3, "dim=1", 5))
    assert one.uses == uses


def scores_of(q, k, v, shift):
    return ((q @ k.T).exp() @ v) * (1.0 + shift * v.new_ones(1))


@pytest.mark.parametrize(("keys", "told"), [(OWN, []), (slice(None), ["(q @ k.T).exp() @ v"])])
def test_a_product_over_a_part_of_the_keys_is_what_a_rank_has(keys, told):
    there = recorded(scores_of, X, X.cos(), X.sin(), 0.0)
    v = X.sin() if told == [] else X.sin().flip(0)  # beside what it does not belong to
    mine = recorded(scores_of, X[OWN], X.cos()[keys], v[keys], 0.0)
    assert [part for part, _ in parts(lines([mine], there).first_forward(0, everything))] == told


def in_one_product(x, a, b, alone):
    if not alone:
        return x @ a.T + x @ b.T
    a = a * 1.5
    was = a / 1.5  # right again, and not among those that are named
    both = a + b + 0 * was
    y = x @ both.t()
    return y.sin()


def test_of_lines_that_ranks_alone_run_those_that_follow_are_named_too():
    a, b = X[:, :5] * 2, X.cos()
    mine, there = recorded(in_one_product, X, a, b, True), recorded(in_one_product, X, a, b, False)
    told = next(lines([mine], there).first_forward(0, everything))
    assert told.mine.code == "a = a * 1.5"
    assert [*dict.fromkeys(c.code for c in told.then)] == [
        "both = a + b + 0 * was",
        "y = x @ both.t()",
        "return y.sin()",
    ]
    first, _, then = list(in_words([told]))
    assert first.startswith("this line, which the single process does not run, ")
    assert then.startswith(
        "what it should give is not known, so it may be right, and what is wrong "
    )
    assert "`both = a + b + 0 * was`" in then
    assert "`return y.sin()`" in then
    assert "1.5" not in then
    assert "test_lines_exact" not in then  # the file is that of the first line
    _, taken = in_words([replace(told, there=True)])
    assert taken.startswith("some of what it takes on rank ")  # 1.5 is made nowhere
