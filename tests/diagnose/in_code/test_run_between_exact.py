"""What ranks ran on the way to a wrong value, and what a stage gives back, as lines computed it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.backwards.handed_in_parts import handed_in_parts
from sumgrad.diagnose.explainers.by_modules.in_code import run_between
from sumgrad.diagnose.explainers.by_modules.in_code.called_from import odd_calls_come_from
from sumgrad.diagnose.explainers.by_modules.in_code.lines import in_words
from sumgrad.diagnose.explainers.by_modules.weighing import weights
from sumgrad.diagnose.modules.autograd.gives_nothing import give_nothing
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.in_code.lines_across_ranks import (
    nothing_goes_back,
    only_of_parts,
    picks_by_parts,
    sent_back,
)
from sumgrad.diagnose.modules.in_code.run_between import RunBetween, _is_made_of
from sumgrad.diagnose.modules.where.look import _only_stands_there
from sumgrad.record.computed import computed_together
from sumgrad.subjects.program.watched.computations import Computations
from torch.autograd import Function

G = torch.Generator().manual_seed(5)
X = torch.randn(4, 5, generator=G, dtype=torch.float64)
W = torch.randn(5, 5, generator=G, dtype=torch.float64)
PAIR = [("pp", [(0, 1)])]


class Scale(Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.by, None


def recorded(function, *given, back=None):
    with Computations(lambda: ((), 0)) as computations:
        given = [t.clone().requires_grad_() if torch.is_tensor(t) else t for t in given]
        end = function(*given)
        torch.autograd.backward([end], [back]) if back is not None else end.sum().backward()
    return computations.computed(), given, end.detach()


def lines(ranks, single, groups=()):
    traces = SimpleNamespace(
        ranks={r: SimpleNamespace(computed=computed) for r, computed in enumerate(ranks)},
        single=SimpleNamespace(computed=single, params={}),
    )
    return traces, Lines(traces, groups, 1e-8)


def first(x):
    return (x @ W).tanh()


def second(y):
    return (y * 2).exp() @ W


def ways(ranks, single, value, *, rank=1, groups=PAIR):
    back = RunBetween(lines(ranks, single, groups)[1])
    number = back.number_of(rank, value, 0)
    return [(r.rank, r.made.part, r.first) for r in back.back_from(rank, number)]


def test_the_way_goes_on_at_the_rank_that_sent_it():
    """Rank 0 sends a square where the single process has none."""
    one, _, sent = recorded(lambda x: first(x).square(), X)
    two, _, _ = recorded(second, sent)
    there, _, _ = recorded(lambda x: second(first(x)), X)
    exp = (sent * 2).exp()
    assert ways([one, two], there, exp) == [
        (1, "(y * 2).exp()", False),
        (1, "y * 2", False),
        (0, "first(x).square()", True),
    ]


def test_the_way_ends_where_the_single_process_has_it():
    one, _, sent = recorded(first, X)
    two, _, _ = recorded(lambda y: (y * 3).exp() @ W, sent)
    there, _, _ = recorded(lambda x: second(first(x)), X)
    assert ways([one, two], there, (sent * 3).exp()) == [
        (1, "(y * 3).exp()", False),
        (1, "y * 3", True),
    ]
    # Of what is right nothing is to be said.
    assert ways([one, two], there, sent) == []


def part_of(x, scale):
    return (x * scale) @ W


def test_a_sum_over_ranks_leads_on_to_each_part():
    one, _, left = recorded(part_of, X, 2.0)
    two, _, right = recorded(part_of, X + 0, 3.5)
    total, _, _ = recorded(lambda y: y.sin(), left + right)
    there, _, _ = recorded(part_of, X, 1.0)
    found = ways([computed_together([one, total]), two], there, left + right, rank=0)
    assert {(r, part) for r, part, _ in found} >= {(0, "(x * scale) @ W"), (1, "(x * scale) @ W")}


@pytest.mark.parametrize("order", [1, -1])
def test_parts_that_ranks_put_side_by_side_lead_on_to_each(order):
    one, _, left = recorded(part_of, X, 2.0)
    two, _, right = recorded(part_of, X[:2] + 0, 3.5)
    whole = torch.cat([left, right][::order])
    total, _, _ = recorded(lambda y: y.sin(), whole)
    there, _, _ = recorded(part_of, X, 1.0)
    found = ways([computed_together([one, total]), two], there, whole, rank=0)
    parts = {(0, "(x * scale) @ W"), (1, "(x * scale) @ W")}
    if order == 1:
        assert {(r, part) for r, part, _ in found} >= parts
    else:  # in the order of ranks alone
        assert parts.isdisjoint((r, part) for r, part, _ in found)


def test_what_has_another_shape_or_number_of_dimensions_is_not_put_together():
    assert _is_made_of(torch.cat([X, X * 2], 1), [X, X * 2])
    assert not _is_made_of(torch.cat([X, X * 2], 1), [X, X])
    assert not _is_made_of(torch.cat([X, X * 2], 1), [X, X * 2, X[:, :0], X])
    assert not _is_made_of(torch.cat([X, X * 2]), [X, X[:, :3]])
    assert not _is_made_of(X, [X[0], X[1]])
    assert not _is_made_of(X, [X / 2, X / 2, X])
    assert _is_made_of(X, [X / 4, X * 3 / 4])
    assert not _is_made_of(X, [X.float() / 2, X / 2])


def test_whole_numbers_are_told_by_value():
    order = torch.tensor([2, 0, 3, 1])

    def picked(x, turn):
        return x[order.roll(turn)].sin()

    one, _, out = recorded(picked, X, 1)
    there, _, _ = recorded(picked, X, 0)
    found = ways([one], there, out, rank=0, groups=())
    assert found == []  # rows in another order are rows of it
    half, _, out = recorded(lambda x: x[order.roll(1)] * torch.arange(4)[:, None], X)
    parts = [part for _, part, _ in ways([half], there, out, rank=0, groups=())]
    assert "torch.arange(4)[:, None]" in parts


@pytest.mark.parametrize("entered", [True, False])
def test_words_name_the_line_of_the_sender_first(monkeypatch, entered):
    one, _, sent = recorded(lambda x: first(x).square(), X)
    two, _, _ = recorded(second, sent)
    there, _, _ = recorded(lambda x: second(first(x)), X)
    traces, found = lines([one, two], there, PAIR)
    traces.ranks[1].outputs = [(sent * 2).exp()]
    monkeypatch.setattr(run_between, "known_lines", lambda case: found)
    s = SimpleNamespace(rank=1, at=0, call=SimpleNamespace(number=3, operation_back=None),
                        forward="wrong", wrong=None, shape=(4, 5))  # fmt: skip
    case = SimpleNamespace(traces=traces)
    text = run_between.run_in_words(case, [s] if entered else [])
    if not entered:
        assert text == []
        return
    line, taken, way = text
    assert taken.startswith("what it takes on rank 0 is made at ")
    assert "first(x).square()" in line
    assert line.endswith("on rank 0")
    assert way.startswith("what goes in on rank 1 in call 3 is made on rank 0 at ")
    assert "; and on rank 1 at :" in way


def ran(number, function="add"):
    made = SimpleNamespace(line=f"/a/b.py:{number}", code=f"c{number}", function=function)
    return SimpleNamespace(rank=0, options=None, first=False, made=made)


def test_too_many_lines_are_no_hint():
    runs = [ran(i) for i in range(run_between.MOST_LINES + 1)]  # the latest first
    assert len(run_between._way(runs[:-1])) == 1
    assert run_between._way(runs) == []
    assert run_between._way(runs[:1]) == []
    # Of many those that only cut are left out, but for the last.
    (text,) = run_between._way([*runs[:-1], ran(20, "getitem")])
    assert "c0" in text
    assert "c20" not in text
    (text,) = run_between._way([ran(20, "getitem"), *runs[1:-1], ran(21, "getitem")])
    assert "c20" in text
    assert "c21" not in text


def stages(entrance, *, used=False):
    """A step of two stages, and its values: rank 1 gets what rank 0 has, through `entrance`. used:
    rank 0 makes something of it itself."""
    there, _, _ = recorded(lambda x: second(Scale.apply(first(x), 0.5)), X)
    with Computations(lambda: ((), 0)) as one:
        sent = Scale.apply(first(X.clone().requires_grad_()), 0.5)
        torch.empty_like(sent)  # what is received is of its shape
        _ = sent * 2 if used else None
        with Computations(lambda: ((), 0)) as two:
            leaf = sent.detach().clone().requires_grad_()
            second(entrance(leaf)).sum().backward()
        sent.backward(leaf.grad)
    return lines([one.computed(), two.computed()], there)[1]


@pytest.mark.parametrize(
    ("entrance", "times"), [(lambda y: y, None), (lambda y: Scale.apply(y, 0.25), 0.25)]
)
def test_what_a_stage_gives_back_is_held_against_what_it_was_sent(entrance, times):
    both = stages(entrance)
    found = list(sent_back(both, 1, [0]))
    assert [one.times for one in found] == ([] if times is None else [pytest.approx(times)])
    assert not list(sent_back(stages(entrance, used=True), 1, [0]))  # a share of its gradient
    assert not list(sent_back(both, 1, []))  # of ranks whose gradient is right nothing is asked
    for one in found:
        (words,) = in_words([one])
        assert "is right on rank 1, and that of its argument" in words
        assert words.endswith("is 1/4 times what is right")


class Minus(Function):
    @staticmethod
    def forward(ctx, mine, other):
        return mine - other

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def by_a_function(mine, other):
    return Minus.apply(mine, other)  # as it is while it is watched


def neighbours(exchanged, *, wanted=True, minus=torch.sub, weight=1.0):
    """Two ranks, each of which draws its values and the other's together. exchanged: what reaches
    the first from the second; wanted: whether a gradient goes back there in the single process.
    minus: how ranks take off what they got; weight: that the second has on its own."""
    own = [X, X[:3] + 2]

    def drawn(mine, other, minus=torch.sub, weight=1.0):
        return (minus(mine, other).square().sum() + weight * mine.sin().sum()) / 2

    def whole(x):
        a, b = first(x[:3]), first(x[4:])
        c, d = (a, b) if wanted else (a.detach(), b.detach())
        return drawn(a, d) + drawn(b, c)

    there, _, _ = recorded(whole, torch.cat([X, own[1]]))
    held = []
    for rank in range(2):
        with Computations(lambda: ((), 0)) as computations:
            mine = first(own[rank][:3].clone().requires_grad_())
            got = torch.zeros_like(mine)  # what is received is of its shape
            with torch._C.DisableTorchFunction():
                with torch.no_grad():
                    got = torch.empty_like(got).copy_(first(own[1 - rank][:3]))
                got = exchanged(got)
            drawn(mine, got, minus, weight if rank else 1.0).backward()
        held.append(computations.computed())
    return lines(held, there)[1]


def always(_):
    return True


def test_what_is_received_without_a_graph_gets_no_gradient_back():
    found = list(nothing_goes_back(neighbours(lambda t: t), 0, lambda c: True))
    assert [(one.mine.function, one.at, one.sender[0]) for one in found] == [("sub", (1,), 1)]
    (said,) = in_words(found)
    assert "autograd knows nothing of the second argument of " in said
    assert "on rank 0, whose numbers rank 1 made at " in said
    assert not list(nothing_goes_back(neighbours(lambda t: t), 0, lambda c: False))
    # It is detached there, too, or sent back by a Function: another weight is the mistake.
    assert not list(nothing_goes_back(neighbours(lambda t: t, wanted=False, weight=3.0), 0, always))
    sent = neighbours(lambda t: t, minus=by_a_function, weight=3.0)
    assert not list(nothing_goes_back(sent, 0, always))
    # A leaf has a gradient, which may be sent back; other numbers are nobody's.
    leaf = neighbours(lambda t: t.requires_grad_())
    assert not list(nothing_goes_back(leaf, 0, lambda c: True))
    assert not list(nothing_goes_back(neighbours(lambda t: t + 1), 0, lambda c: True))


@pytest.mark.parametrize("weight", [1.0, 0.7])
def test_a_product_with_ones_is_no_gradient_that_was_kept(weight):
    """What equals data that went into it is not what the single process detached."""

    def mine(x, data):
        return (x - x.detach() + weight).clone() * data

    data = X.cos()
    own, _, _ = recorded(lambda x: mine(x, data), X)
    there, _, _ = recorded(lambda x: (x * 3).sin() * data * (data * weight), X)
    kept = [one.mine.part for one in lines([own], there)[1].kept(0, lambda _: True)]
    assert any("* data" in part for part in kept) == (weight != 1.0)


def given(rank, module, backward, call):
    return SimpleNamespace(rank=rank, backward=backward, axis="tp", call=call)


@pytest.mark.parametrize("state", ["part", "right"])
def test_a_backward_that_starts_from_a_part_is_said(state):
    """The stage's output is that of its last block: autograd is handed the gradient of both."""
    block, whole = (SimpleNamespace(module=m, number=0) for m in ("block", ""))
    line, made = ("/a/run.py:7", "out.backward(grad)"), ("/a/run.py:9", "grad = recv()")
    trace = SimpleNamespace(
        calls=(block, whole), outputs=(X, X.clone()),
        started=(SimpleNamespace(call=1, line=line, made=made),),
    )  # fmt: skip
    look = SimpleNamespace(
        seen={"block": [given(0, "block", state, block)], "": [given(0, "", "untold", whole)]},
        paths=SimpleNamespace(all_above=lambda m: {"block", ""}),
    )
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: trace}))
    found = SimpleNamespace(wrong="block.up", ranks=(0,))
    text = handed_in_parts(case, look, found)
    if state == "right":
        assert text == ""
        return
    # What ends with a sum on the way back is right to be handed parts.
    look.seen[""] = [given(0, "", "right", whole)]
    assert handed_in_parts(case, look, found) == ""
    assert text.startswith("what run.py:7 `out.backward(grad)` hands to autograd as the gradient")
    assert "of what block gives, made at run.py:9 `grad = recv()`, is a part on each rank" in text
    assert "summed over tp" in text


@pytest.mark.parametrize(
    ("here", "there", "only"),
    [("Identity", "Mlp", True), ("Identity", "Identity", False), ("Mlp", "Mlp", False)],
)
def test_what_stands_in_the_place_of_other_stages_layers_is_not_compared(here, there, only):
    trace, single = (
        SimpleNamespace(
            classes={"block": name, "first": "Linear", "block.in": "Linear", "": "Model"},
            calls=[SimpleNamespace(module=m) for m in ("first", "block.in", "block", "")],
        )
        for name in (here, there)
    )
    single.calls = [SimpleNamespace(module=m) for m in ("first", "block.in", "block", "last", "")]
    assert _only_stands_there("block", trace, single) == only
    assert not _only_stands_there("other", trace, single)
    # Amid what the rank has, something puts it there.
    trace.classes["last"] = "Linear"
    trace.calls.append(SimpleNamespace(module="last"))
    assert not _only_stands_there("block", trace, single)


class Drops(Function):
    """Gives its second tensor nothing."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Weighs(Drops):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(-1, keepdim=True)


def weighed(function, *, leaf=False, detached=False):
    """x times a weight that lines make of it."""

    def run(x, w):
        weight = w if leaf else (x @ W[:, :1]).sigmoid()
        return function.apply(x.sin(), weight.detach() if detached else weight)

    return recorded(run, X, X[:, :1])[0]


@pytest.mark.parametrize(
    ("function", "how", "told"),
    [
        (Drops, {}, True),
        (Weighs, {}, False),
        (Drops, {"leaf": True}, False),  # whose gradient it may add up itself
        (Drops, {"detached": True}, False),  # which autograd asks for none
    ],
)
def test_a_function_that_gives_a_tensor_no_gradient_is_seen(function, how, told):
    own, there = weighed(function, **how), weighed(Weighs)
    found = give_nothing(lines([own, own], there)[1])
    assert bool(found) == told
    if told:
        (one,) = found.values()
        assert (one.call.function, one.at, one.ranks) == ("Drops", 1, (0, 1))
    assert not give_nothing(lines([own], own)[1])  # as the single process has it


def halves(function, there=None):
    """Two ranks with half of the columns each, whose sums over them are parts."""
    single, _, _ = recorded(lambda x: (there or function)((x.sin() * 2).sum(-1)), X)
    both = [recorded(lambda x: function((x.sin() * 2).sum(-1)), X[:, own])[0]
            for own in (slice(0, 2), slice(2, 5))]  # fmt: skip
    return lines(both, single, [("tp", [(0, 1)])])[1]


@pytest.mark.parametrize(
    ("function", "told"),
    [(lambda t: t / t.flip(0), True), (lambda t: t - t.flip(0), False), (torch.exp, True)],
)
def test_what_divides_parts_is_wrong_and_what_adds_them_is_not(function, told):
    both = halves(function)
    found = [one for one in both.first_forward(0, lambda _: True) if one.parts]
    assert any(only_of_parts(both, one) for one in found) == told


@pytest.mark.parametrize(("function", "told"), [(torch.argmin, True), (torch.exp, False)])
def test_what_picks_by_a_part_is_told(function, told):
    both = halves(lambda t: t * function(t.detach()))
    found = [*picks_by_parts(both, 0, lambda _: True)]
    assert [one.mine.function for one in found] == ["argmin"] * told
    assert not [*picks_by_parts(both, 0, lambda _: False)]
    for one in found:
        (words,) = in_words([one])
        assert words.endswith("on rank 0: each of them picks by its own part")
        assert "picks by what is right only as a sum over ranks" in words


def from_line(*numbers):
    return SimpleNamespace(lines=tuple((f"/a/b.py:{n}", f"code {n}") for n in numbers))


@pytest.mark.parametrize(
    ("odd", "others", "said"),
    [
        ([(7, 1), (7, 1)], [(5, 1), (6, 1)], "come from b.py:7 `code 7`, and no others do"),
        ([(7, 1)], [(5, 1), (7, 1)], "come from b.py:7 `code 7`, and so does 1 of the 2 others"),
        ([(7, 1)], [(7, 1), (7, 1), (5, 1)], None),  # most of the others do, too
        ([(7, 1), (6, 1)], [(5, 1)], None),
        ([(7, 1)], [], None),
    ],
)
def test_calls_of_another_factor_are_told_by_the_line_that_they_come_from(odd, others, said):
    stack = SimpleNamespace(stack=lambda call: from_line(*call))
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: stack}))
    calls = [[SimpleNamespace(rank=0, call=numbers) for numbers in own] for own in (odd, others)]
    assert odd_calls_come_from(case, *calls) == ([said] if said else [])


def test_the_way_ends_at_a_part_of_what_is_right():
    part = (X[:, :2].sin() * 2).sum(-1)
    both = halves(torch.exp)
    back = RunBetween(both)
    found = back.back_from(0, back.number_of(0, part.exp(), 0))
    assert [(r.made.function, r.first) for r in found] == [("exp", True)]


def test_what_this_rank_has_made_too_was_not_seen_to_be_sent():
    def squared(x):
        return first(x).square()

    def both(y):
        return (y * 2).exp() + 0 * squared(X)

    one, _, sent = recorded(squared, X)
    two, _, _ = recorded(both, sent)
    there, _, _ = recorded(lambda x: second(first(x)), X)
    assert {rank for rank, _, _ in ways([one, two], there, (sent * 2).exp())} == {1}


class AddUp(Function):
    """As an all-reduce of two ranks that have the same."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_terms_that_are_there_as_they_are_are_told_where_their_sum_is_not():
    ranks = [recorded(lambda x: AddUp.apply(x.sin() * 3).cos(), X)[0] for _ in range(2)]
    there, _, _ = recorded(lambda x: (x.sin() * 3).cos(), X)
    found = ways(ranks, there, (X.sin() * 6).cos(), rank=0)
    assert {(0, "x.sin() * 3"), (1, "x.sin() * 3")} <= {(r, part) for r, part, _ in found}


def test_the_way_goes_on_at_what_was_written_into():
    def filled(x):
        buffer = (x.detach() * 7).cos()
        buffer[:1] = 0.5
        return buffer.exp() + x * 0

    one, _, _ = recorded(filled, X)
    there, _, _ = recorded(second, X)
    value = (X * 7).cos()
    value[:1] = 0.5
    back = RunBetween(lines([one], there)[1])
    runs = back.back_from(0, back.number_of(0, value.exp(), 0))
    codes = [run.made.code for run in runs]
    assert "buffer[:1] = 0.5" in codes
    assert any("(x.detach() * 7).cos()" in code for code in codes)


def call_with(*words):
    return SimpleNamespace(site="a", function="f", takes=(0, *words))


@pytest.mark.parametrize(
    ("mine", "there", "told"),
    [
        (("n=10",), [("n=20",)], ("n=10", "n=20")),
        (("n=10",), [("n=20",), ("n=30",)], None),  # there is no one other
        (("n=10",), [("n=10",)], None),
        (("bias=None",), [(4,)], None),  # a tensor there
        (("n=10",), [("m=20",)], None),
        (("device(type='cuda', index=1)",), [("device(type='cuda', index=0)",)], None),
    ],
)
def test_another_option_of_the_same_call_is_told_by_its_name(mine, there, told):
    back = RunBetween.__new__(RunBetween)
    single = SimpleNamespace(computations=[call_with(*words) for words in there])
    back._lines = SimpleNamespace(single=single)
    assert back._other_options(call_with(*mine)) == told


def test_what_another_rank_has_as_well_gets_a_share_of_the_gradient():
    there, _, _ = recorded(lambda x: second(Scale.apply(first(x), 0.5)), X)
    with Computations(lambda: ((), 0)) as one:
        sent = Scale.apply(first(X.clone().requires_grad_()), 0.5)
    ranks = [one.computed()]
    for _ in range(2):
        with Computations(lambda: ((), 0)) as other:
            leaf = sent.detach().clone().requires_grad_()
            second(Scale.apply(leaf, 0.25)).sum().backward()
        ranks.append(other.computed())
    assert list(sent_back(lines(ranks[:2], there)[1], 1, [0]))
    assert not list(sent_back(lines(ranks, there)[1], 1, [0]))


def test_a_part_times_a_number_is_linear():
    both = halves(lambda t: t * 3.7, there=lambda t: t.cos())
    (one,) = [o for o in both.first_forward(0, lambda _: True) if o.parts]
    assert one.mine.function == "mul"
    assert not only_of_parts(both, one)


def test_a_pick_that_nothing_with_a_gradient_is_made_of_does_not_count():
    both = halves(lambda t: (t.detach().argmin(), t * 2)[1])
    assert not [*picks_by_parts(both, 0, lambda _: True)]


class Sometimes(Weighs):
    """Gives its second tensor nothing where the first is negative."""

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, None if bool((x < 0).all()) else (grad * x).sum(-1, keepdim=True)


def test_a_function_that_gives_something_in_one_call_is_not_accused():
    def twice(x, function):
        weight = (x @ W[:, :1]).sigmoid()
        return function.apply(x.square(), weight) + function.apply(-x.exp(), weight)

    own, there = (recorded(twice, X, function)[0] for function in (Sometimes, Weighs))
    both = lines([own], there)[1]
    assert not give_nothing(both)
    backs = [replace(b, inner=(*b.inner, None)) for b in weighed(Drops).backs]
    odd = replace(weighed(Drops), backs=tuple(backs))  # of a list, flattened: which is which?
    assert not give_nothing(lines([odd], weighed(Weighs))[1])


def chain(x, twice):
    y = first(x)
    s = Scale.apply(y, 0.5)
    if twice:
        return second(Scale.apply(s, 0.5)).sum(-1) + s.sin().sum(-1)
    return second(s).sum(-1) + y.sin().sum(-1)


def test_a_gradient_is_held_against_that_of_its_own_line():
    """What is scaled has the same numbers, and here the gradient that belongs before it."""
    own, there = (recorded(chain, X, twice)[0] for twice in (True, False))
    both = lines([own], there)[1]
    scaled = next(c for c in own.computations if c.part == "Scale.apply(y, 0.5)")
    assert both.states.backward(0, scaled.gives[0]) == "wrong"


class StraightThrough(Function):
    @staticmethod
    def forward(ctx, x, q):
        return q.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_function_that_hands_on_data_with_a_gradient_is_told_as_kept():
    own, _, _ = recorded(lambda x: StraightThrough.apply(x.sin(), x.detach().cos()).exp(), X)
    there, _, _ = recorded(lambda x: x.detach().cos().exp() + x, X)
    kept = [o.mine.function for o in lines([own], there)[1].kept(0, lambda _: True)]
    assert kept[0] == "StraightThrough"


@pytest.mark.parametrize(("factor", "told"), [(0.5, True), (None, False)])
def test_where_calls_have_several_factors_nothing_is_said_of_all(monkeypatch, factor, told):
    monkeypatch.setattr(weights, "usual_factor", lambda shares: 1.0)
    monkeypatch.setattr(weights, "odd_calls_come_from", lambda case, odd, others: ["come from x"])
    shares = [SimpleNamespace(rank=0, number=n, factor=f) for n, f in enumerate((1.0, factor))]
    look = SimpleNamespace(seen={"m": []})
    said = ["all calls with another factor than 1 come from x"]
    assert weights._whence("case", look, "m", shares) == (said if told else [])
