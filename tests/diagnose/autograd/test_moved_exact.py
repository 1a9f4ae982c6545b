"""Functions that only move numbers, over ranks too, and what their backwards bring back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.backwards import derivatives as words
from sumgrad.diagnose.modules.autograd import moved
from sumgrad.diagnose.modules.autograd.moved import Element, movers
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.computed import (
    Computation,
    Computed,
    computed_as_json,
    computed_as_tensors,
    computed_from,
    computed_together,
)
from sumgrad.record.derivative import Back
from sumgrad.record.ways import Passed

KEY = ("Halo", "/x/a.py:3")
HALO = Passed(function=KEY[0], written=KEY[1], own=True)


def made(takes, gives, **more):
    return Computation(**{
        "function": KEY[0], "written": KEY[1], "line": "/x/a.py:9", "code": "y = Halo.apply(x)",
        "takes": takes, "gives": gives, "made_at": (("", ""),), **more,
    })  # fmt: skip


def rank_of(*calls, computations=None):
    """calls: what is taken and given, and the gradients that come back and are handed."""
    values = [t for x, y, _, _ in calls for t in (x, y)]
    numbers = [(2 * i, 2 * i + 1) for i in range(len(calls))]
    return SimpleNamespace(computed=Computed(
        computations=computations or tuple(made((x,), (y,)) for x, y in numbers),
        values=tuple(values),
        gradients=({y: g for (_, y), (_, _, _, g) in zip(numbers, calls, strict=True)},),
        backs=tuple(
            Back(computation=i, outer=(g,), inner=(d,)) for i, (_, _, d, g) in enumerate(calls)
        ),
    ))  # fmt: skip


def numbers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def halos(back=lambda d0, d1, g0, g1: (d0, d1), turns=1):
    """Two ranks of three numbers, each with the neighbour's edge beside them; zeros at the ends."""
    ranks = ([], [])
    for turn in range(turns):
        x0, x1 = numbers(3, seed=turn), numbers(3, seed=10 + turn)
        zero = torch.zeros(1, dtype=torch.float64)
        y0, y1 = torch.cat([zero, x0, x1[:1]]), torch.cat([x0[-1:], x1, zero])
        g0, g1 = numbers(5, seed=20 + turn), numbers(5, seed=30 + turn)
        d0, d1 = g0[1:-1].clone(), g1[1:-1].clone()
        d0[-1] += g1[0]
        d1[0] += g0[-1]
        d0, d1 = back(d0, d1, g0, g1)
        ranks[0].append((x0, y0, d0, g0))
        ranks[1].append((x1, y1, d1, g1))
    return {rank: rank_of(*own) for rank, own in enumerate(ranks)}


def at(rank, index, call=0):
    return Element(rank=rank, call=call, index=(index,))


@pytest.mark.parametrize("turns", [1, 3])
def test_what_comes_back_the_way_it_went_is_right(turns):
    one = movers(halos(turns=turns))[KEY]
    assert (one.told, one.off, one.untold) == (6 * turns, 0, 0)
    assert one.is_right
    assert one.lines == (("/x/a.py:9", "y = Halo.apply(x)"),)


def drops_the_halo(d0, d1, g0, g1):
    return d0, torch.cat([d1[:1] - g0[-1:], d1[1:]])


def to_the_other_edge(d0, d1, g0, g1):
    """What belongs to the first number of rank 1 goes to its last."""
    return d0, torch.stack([d1[0] - g0[-1], d1[1], d1[2] + g0[-1]])


def another(d0, d1, g0, g1):
    return torch.stack([g1[1], d0[1], d0[2]]), d1


def twice(d0, d1, g0, g1):
    return 2 * d0, 2 * d1


def strange(d0, d1, g0, g1):
    return torch.stack([d0[0] + 0.3, d0[1], d0[2] * 1.7]), d1


@pytest.mark.parametrize(
    ("back", "off", "told"),
    [
        (drops_the_halo, 1, {"element": at(1, 0), "lacks": (at(0, 4),), "foreign": None}),
        (to_the_other_edge, 2, {"element": at(1, 0), "lacks": (at(0, 4),), "foreign": None}),
        (
            another,
            1,
            {
                "element": at(0, 0),
                "lacks": (at(0, 1),),
                "foreign": at(1, 1),
                "owner": at(1, 0),
                "copies": (at(0, 1),),
            },
        ),
        (twice, 6, {"times": 2.0, "lacks": (), "foreign": None}),
        (strange, 2, {"times": None, "element": at(0, 0), "lacks": (), "foreign": None}),
    ],
)
def test_how_a_gradient_comes_back_otherwise(back, off, told):
    one = movers(halos(back))[KEY]
    assert one.off == off
    assert not one.is_right
    for name, value in told.items():
        assert getattr(one.wrong[0], name) == value, name
    assert not one.wrong[0].replicas


def test_besides_its_own_it_may_get_anothers():
    one = movers(halos(to_the_other_edge))[KEY]
    second = one.wrong[1]
    assert (second.element, second.lacks, second.foreign, second.owner) == (
        at(1, 2), (), at(0, 4), at(1, 0),
    )  # fmt: skip


def gathered(back, *, whole=True):
    """Each rank's two numbers, one after the other on every rank."""
    x = [numbers(2, seed=1), numbers(2, seed=2)]
    y = [torch.cat(x), torch.cat(x) if whole else torch.cat(x[::-1])]
    g = [numbers(4, seed=3), numbers(4, seed=4)]
    d = [back(g, rank) for rank in (0, 1)]
    return {rank: rank_of((x[rank], y[rank], d[rank], g[rank])) for rank in (0, 1)}


def own_slice(g, rank):
    return g[rank][2 * rank : 2 * rank + 2].clone()


def test_of_replicas_a_step_may_count_one():
    (one,) = movers(gathered(own_slice)).values()
    assert one.off == 4
    assert all(w.replicas and w.lacks and w.foreign is None for w in one.wrong)
    (one,) = movers(gathered(lambda g, rank: sum(g)[2 * rank : 2 * rank + 2])).values()
    assert one.is_right
    other = movers(gathered(lambda g, rank: g[0][:2].clone(), whole=False))[KEY]
    assert not any(w.replicas for w in other.wrong)


def test_numbers_that_ranks_share_are_not_told():
    x, g = numbers(3, seed=1), [numbers(3, seed=2), numbers(3, seed=3)]
    same = {r: rank_of((x, x.clone(), g[0] + g[1], g[r])) for r in (0, 1)}  # identity, all-reduce
    (one,) = movers(same).values()
    assert (one.told, one.off, one.untold, one.is_right) == (0, 0, 6, False)
    near = {
        r: rank_of((x * (1 + r * 1e-15), x * (1 + r * 1e-15), g[0] + g[1], g[r])) for r in (0, 1)
    }
    (one,) = movers(near).values()
    assert (one.told, one.off) == (0, 0)
    apart = {r: rank_of((x * (1 + r), x * (1 + r), g[0] + g[1], g[r])) for r in (0, 1)}
    (one,) = movers(apart).values()
    assert (one.told, one.off) == (6, 6)


def test_in_a_ring_each_turn_is_told_by_itself():
    b = [numbers(2, seed=r) for r in (0, 1, 2)]
    calls = {r: [] for r in range(3)}
    for turn in range(2):
        g = [numbers(2, seed=10 + 3 * turn + r) for r in range(3)]
        for r in range(3):
            # What a rank has goes to the next one; its gradient comes back from there, or does not.
            back = g[(r + 1) % 3] if turn == 0 else g[(r - 1) % 3]
            held, came = b[(r - turn) % 3], b[(r - turn - 1) % 3]
            calls[r].append((held, came, back, g[r]))
    (one,) = movers({r: rank_of(*own) for r, own in calls.items()}).values()
    assert (one.told, one.off) == (12, 6)
    assert one.wrong[0].element == at(0, 0, call=1)
    assert one.wrong[0].copies == (at(1, 0, call=1),)
    assert one.wrong[0].foreign == at(2, 0, call=1)


def test_calls_of_ranks_that_do_not_take_turns_are_told_at_once():
    x = [numbers(2, seed=r) for r in range(3)]
    g = [numbers(2, seed=10 + r) for r in range(4)]
    # Rank 0's two stay there and go to rank 1, too, whose two calls are the other way round.
    zero = torch.zeros(2, dtype=torch.float64)
    first = [(x[0], x[0].clone(), g[0] + g[2], g[2]), (x[1], x[1].clone(), g[1] + g[3], g[3])]
    other = [(zero, x[1], zero, g[1]), (zero, x[0], zero, g[0])]
    (one,) = movers({0: rank_of(*first), 1: rank_of(*other)}).values()
    assert (one.told, one.off) == (4, 0)


def test_what_only_sends_gives_nothing_that_could_be_told():
    x, g = numbers(3, seed=1), numbers(3, seed=2)
    zero = torch.zeros(1, dtype=torch.float64)
    (one,) = movers({0: rank_of((x, zero, g, zero))}).values()
    assert (one.told, one.off, one.is_right) == (0, 0, False)


def test_what_no_other_rank_takes_part_in_is_left_to_finite_differences():
    x, g = numbers(3, seed=1), numbers(3, seed=2)
    one = rank_of((x, x.flip(0), g, g))
    assert movers({0: one})
    local = SimpleNamespace(computed=replace(
        one.computed, backs=tuple(replace(b, alone=True) for b in one.computed.backs)
    ))  # fmt: skip
    assert not movers({0: local})
    assert movers({0: local}, alone=True)
    assert movers({0: local, 1: one})


def of_own_scales(scales):
    """Each rank's call is given back so many times what it should be."""
    return halos(lambda d0, d1, g0, g1: (scales[0] * d0, scales[1] * d1))


@pytest.mark.parametrize("ratio", [None, 2.0])
def test_each_calls_own_factor_may_be_meant(ratio):
    one = movers(of_own_scales((2.0, 3.0)))[KEY]
    assert sorted({round(w.times, 9) for w in one.wrong}) == [2.0, 3.0]
    assert words.wrong_functions(case(of_own_scales((2.0, 3.0))), [HALO], ratio) is None
    one = movers(of_own_scales((1.0, 2.0)))[KEY]
    assert {round(w.times, 9) for w in one.wrong} == {2.0}


def test_a_sum_over_ranks_of_what_each_has_beside_its_own_may_be_meant():
    x, g = numbers(3, seed=1), [numbers(3, seed=2), numbers(3, seed=3)]
    ranks = {r: rank_of((x + r, x + r, g[0] + g[1], g[r])) for r in (0, 1)}
    (one,) = movers(ranks).values()
    assert one.off == 6
    found = words.wrong_functions(case(ranks), [HALO], None)
    assert found is None or not found.said


def test_what_computes_or_is_not_known_is_no_mover():
    x, g = numbers(3, seed=1), numbers(3, seed=2)
    right = (x, x.flip(0), g.flip(0), g)
    assert KEY in movers({0: rank_of(right)})
    assert not movers({0: rank_of((x, x * 2, g, g))})
    assert not movers({0: rank_of((x.float(), x.float(), g.float(), g.float()))})
    assert not movers({0: rank_of((x, x.flip(0), g[:2], g))})
    one = rank_of(right)
    assert not movers({0: rank_of(right, computations=(made((0,), (1,), written=""),))})
    large = rank_of(right, computations=(made(("a large tensor, number 0",), (1,)),))
    assert not movers({0: large})
    several = rank_of(right, computations=(made((0, 0), (1,)),))
    assert not movers({0: several})
    # A call whose backward is not known, and whose result had a gradient.
    lost = replace(one.computed, backs=())
    assert not movers({0: one, 1: SimpleNamespace(computed=lost)})
    unused = replace(lost, gradients=({},))
    assert movers({0: one, 1: SimpleNamespace(computed=unused)})


def test_few_numbers_are_looked_at(monkeypatch):
    monkeypatch.setattr(moved, "MOST_NUMBERS", 9)
    assert not movers(halos())
    monkeypatch.setattr(moved, "MOST_NUMBERS", 10)
    assert movers(halos())
    monkeypatch.setattr(moved, "MOST_TOLD", 1)
    one = movers(halos(to_the_other_edge))[KEY]
    assert (one.off, len(one.wrong)) == (2, 1)
    monkeypatch.setattr(moved, "MOST_COPIES", 1)
    (w,) = movers(halos(drops_the_halo))[KEY].wrong
    assert (w.lacks, w.foreign) == ((), None)


def test_a_record_keeps_what_backwards_were_given_and_gave():
    computed = halos()[0].computed
    back = replace(computed.backs[0], outer=(computed.backs[0].outer[0], None))
    computed = replace(computed, backs=(back,))
    held = computed_from(computed_as_json(computed), computed_as_tensors(computed)).backs
    assert len(held) == 1
    assert torch.equal(held[0].outer[0], back.outer[0])
    assert held[0].outer[1] is None
    assert torch.equal(held[0].inner[0], back.inner[0])
    both = computed_together([computed, computed])
    assert [one.computation for one in both.backs] == [0, 1]


def case(ranks, single=None):
    alone = single or SimpleNamespace(computed=Computed())
    return SimpleNamespace(traces=SimpleNamespace(ranks=ranks, single=alone, adjoints=()), known={})


@pytest.mark.parametrize(
    ("back", "ratio", "said"),
    [
        (lambda *given: given[:2], None, None),
        (to_the_other_edge, None, True),
        (to_the_other_edge, 2.0, None),
        (drops_the_halo, None, True),
        (twice, None, None),
        (twice, 2.0, True),
    ],
)
def test_who_is_accused(back, ratio, said):
    found = words.wrong_functions(case(halos(back)), [HALO], ratio)
    assert (found is not None and bool(found.said)) == bool(said)
    assert words.wrong_functions(case(halos(back)), [], ratio) is None
    if said:
        assert found.said == (
            "the backward of Halo (backward at a.py:3) does not take gradients back the way "
            "that its forward takes numbers"
        )


def test_what_is_so_in_the_single_process_too_is_meant():
    x, g = numbers(4, seed=1), numbers(4, seed=2)
    alone = {times: rank_of((x, x.flip(0), times * g.flip(0), g)) for times in (1, 2)}
    assert words.wrong_movers(case(halos(drops_the_halo)))
    assert words.wrong_movers(case(halos(drops_the_halo), single=alone[1]))
    assert not words.wrong_movers(case(halos(drops_the_halo), single=alone[2]))


def test_of_replicas_it_is_said_and_none_is_accused():
    found = words.wrong_functions(case(gathered(own_slice)), [HALO], None)
    assert not found.said
    assert found.because[1].endswith(", which is right where all these ranks compute the same")


@pytest.mark.parametrize(
    ("back", "said"),
    [
        (drops_the_halo, "(0) that Halo takes on rank 1 in its call 0 goes to (4) of the result on "
                         "rank 0, (1) of the result on rank 1, and gets nothing of what is "
                         "given at (4) of the result on rank 0"),
        (another, "(0) that Halo takes on rank 0 in its call 0 goes to (1) of the result on rank "
                  "0, and gets in place of what is given at (1) of the result on rank 0 what is "
                  "given at (1) of the result on rank 1, where number (0) of rank 1 went"),
        (twice, "(0) that Halo takes on rank 0 in its call 0 goes to (1) of the result on rank 0, "
                "and gets 2 times what is given there"),
    ],
)  # fmt: skip
def test_what_comes_back_in_words(back, said):
    found = [*movers(halos(back)).values()]
    first, second = words.how_they_bring_back(found)
    assert first == (
        f"the forward of Halo only moves numbers, and {found[0].off} of 6 that it takes, and that "
        f"no other number equals, do not get back the sum of what their copies were given; it is "
        f"called at a.py:9 `y = Halo.apply(x)`"
    )
    assert second == f"for one, number {said}"


def test_what_is_given_besides_and_what_goes_nowhere():
    one = movers(halos(to_the_other_edge))[KEY]
    (text,) = words._brought_in_words(one, one.wrong[1])
    assert "and gets besides that what is given at (4) of the result on rank 0, where numbe" in text
    (text,) = words._brought_in_words(one, replace(one.wrong[1], copies=(), owner=None))
    assert text.endswith("goes to no place, and gets what is given at (4) of the result on rank 0")


def test_beside_a_cause(monkeypatch):
    monkeypatch.setattr(words, "looked", lambda _: None)

    def beside(ranks):
        held = Diagnosis(cause="the backward", kind="backward")
        return words.with_formulas(case(ranks), held).because

    assert len(beside(halos(to_the_other_edge))) == 2
    assert not beside(halos())
    assert not beside(halos(twice))
    assert not beside(gathered(own_slice))
    monkeypatch.setattr(words, "looked", lambda _: "look")
    monkeypatch.setattr(words, "owners", lambda _: [])
    at = FirstWrong(wrong="m", seen=(), beside=("n",))
    monkeypatch.setattr(words, "first_wrong_backward", lambda *_: at)
    lines = []
    monkeypatch.setattr(words, "first_lines", lambda *_, back: lines)
    assert not beside(halos(to_the_other_edge))  # it goes wrong elsewhere
    lines.append(SimpleNamespace(mine=made((), ())))
    assert len(beside(halos(to_the_other_edge))) == 2


def test_what_moves_right_is_its_forwards_derivative():
    assert words.are_the_derivative(case(halos())) == {KEY}
    assert words.are_the_derivative(case(halos(drops_the_halo))) == set()


def entries(orders):
    """A copy to a region with an all-reduce in the backward: two branches, in each rank's order."""
    x = [numbers(3, seed=s) for s in (1, 2)]
    g = {(r, k): numbers(3, seed=10 + 2 * r + k) for r in (0, 1) for k in (0, 1)}
    total = [g[0, k] + g[1, k] for k in (0, 1)]
    ranks = {}
    for r, order in enumerate(orders):
        ranks[r] = rank_of(*((x[k], x[k].clone(), total[i], g[r, i]) for i, k in enumerate(order)))
    return ranks


def test_ranks_that_call_it_in_another_order():
    (one,) = movers(entries([(0, 1), (1, 0)])).values()
    assert one.off
    assert [(e.rank, e.call) for e in one.crossed] == [(0, 0), (1, 1)]
    (same,) = movers(entries([(0, 1), (0, 1)])).values()
    assert same.crossed is None
    found = words.wrong_functions(case(entries([(0, 1), (1, 0)])), [HALO], None)
    assert found.said == (
        "the ranks call Halo in another order: what rank 0 hands it in call 0 rank 1 hands it in "
        "call 1"
    )
    assert found.because == (
        "a collective in it brings together what does not belong together; it is called at a.py:9 "
        "`y = Halo.apply(x)`",
    )


def test_what_goes_round_is_in_no_other_order():
    x = [numbers(2, seed=r) for r in range(2)]
    g = [numbers(2, seed=10 + r) for r in range(4)]
    first = [(x[0], x[1], g[2], g[0]), (x[1], x[0], g[3], g[1])]
    other = [(x[1], x[0], g[0], g[2]), (x[0], x[1], g[3], g[3])]
    (one,) = movers({0: rank_of(*first), 1: rank_of(*other)}).values()
    assert one.off
    assert one.crossed is None


def test_of_several_numbers_that_are_no_copies_of_one_none_is_named():
    gradients = torch.tensor([2.0, 3.0, 3.0, 5.0, 5.0, 7.0], dtype=torch.float64)
    source = torch.tensor([0, 1, 1, -1, -1, -1])
    asked = (gradients, torch.arange(6)), source
    found = [moved._of_value(*asked, value, 1e-12) for value in (2.0, 3.0, 5.0, 7.0, 4.0, 0.0)]
    assert found == [0, 1, None, 5, None, None]
