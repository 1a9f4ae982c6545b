"""Functions that communicate, run again by all their ranks: ranks are threads here, that exchange
what processes would send."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local

import pytest
import torch
from sumgrad.diagnose.modules.autograd.adjoints import as_derivatives
from sumgrad.record.adjoint import read_adjoints, write_adjoints
from sumgrad.record.computed import Computation
from sumgrad.subjects.program.functions import adjoints
from sumgrad.subjects.program.functions.adjoints import Adjoints
from sumgrad.subjects.program.functions.applied import Applied
from sumgrad.subjects.program.functions.meetings import Meetings, shared_calls
from torch.autograd import Function

RANKS = 3
HERE = local()


class World:
    """Threads that give each other what they have, in step."""

    def __init__(self, size=RANKS):
        self.size, self.held = size, [None] * size
        self.barrier = Barrier(size, timeout=20)

    def exchange(self, own, place=None):
        """place: of this thread, where it is not its rank."""
        self.held[HERE.rank if place is None else place] = own
        self.barrier.wait()
        everyone = list(self.held)
        self.barrier.wait()
        return everyone

    def run(self, function):
        def one(rank):
            HERE.rank, HERE.world = rank, self
            return function(rank)

        with ThreadPoolExecutor(self.size) as threads:
            return [f.result() for f in [threads.submit(one, r) for r in range(self.size)]]


def everywhere(value):
    """The sum over all ranks."""
    return sum(HERE.world.exchange(value))


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Summed(Function):
    @staticmethod
    def forward(ctx, x):
        return everywhere(x)

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError


class Gram(Function):
    @staticmethod
    def forward(ctx, x, number):
        return everywhere(x.T @ x)


class Copied(Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


class Tossed(Function):
    @staticmethod
    def forward(ctx, x):
        return everywhere(x * torch.rand(()))


class Bent(Function):
    @staticmethod
    def forward(ctx, x):
        return everywhere(x.abs())


class Weighed(Function):
    @staticmethod
    def forward(ctx, x, weight):
        return everywhere(x * weight)


def applied(cls, given, gave, outer, inner, *, leaves=None, number=0):
    made = Computation(function=cls.__name__, line="/x/a.py:3", code="y = f(x)", takes=(),
                       made_at=(), written="/x/a.py:9")  # fmt: skip
    return Applied(
        cls=cls, made=made, computation=0, number=number, given=given, gave=gave,
        leaves=leaves or (False,) * len(given), operations=(4, 5), came=(outer, inner),
    )  # fmt: skip


EVENTS = [{"n": 4, "op": "allreduce", "group": "0-2"}, {"done": 4}]
X = [random(4, 2, seed=r).requires_grad_() for r in range(RANKS)]
OUTER = [random(4, 2, seed=10 + r) for r in range(RANKS)]
TOTAL = sum(OUTER)


def told(call, *, events=EVENTS, world=None):
    """call: of a rank, the calls that it made."""
    world = world or World()
    found = world.run(
        lambda rank: [*Adjoints(call(rank), events, rank, HERE.world.exchange).found()]
    )
    for rank, own in enumerate(found):
        assert all(one.holders[0] == rank for one in own)
    return [one for own in found for one in own]


def summed(inner, outer=OUTER, x=X, cls=Summed, **more):
    def call(rank):
        with torch.no_grad():
            gave = cls.forward(None, x[rank])
        return [applied(cls, (x[rank],), (gave,), (outer[rank],), (inner(rank),), **more)]

    return call


def test_the_sum_of_what_all_results_were_given_is_the_adjoint_of_a_sum():
    (one,) = told(summed(lambda rank: TOTAL))
    assert (one.function, one.argument, one.ranks, one.holders) == ("Summed", "x", (0, 1, 2),
                                                                    (0, 1, 2))  # fmt: skip
    ((rank, d),) = as_derivatives([one])
    assert (rank, d.agrees, d.off, d.shares, d.together) == (0, True, None, (), True)
    assert (d.line, d.call, d.written, d.leaf) == (("/x/a.py:3", "y = f(x)"), 0, "/x/a.py:9", False)


def test_what_counts_the_own_result_alone_is_none_and_each_ranks_part_is_told():
    found = told(summed(lambda rank: OUTER[rank]))
    assert [one.holders for one in found] == [(0,), (1,), (2,)]
    for rank, d in as_derivatives(found):
        assert not d.agrees
        assert dict(d.shares) == pytest.approx({r: float(r == rank) for r in range(3)}, abs=1e-6)


def test_where_ranks_compute_the_same_one_of_them_may_count():
    same = [TOTAL] * RANKS
    found = told(summed(lambda rank: TOTAL, outer=same))  # a third of the derivative
    assert len(found) == 1
    assert [*as_derivatives(found)] == []
    ((_, d),) = as_derivatives(told(summed(lambda rank: TOTAL / 2, outer=same)))  # a sixth: none is
    assert d.off.factors == pytest.approx((1 / 6,), rel=1e-5)
    assert not d.agrees


def test_what_ranks_hold_alike_is_moved_alike():
    copied = summed(lambda rank: TOTAL, x=[X[0]] * RANKS, cls=Copied)
    found = told(copied)
    whole, given = (sum(map(sum, side)) for side in (found[0].slopes, found[0].given))
    assert given == pytest.approx(3 * whole, rel=1e-5)
    assert [*as_derivatives(found)] == []
    found = told(summed(lambda rank: OUTER[rank], x=[X[0]] * RANKS, cls=Copied))
    assert next(as_derivatives(found))[1].agrees


def test_a_forward_that_is_not_linear_and_a_factor_that_no_number_of_ranks_explains():
    outer = [random(2, 2, seed=20 + r) for r in range(RANKS)]
    outer = [g + g.T for g in outer]

    def call(scale):
        def of(rank):
            with torch.no_grad():
                gave = Gram.forward(None, X[rank], 7)
            inner = scale * X[rank].detach() @ (sum(outer) + sum(outer).T)
            return [applied(Gram, (X[rank], 7), (gave,), (outer[rank],), (inner, None))]

        return of

    ((_, d),) = as_derivatives(told(call(1.0)))
    assert d.agrees
    ((_, d),) = as_derivatives(told(call(0.5)))
    assert d.off.factors == pytest.approx((0.5,), rel=1e-5)


def test_the_argument_that_is_wrong_is_told_from_the_one_that_is_right():
    weight = random(2, seed=30).requires_grad_()

    def call(rank, inner_of_weight):
        with torch.no_grad():
            gave = Weighed.forward(None, X[rank], weight)
        x = X[rank].detach()
        inner = (TOTAL * weight.detach(), inner_of_weight(TOTAL * x))
        return [applied(Weighed, (X[rank], weight), (gave,), (OUTER[rank],), inner)]

    ((_, d),) = as_derivatives(told(lambda rank: call(rank, lambda g: g.sum(0))))
    assert (d.agrees, d.argument) == (True, "x, weight")
    found = told(lambda rank: call(rank, lambda g: g[:2].sum(0)))
    by_name = {}
    for _, d in as_derivatives(found):
        by_name.setdefault(d.argument, []).append(d.agrees)
    assert by_name == {"x": [True] * 3, "weight": [False]}


def test_what_gives_nothing_gives_zero_but_for_a_leaf_that_it_may_fill_itself():
    found = told(summed(lambda rank: None))
    assert [d.agrees for _, d in as_derivatives(found)] == [False] * 3
    assert told(summed(lambda rank: None, leaves=(True,))) == []


def test_what_is_not_the_same_again_or_has_a_kink_is_not_told():
    assert told(summed(lambda rank: TOTAL, cls=Tossed)) == []
    bent = [x.detach().clone() for x in X]
    bent[1][0, 0] = 0
    bent = [x.requires_grad_() for x in bent]
    signs = [x.detach().sign() for x in bent]
    assert told(summed(lambda rank: TOTAL * signs[rank], x=bent, cls=Bent)) == []


class WithTotal(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, everywhere(x.sum(0))


@pytest.mark.parametrize("times", [1, RANKS])
def test_a_result_that_all_ranks_have_counts_once_or_for_each_beside_one_of_their_own(times):
    statistic = random(2, seed=40)

    def call(rank, off=0.0):
        with torch.no_grad():
            gave = WithTotal.forward(None, X[rank])
        inner = 2 * OUTER[rank] + times * statistic + off * X[rank].detach()
        return [applied(WithTotal, (X[rank],), gave, (OUTER[rank], statistic), (inner,))]

    ((_, d),) = as_derivatives(told(call))
    assert d.agrees
    assert not any(d.agrees for _, d in as_derivatives(told(lambda rank: call(rank, 0.1))))


class Rounded(Function):
    @staticmethod
    def forward(ctx, x):
        return everywhere((x * 8).round() / 8)


def test_what_does_not_move_is_not_told():
    assert told(summed(lambda rank: TOTAL, cls=Rounded)) == []


def test_what_ranks_hold_alike_in_part_or_nearly_is_not_told():
    token = random(1, 2, seed=41)
    own = [torch.cat([token, random(3, 2, seed=r)]).requires_grad_() for r in range(RANKS)]
    assert told(summed(lambda rank: OUTER[rank], x=own, cls=Copied)) == []
    drifted = [(X[0].detach() * (1 + 1e-8 * r)).requires_grad_() for r in range(RANKS)]
    assert told(summed(lambda rank: TOTAL, x=drifted, cls=Copied)) == []
    rounded = [(X[0].detach() * (1 + 1e-13 * r)).requires_grad_() for r in range(RANKS)]
    assert len(told(summed(lambda rank: TOTAL, x=rounded, cls=Copied))) == 1


def test_what_one_rank_alone_trains_is_still_one_thing():
    x = [X[0].detach().clone().requires_grad_(rank == 0) for rank in range(RANKS)]
    (one,) = told(summed(lambda rank: TOTAL if rank == 0 else None, x=x, cls=Copied))
    assert one.holders == (0,)
    assert next(as_derivatives([one]))[1].agrees


def test_what_some_of_the_ranks_share_may_count_as_often():
    shared = [X[0], X[0], X[2]]
    inner = [OUTER[0] + OUTER[1], OUTER[0] + OUTER[1], OUTER[2]]
    found = told(summed(lambda rank: inner[rank], x=shared, cls=Copied))
    assert [d.agrees for _, d in as_derivatives(found)] == [True]  # of the third; not of the others
    assert [one.holders for one in found] == [(0, 1), (2,)]
    assert [(one.place, one.at) for one in found] == [(0, 0), (0, 0)]


def test_zeros_for_a_leaf_may_stand_for_what_is_added_up_elsewhere():
    weight = random(2, seed=30).requires_grad_()

    def call(leaf):
        def of(rank):
            with torch.no_grad():
                gave = Weighed.forward(None, X[rank], weight)
            inner = TOTAL * weight.detach(), torch.zeros(2).double()
            return [applied(Weighed, (X[rank], weight), (gave,), (OUTER[rank],), inner,
                            leaves=(False, leaf))]  # fmt: skip

        return of

    of_weight = {
        leaf: [d for _, d in as_derivatives(told(call(leaf))) if d.argument == "weight"]
        for leaf in (True, False)
    }
    assert of_weight[True] == []
    assert [d.off.factors for d in of_weight[False]] == [(0.0,)]


def test_a_call_whose_results_are_no_tensors_alone_is_left_out():
    def two(rank):
        with torch.no_grad():
            gave = Bent.forward(None, X[rank])
        odd = applied(Bent, (X[rank],), (gave,), (OUTER[rank], None), (TOTAL,))
        return [odd, *summed(lambda rank: TOTAL)(rank)]

    assert [one.function for one in told(two)] == ["Summed"]


class Raises(Function):
    @staticmethod
    def forward(ctx, x):
        raise ValueError


def test_a_forward_that_raises_on_all_ranks_tells_nothing_and_the_next_one_does():
    def two(rank):
        odd = applied(Raises, (X[rank],), (OUTER[0],), (OUTER[rank],), (TOTAL,))
        return [odd, *summed(lambda rank: TOTAL)(rank)]

    assert [one.function for one in told(two)] == ["Summed"]


def test_groups_of_ranks_are_told_each_by_itself():
    world, groups = World(6), {(0, 1): World(2), (2, 3, 4, 5): World(4)}

    class OfGroup(Function):
        @staticmethod
        def forward(ctx, x):
            group = next(g for g in groups if HERE.rank in g)
            return sum(groups[group].exchange(x, group.index(HERE.rank)))

    x = [random(4, 2, seed=r).requires_grad_() for r in range(6)]
    outer = [random(4, 2, seed=50 + (r > 1)) for r in range(6)]

    def own(rank):
        group = next(g for g in groups if rank in g)
        with torch.no_grad():
            gave = OfGroup.forward(None, x[rank])
        # The ranks of a group compute the same, and count once; but one group is wrong.
        inner = outer[rank] if rank < 2 else outer[rank] * x[rank].detach()
        one = applied(OfGroup, (x[rank],), (gave,), (outer[rank],), (inner,))
        events = [{"n": 4, "op": "allreduce", "group": list(group)}]
        return [*Adjoints([one], events, rank, HERE.world.exchange).found()]

    found = world.run(own)
    assert [len(one) for one in found] == [1, 0, 1, 1, 1, 1]
    assert [*as_derivatives(found[0])] == []
    wrong = [one for own in found[2:] for one in own]
    assert [d.agrees for _, d in as_derivatives(wrong)] == [False] * 4
    assert {one.ranks for one in wrong} == {(2, 3, 4, 5)}


def met(rank, *events, back=()):
    """Of one call of a rank that issues these in its forward, and those in its backward."""
    every = [{"n": n, **event} for n, event in enumerate((*events, *back))]
    one = applied(Summed, (X[0],), (X[0],), (X[0],), (X[0],))
    one.operations, one.began, one.ended = (0, len(events)), len(events), len(every)
    return Meetings([one], every, rank).met


def sent(op, peer):
    return {"op": op, "peer": peer, "group": [0, 1, 2]}


ALL = {"op": "allreduce", "group": [0, 1, 2]}


@pytest.mark.parametrize(
    ("of_ranks", "groups"),
    [
        ([(ALL,), (ALL,), (ALL,)], [(0, 1, 2)]),
        ([(ALL,), (ALL,), (ALL, ALL)], []),
        ([(ALL,), (ALL,)], []),
        ([(sent("send", 1),), (sent("recv", 0),), ()], [(0, 1)]),
        ([(sent("send", 1),), (), ()], []),
        ([(sent("send", 1),), (sent("recv", 0), sent("send", 2)), ()], []),  # a chain that goes on
        ([(sent("send", 1),), (sent("recv", 0), sent("send", 2)), (sent("recv", 1),)],
         [(0, 1, 2)]),
        ([(sent("send", 1), sent("recv", 2)), (sent("recv", 0), sent("send", 2)),
          (sent("recv", 1), sent("send", 0))], [(0, 1, 2)]),
    ],
)  # fmt: skip
def test_calls_are_run_again_where_their_operations_meet(of_ranks, groups):
    found = shared_calls([met(rank, *events) for rank, events in enumerate(of_ranks)])
    assert [own for _, own in found] == ([groups] if groups else [])


def test_ranks_that_meet_in_the_backward_alone_are_a_group():
    found = shared_calls([met(rank, back=(ALL,)) for rank in range(3)])
    assert [own for _, own in found] == [[(0, 1, 2)]]


def test_numbers_that_are_not_finite_tell_nothing():
    outer = [OUTER[0], OUTER[1] * torch.inf, OUTER[2]]
    assert told(summed(lambda rank: TOTAL, outer=outer)) == []
    assert told(summed(lambda rank: TOTAL * torch.nan)) == []


def test_ranks_that_do_not_call_it_go_along_and_those_that_it_needs_have_to():
    def summed_on_two(rank):
        x = X[rank]
        inner = OUTER[0] + OUTER[1]
        with torch.no_grad():
            everyone = HERE.world.exchange(x.detach() if rank < 2 else None)
        gave = everyone[0] + everyone[1]
        return [applied(OfTwo, (x,), (gave,), (OUTER[rank],), (inner,))] if rank < 2 else []

    two = World(2)

    class OfTwo(Function):
        @staticmethod
        def forward(ctx, x):
            return sum(two.exchange(x))

    events = [{"n": 4, "op": "allreduce", "group": [0, 1]}]
    (one,) = told(summed_on_two, events=events)
    assert one.ranks == (0, 1)
    assert next(as_derivatives([one]))[1].agrees
    assert told(summed_on_two) == []  # by its ledger it communicates with rank 2


def test_what_communicates_in_its_backward_alone_counts_and_what_does_not_does_not():
    def call(rank, began, ended):
        one = applied(Copied, (X[rank],), (X[rank].detach(),), (OUTER[rank],), (OUTER[rank],))
        one.operations, one.began, one.ended = (2, 2), began, ended
        return [one]

    assert len(told(lambda rank: call(rank, 4, 5))) == 1
    assert told(lambda rank: call(rank, 4, 4)) == []


def test_some_calls_of_a_line_are_told_and_none_when_the_time_is_over(monkeypatch):
    def several(rank):
        with torch.no_grad():
            gave = Summed.forward(None, X[rank])
        return [
            applied(Summed, (X[rank],), (gave,), (OUTER[rank],), (TOTAL,), number=n)
            for n in range(5)
        ]

    assert [one.call for one in told(several)] == [0, 1]
    monkeypatch.setattr(adjoints, "MOST_SECONDS", -1.0)
    assert told(several) == []


def test_shares_need_as_many_numbers_as_ranks_that_differ():
    same = [OUTER[0]] * RANKS  # the ranks' parts of the derivative are one and the same

    found = told(summed(lambda rank: OUTER[0], outer=same))
    assert [*as_derivatives(found)] == []
    found = told(summed(lambda rank: OUTER[0] * (1 + torch.arange(2)), outer=same))
    assert [(d.agrees, d.shares) for _, d in as_derivatives(found)] == [(False, ())] * 3


def test_what_each_rank_told_is_read_back_together(tmp_path):
    found = told(summed(lambda rank: OUTER[rank]))
    (tmp_path / "ranks").mkdir()
    write_adjoints(tmp_path, 0, found[:1])
    write_adjoints(tmp_path, 2, found[1:])
    assert read_adjoints(tmp_path, range(3)) == tuple(found)
    assert read_adjoints(tmp_path / "none", range(3)) == ()
    (tmp_path / "ranks" / "rank_00002_adjoints.json").write_text("[{")
    assert read_adjoints(tmp_path, range(3)) == tuple(found[:1])
