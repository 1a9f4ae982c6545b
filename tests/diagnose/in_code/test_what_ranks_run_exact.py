"""Lines of right and wrong ranks; where a tensor was made on another rank; what is not finite."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.backwards.not_finite import with_what_is_not_finite
from sumgrad.diagnose.explainers.by_modules.in_code import brought
from sumgrad.diagnose.explainers.by_modules.in_code.brought import (
    brought_into,
    made_on_another_rank,
    right_as_a_sum,
)
from sumgrad.diagnose.explainers.by_modules.in_code.lines_of_ranks import lines_of_right_ranks
from sumgrad.diagnose.modules.how_wrong.not_finite import not_finite
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.trace import INTO


def line(number, *, takes=(), gives=(), function="mul", path="/x/a.py"):
    return Computation(
        function=function, line=f"{path}:{number}", code=f"line({number})", takes=takes,
        gives=gives, made_at=(), site=f"{path}:{number}",
    )  # fmt: skip


def trace(*computations, values=(), calls=(), gradients=(), of_values=None):
    return SimpleNamespace(
        computed=Computed(
            computations=computations, values=tuple(values), gradients=(of_values or {},)
        ),
        calls=[SimpleNamespace(module=m, number=n) for m, n in calls],
        gradients=list(gradients),
        exchanges=(),
    )


def case(ranks, single):
    return SimpleNamespace(traces=SimpleNamespace(ranks=dict(enumerate(ranks)), single=single))


def test_lines_that_right_ranks_alone_run_and_wrong_ones():
    right, wrong = trace(line(1), line(2)), trace(line(1), line(3))
    at = case([wrong, right, right], trace(line(1), line(2)))
    assert lines_of_right_ranks(at, (1, 2), (0,)) == [
        "all of rank 1-2 and not rank 0 run a.py:2 `line(2)`",
        "rank 0 and not rank 1-2 runs a.py:3 `line(3)`",
    ]
    assert not lines_of_right_ranks(at, (), (0,))
    assert not lines_of_right_ranks(SimpleNamespace(traces=None), (1,), (0,))


def test_lines_of_some_right_ranks_of_another_way_and_of_libraries_are_none():
    single = trace(line(1))
    some = case([trace(), trace(line(1)), trace()], single)
    assert not lines_of_right_ranks(some, (1, 2), (0,))
    too = case([trace(), trace(line(1)), trace(line(1))], trace())
    assert not lines_of_right_ranks(too, (1, 2), (0,))  # the single process does not run it
    many = [line(n) for n in range(4)]
    assert not lines_of_right_ranks(case([trace(), trace(*many)], trace(*many)), (1,), (0,))
    either = replace(line(4), code="x = a.exp() if first else b")  # it runs everywhere
    assert not lines_of_right_ranks(case([trace(), trace(either)], trace(either)), (1,), (0,))
    library = line(1, path="/y/site-packages/a.py")
    assert not lines_of_right_ranks(case([trace(), trace(library)], trace(library)), (1,), (0,))


A, B = torch.arange(4.0), torch.arange(4.0) + 9


def made(ranks, value, rank=0):
    return made_on_another_rank(SimpleNamespace(ranks=dict(enumerate(ranks))), rank, value)


def test_what_came_was_made_by_the_first_line_that_gives_it():
    sender = trace(line(1, gives=(0,)), line(2, gives=(0,)), values=[A.view(2, 2)])
    assert made([trace(), sender], A) == [
        "its numbers on rank 0 come from rank 1 at a.py:1 `line(1)`"
    ]
    assert not made([trace(), sender], A, rank=1)
    assert not made([trace(), sender], A + 1)
    assert not made([trace(), sender], None)
    assert not made([trace(), trace(line(1, gives=(0,)), values=[torch.ones(4)])], torch.ones(4))


def test_a_line_that_gives_it_here_too_has_not_made_it():
    here = trace(line(1, gives=(0,)), values=[A])
    assert not made([here, here], A)


def test_of_what_is_put_together_each_part_is_told():
    both = torch.cat([A, B])
    here = trace(line(5, function="cat", takes=(0, 1), gives=(2,)), values=[A, B, both])
    there = [trace(line(1, gives=(0,)), values=[v]) for v in (A, B)]
    assert made([here, *there], both) == [
        "of its numbers on rank 0 a part comes from rank 1 at a.py:1 `line(1)`",
        "of its numbers on rank 0 a part comes from rank 2 at a.py:1 `line(1)`",
    ]


def put_together(*computations, values):
    """On rank 0, where line 5 puts it together; ranks 1 and 2 have made A and B."""
    senders = [trace(line(1, gives=(0,)), values=[v]) for v in (A, B)]
    here = trace(*computations, values=values)
    traces = SimpleNamespace(ranks=dict(enumerate([here, *senders])))
    return brought_into(traces, 0, ("/x/a.py:5", "line(5)"))


JOIN = line(5, function="cat", takes=(2, 3), gives=(4,))
COMES = "of what is put together there on rank 0 a part comes from rank {} at a.py:1 `line(1)`"


def test_what_a_line_puts_together_came_from_other_ranks_behind_what_only_shapes():
    both = torch.cat([A, B])
    values = [A, B, A.view(2, 2), B.view(2, 2), both]
    shaped = [line(7 + i, function="view", takes=(i,), gives=(i + 2,)) for i in (0, 1)]
    assert put_together(*shaped, JOIN, values=values) == [COMES.format(1), COMES.format(2)]
    assert put_together(shaped[0], JOIN, values=values) == [COMES.format(2), COMES.format(1)]
    of_one = replace(JOIN, takes=(2, "1"))
    assert put_together(*shaped, of_one, values=values) == []


def test_what_a_line_here_computes_came_from_nowhere_but_a_function_may_have_brought_it():
    values = [A, B, A.view(2, 2), B.view(2, 2), torch.cat([A, B])]
    computes = [line(7 + i, takes=(i,), gives=(i + 2,)) for i in (0, 1)]
    assert put_together(*computes, JOIN, values=values) == []
    applied = replace(computes[0], written="/x/a.py:9")
    assert put_together(applied, computes[1], JOIN, values=values) == [COMES.format(1)]


P, Q = (torch.randn(3, 4, generator=torch.Generator().manual_seed(i)).double() for i in (1, 2))


def summed(*parts, wanted, value=None, axes=("tp",)):
    """Each rank of 1 and more sends the half of its part to rank 0."""
    senders = [
        trace(line(1, takes=(0,), gives=(1,), function="chunk"), values=[p, p[:, :2]])
        for p in parts
    ]
    value = parts[0][:, :2] if value is None else value
    groups = [(axis, [tuple(range(1, len(parts) + 1))]) for axis in axes]
    at = SimpleNamespace(traces=SimpleNamespace(ranks=dict(enumerate([trace(), *senders]))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(brought, "axis_groups", lambda case: groups)
        return right_as_a_sum(at, 0, value, wanted, 1e-9)


def test_parts_whose_sum_is_right_before_they_are_sent():
    assert summed(P, Q, wanted=P + Q) == [
        "what a.py:1 `line(1)` takes on rank 1-2 is a part on each, and their sum over tp is "
        "right: look for a sum that is missing before it is sent"
    ]
    assert summed(P, Q, wanted=torch.cat([P + Q, Q])) != []


def test_what_is_right_or_no_part_of_it_is_no_missing_sum():
    assert summed(P, Q, wanted=torch.cat([P, P + Q])) == []  # it is right as it is
    assert summed(P, Q, wanted=P - Q) == []
    assert summed(P, Q, wanted=P + Q, axes=()) == []
    assert summed(P, Q, wanted=P + Q, value=P[:, :2] + 1) == []  # that is not what came


def test_of_several_runs_of_the_line_the_same_one_is_summed():
    def sender(*parts):
        lines = [line(1, takes=(2 * i,), gives=(2 * i + 1,)) for i in range(len(parts))]
        return trace(*lines, values=[t for p in parts for t in (p, p[:, :2])])

    at = SimpleNamespace(
        traces=SimpleNamespace(ranks={0: trace(), 1: sender(Q, P), 2: sender(P, 2 * Q)})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(brought, "axis_groups", lambda case: [("tp", [(1, 2)])])
        assert right_as_a_sum(at, 0, P[:, :2], P + 2 * Q, 1e-9)
        assert not right_as_a_sum(at, 0, P[:, :2], P + Q, 1e-9)


NAN = torch.tensor([1.0, float("nan")])
ONE = torch.ones(2)


def of_rank(*gradients, **more):
    names = ["first", "second", f"{INTO}second"]
    return trace(calls=[(n, 0) for n in names], gradients=[*gradients], **more)


def test_gradients_that_are_not_finite():
    single = of_rank(ONE, ONE, ONE)
    at = SimpleNamespace(
        ranks={0: of_rank(ONE, ONE, None), 2: of_rank(NAN, NAN, NAN)}, single=single
    )
    (one,) = not_finite(at)
    assert (one.rank, one.calls, one.line) == (2, (("second", 0), ("first", 0)), None)
    assert not [*not_finite(SimpleNamespace(ranks=at.ranks, single=of_rank(ONE, NAN, None)))]


def test_the_line_that_makes_them():
    lines = [
        line(1, takes=(0,), gives=(1,)),
        line(2, takes=(1, 0), gives=(2,)),
        line(3, takes=(2,), gives=(3,)),
    ]
    gradients = {0: NAN, 1: NAN, 2: ONE, 3: ONE}
    rank = of_rank(NAN, ONE, None)
    rank.computed = Computed(computations=tuple(lines), gradients=(gradients,))
    at = SimpleNamespace(ranks={0: rank}, single=of_rank(ONE, ONE, ONE))
    (one,) = not_finite(at)
    assert one.line == lines[1]
    rank.computed = Computed(computations=tuple(lines), gradients=({**gradients, 1: ONE},))
    (one,) = not_finite(at)
    assert one.line is None  # 0 is taken twice: which of the two it is is not known


@pytest.mark.parametrize("ranks", [1, 4])
def test_numbers_that_are_none_in_words(ranks):
    held = {r: of_rank(NAN, ONE, None) for r in range(ranks)}
    at = SimpleNamespace(traces=SimpleNamespace(ranks=held, single=of_rank(ONE, ONE, ONE)))
    told = with_what_is_not_finite(at, Diagnosis(cause="c", kind="backward", because=("b",)))
    assert told.because[1] == "b"
    start = "not all numbers are finite in the gradient that reaches first on rank 0 in call 0"
    assert told.because[0].startswith(start)
    assert told.because[0].endswith(
        "; in the single process all are" if ranks == 1 else
        "; and on 1 more ranks; in the single process all are"
    )  # fmt: skip
    right = SimpleNamespace(traces=SimpleNamespace(ranks={}, single=of_rank(ONE, ONE, ONE)))
    assert with_what_is_not_finite(right, told) is told
