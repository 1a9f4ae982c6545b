"""What went through modules beside the single process's: slices, factors, parts, first wrongs."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.modules.inputs.rows_read import calls_of_rows, rows_read, rows_through
from sumgrad.diagnose.modules.values.matching import compare_gradient, match
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where import first_wrong
from sumgrad.diagnose.modules.where.first_wrong import (
    _again_by_hand,
    _is_told_in_it,
    first_wrong_backward,
    first_wrong_forward,
    first_wrong_recomputed,
)
from sumgrad.diagnose.modules.where.look import Look, look_at, terms_together
from sumgrad.diagnose.modules.where.loss_weights import (
    Share,
    behind_few_directions,
    counts_of_groups,
    odd_vectors,
    own_counts,
    own_positions,
    places_of,
    row_weights,
    shares_at_the_loss,
    shares_of_term,
    usual_factor,
)
from sumgrad.diagnose.modules.where.over_all import _is_even
from sumgrad.diagnose.modules.where.paths import paths_of
from sumgrad.record.trace import LOSS, Call, Trace, Traces, read_traces, single_trace, write_trace
from traces_in_memory import MODULES, trace

ROWS, TOKENS, WIDTH = 4, 3, 6
TP = [("tp", [(0, 1)])]


def numbers(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)


OUT = {name: numbers(i) for i, name in enumerate(MODULES)}
GRAD = {name: numbers(10 + i) for i, name in enumerate(MODULES)}
BATCH = {"x": torch.arange(ROWS * 5).reshape(ROWS, 5)}


def whole() -> Trace:
    return trace([(n, OUT[n], GRAD[n]) for n in MODULES], batch=BATCH, data=(BATCH["x"],))


def rank(rows=slice(None), tokens=slice(None), **changed) -> list:
    """This rank's slice of everything; changed: NAME or grad_NAME -> what it is turned into."""
    held = []
    for name in MODULES:
        out, grad = OUT[name][rows][:, tokens], GRAD[name][rows][:, tokens]
        out = changed.get(name, lambda x: x)(out.clone())
        turned = changed.get(f"grad_{name}", lambda x: x)(grad.clone())
        held.append((name, out, turned))
    return held


def look(*ranks, groups=()):
    traces = {i: r if isinstance(r, Trace) else trace(r) for i, r in enumerate(ranks)}
    return look_at(
        Traces(tier="structure", step=0, ranks=traces, single=whole()), "float64", groups
    )


def states(found):
    return [(found.forward(m), found.backward(m)) for m in MODULES]


RIGHT = [("right", "right")] * 3


@pytest.mark.parametrize(
    "held",
    [
        rank(slice(0, 2)),
        rank([3, 1]),
        rank(slice(None), [2, 0]),
        rank(first=lambda x: x.reshape(-1, WIDTH)[[5, 0, 7]],
             grad_first=lambda g: g.reshape(-1, WIDTH)[[5, 0, 7]]),
        rank(second=lambda x: x[..., 2:4], grad_second=lambda g: g[..., 2:4]),
        rank(second=lambda x: x[..., 1:4], grad_second=lambda g: g[..., 1:4]),
        rank(second=lambda x: x.transpose(0, 1), grad_second=lambda g: g.transpose(0, 1)),
        rank(second=lambda x: torch.cat([x, torch.zeros(1, TOKENS, WIDTH)]),
             grad_second=lambda g: torch.cat([g, torch.zeros(1, TOKENS, WIDTH)])),
        rank(grad_first=lambda g: 3 * g, grad_second=lambda g: 3 * g, grad_third=lambda g: 3 * g),
    ],
)  # fmt: skip
def test_any_slice_in_any_order_is_right(held):
    found = look(held)
    assert states(found) == RIGHT
    assert first_wrong_forward(found) is None
    assert first_wrong_backward(found, MODULES) is None


@pytest.mark.parametrize(("tokens", "ordered"), [(slice(1, 3), True), ([2, 0], False)])
def test_it_is_seen_whether_rows_stand_as_they_do_there(tokens, ordered):
    found = look(rank(slice(0, 2), tokens))
    assert {s.in_order for m in MODULES for s in found.seen[m]} == {ordered}


@pytest.mark.parametrize("name", MODULES)
def test_one_wrong_element_is_seen_where_it_is(name):
    def off(x):
        x[1, 2, 0] += 1e-6
        return x

    after = MODULES[MODULES.index(name) :]
    found = first_wrong_forward(look(rank(), rank(**dict.fromkeys(after, off))))
    assert (found.wrong, found.ranks) == (name, (1,))
    assert found.beside == (() if name == "first" else (MODULES[MODULES.index(name) - 1],))
    assert found.seen[0].wrong.tolist() == [1 * TOKENS + 2]


def test_what_is_right_again_later_is_no_fault():
    found = look(rank(first=lambda x: x + 1, second=lambda x: 2 * x))
    assert [s[0] for s in states(found)] == ["wrong", "wrong", "right"]
    assert first_wrong_forward(found) is None


def test_the_backward_goes_wrong_against_the_order_of_the_forward():
    def mixed(g):
        return g.roll(1, 0) + g

    found = first_wrong_backward(look(rank(grad_first=mixed, grad_second=mixed)), ())
    assert (found.beside, found.wrong) == (("third",), "second")
    assert (found.ratio, found.lost) == (None, False)


@pytest.mark.parametrize(("factor", "ratio", "lost"), [(2.0, 2.0, False), (0.0, None, True)])
def test_a_factor_that_begins_at_a_module(factor, ratio, lost):
    found = first_wrong_backward(look(rank(grad_first=lambda g: factor * g)), ())
    assert (found.beside, found.wrong, found.lost) == (("second",), "first", lost)
    assert found.ratio == (None if ratio is None else pytest.approx(ratio))


def test_factors_of_single_vectors_that_begin_at_a_module(monkeypatch):
    """Each of what is made from it has the one factor of the loss."""
    factors = torch.linspace(0.5, 2.0, TOKENS)[:, None]
    found = first_wrong_backward(look(rank(grad_first=lambda g: factors * g)), ())
    assert (found.wrong, found.beside, found.by_vector, found.ratio) == (
        "first", ("second",), True, None,
    )  # fmt: skip
    with monkeypatch.context() as patch:  # as where only another rank's say that it is right there
        patch.setattr(first_wrong, "_is_told_in_it", lambda *_: False)
        unknown = first_wrong_backward(look(rank(grad_first=lambda g: factors * g)), ())
        assert unknown is None or not unknown.by_vector
    # Of a table that is cut each rank takes the others' rows for nothing.
    mine = torch.tensor([1.0, *[0.0, 1.0] * TOKENS])[:TOKENS, None]
    cut = [rank(grad_first=lambda g, own=own: own * g) for own in (mine, 1.0 - mine)]
    found = first_wrong_backward(look(*cut), ())
    assert found is None or not found.by_vector
    every = dict.fromkeys(("grad_first", "grad_second", "grad_third"), lambda g: factors * g)
    found = first_wrong_backward(look(rank(**every)), ())
    assert found is None or not found.by_vector  # from the loss on: weights of tokens


@pytest.mark.parametrize(
    ("shape", "above", "told"),
    [
        ((4, 3), [(0, 1, "right")], True),
        ((4, 1), [(0, 1, "right")], False),  # of single numbers any factor fits
        ((4, 3), [(0, 1, "right"), (0, 1, "untold")], False),
        ((4, 3), [(1, 1, "right"), (0, 0, "right")], False),  # of another rank, of another call
    ],
)
def test_factors_of_vectors_are_held_against_what_is_made_in_that_call(shape, above, told):
    def seen(of, number, state):
        call = Call(module="m", number=number, part=0, operation=0, operation_back=0,
                    recomputed=False)  # fmt: skip
        return Seen(rank=of, call=call, shape=shape, backward=state)

    held = SimpleNamespace(seen={"m": [seen(*one) for one in above]})
    assert _is_told_in_it(held, ("m", LOSS), seen(0, 1, "right")) == told


FORK = {"second": (), "third": ("first",), LOSS: ("second", "third")}  # two ways to the loss


def test_a_gradient_that_reaches_a_part_only():
    """Zeros in some vectors beside what is right, where what is made from it has no such zeros."""

    def cut(g):
        return torch.cat([g[:2] * 0, g[2:]])

    found = first_wrong_backward(look(rank(grad_second=cut)), ())
    assert (found.wrong, found.beside, found.emptied, found.lost) == (
        "second", ("third",), True, False,
    )  # fmt: skip
    assert found.seen[0].wrong.tolist() == list(range(2 * TOKENS))
    lost = first_wrong_backward(look(rank(grad_second=cut, grad_third=cut)), ())
    assert lost is None or not lost.emptied  # rows that the loss leaves out
    twice = first_wrong_backward(look(rank(grad_second=lambda g: 2 * cut(g))), ())
    assert twice is None or not twice.emptied
    rows = torch.tensor([0, 1, 2, 3.0])[:, None, None]
    weighed = first_wrong_backward(look(rank(grad_second=lambda g: g * rows)), ())
    assert weighed is None or not weighed.emptied  # factors of rows


def forked(*ranks):
    single = replace(whole(), takes=FORK)
    traces = {i: trace(r) for i, r in enumerate(ranks)}
    return look_at(Traces(tier="structure", step=0, ranks=traces, single=single), "float64", ())


def test_what_is_right_on_another_way_clears_nobody():
    """`second` is wrong, and nothing right is made from it, though `third` comes after it."""
    found = first_wrong_forward(forked(rank(second=lambda x: x + 1)))
    assert (found.wrong, found.beside) == ("second", ())
    found = first_wrong_forward(forked(rank(third=lambda x: x + 1)))
    assert (found.wrong, found.beside) == ("third", ("first",))
    found = first_wrong_backward(forked(rank(grad_second=lambda g: g.roll(1, 0) + g)), ())
    assert (found.wrong, found.beside, found.modules) == ("second", (LOSS,), ())
    found = first_wrong_backward(forked(rank(grad_first=lambda g: g.roll(1, 0) + g)), ())
    assert (found.wrong, found.beside) == ("first", ("third",))


def test_a_factor_is_held_against_that_of_its_own_way():
    assert first_wrong_backward(forked(rank(grad_second=lambda g: 2 * g)), ()) is None
    found = first_wrong_backward(forked(rank(grad_first=lambda g: 2 * g)), ())
    assert (found.wrong, found.beside) == ("first", ("third",))
    assert found.ratio == pytest.approx(2)


def test_the_nearest_that_could_be_compared_on_every_way():
    """Through what could not be compared, and past the side of what is wrong itself."""
    paths = paths_of(
        ("a", "b", "c", "d"), {"b": ("a",), "c": ("a",), "d": ("b", "c"), LOSS: ("d", "a")}
    )
    assert paths.next_above("a", lambda m: m != "b") == ("c", LOSS, "d")
    assert paths.next_above("a", lambda m: False) == (LOSS,)
    assert paths.next_below("d", lambda m: m == "a") == ("a",)
    assert paths.all_below("d") == {"a", "b", "c"}
    assert paths.all_above("b") == {"d", LOSS}


def test_without_a_graph_each_follows_the_one_before():
    chain = paths_of(("a", "b", "c"), {})
    assert [chain.below[m] for m in ("a", "b", "c", LOSS)] == [(), ("a",), ("b",), ("c",)]
    frozen = paths_of(("a", "b", "c"), {"c": (), LOSS: ("c",)})
    assert frozen.below["c"] == ("b",)
    assert frozen.below["b"] == ("a",)
    assert frozen.above["c"] == (LOSS,)


def test_a_gradient_that_never_comes_is_lost():
    held = [(n, o, None if n == "first" else g) for n, o, g in rank()]
    found = first_wrong_backward(look(held), ())
    assert (found.wrong, found.lost) == ("first", True)


def test_parts_that_add_up_over_an_axis_are_parts():
    half = rank(grad_first=lambda g: g - numbers(20))
    other = rank(grad_first=lambda g: numbers(20))
    found = look(half, other, groups=TP)
    assert found.backward("first") == "part"
    assert first_wrong_backward(found, MODULES) is None
    assert look(half, other).backward("first") == "wrong"
    assert {s.axis for s in found.seen["first"]} == {"tp"}
    found = look(
        rank(second=lambda x: x - numbers(20)), rank(second=lambda x: numbers(20)), groups=TP
    )
    assert found.forward("second") == "part"


def test_vectors_that_are_lost_here_and_there_on_the_other_rank_are_parts():
    """As of a router whose scores are cut to each rank's own experts: right, or nothing."""

    def only(rows):
        def turned(g):
            out = torch.zeros_like(g)
            out[rows] = g[rows]
            return out

        return turned

    here, there = rank(grad_first=only([0, 1])), rank(grad_first=only([2, 3]))
    found = look(here, there, groups=TP)
    assert found.backward("first") == "part"
    assert found.backward("second") == "right"
    assert look(here, here, groups=TP).backward("first") == "right"  # lost on both, no part


def test_a_state_that_is_handed_on_accuses_nobody():
    """A part of an output that no gradient reaches in one process, beside one that it does."""
    state = numbers(50)
    single = trace([("first", OUT["first"], GRAD["first"]), ("first", state, None)], batch=BATCH)
    single = replace(single, calls=(single.calls[0], replace(single.calls[1], number=0, part=1)))
    mine = trace([("first", OUT["first"][:2], GRAD["first"][:2]), ("first", state + 1, state)])
    mine = replace(mine, calls=(mine.calls[0], replace(mine.calls[1], number=0, part=1)))
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    assert look_at(traces, "float64", ()).forward("first") == "right"
    reached = replace(single, gradients=(single.gradients[0], state))
    assert look_at(replace(traces, single=reached), "float64", ()).forward("first") == "wrong"


def test_outputs_of_one_module_with_factors_of_their_own():
    def shares(*factors):
        held = [("first", OUT["first"], GRAD["first"]), ("first", OUT["second"], GRAD["second"])]
        parts = [{"number": 0, "part": p} for p in range(2)]
        single = trace(held, batch=BATCH)
        calls = tuple(replace(c, **p) for c, p in zip(single.calls, parts, strict=True))
        single = replace(single, calls=calls)
        gradients = tuple(f * g for f, g in zip(factors, single.gradients, strict=True))
        mine = replace(single, gradients=gradients, batch=None)
        traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
        return shares_at_the_loss(look_at(traces, "float64", ()))[1]

    assert [(s.part, s.factor) for s in shares(1, 3)] == [
        (0, pytest.approx(1)), (1, pytest.approx(3)),
    ]  # fmt: skip
    assert [s.part for s in shares(2, 2)] == [0]


def test_a_checkpoint_that_computes_something_else():
    again = trace([("second", OUT["second"] + 1, None)], recomputed=True)
    first = trace(rank())
    both = Trace(
        calls=first.calls + again.calls,
        outputs=first.outputs + again.outputs,
        gradients=first.gradients + again.gradients,
        sources=first.sources,
    )
    found = look(both)
    assert first_wrong_forward(found) is None
    assert first_wrong_recomputed(found).wrong == "second"
    assert first_wrong_recomputed(look(rank())) is None


def in_turn(*calls: tuple[slice, bool, bool]) -> Trace:
    """Calls of one module. Each: its rows, whether its output is right, whether it is reached."""
    held = [
        ("second", OUT["second"][rows] + (0 if right else 1), GRAD["second"][rows] if got else None)
        for rows, right, got in calls
    ]
    first, last = trace(rank()[:1]), trace(rank()[2:])
    mine = trace(held)
    return Trace(
        calls=first.calls + mine.calls + last.calls,
        outputs=first.outputs + mine.outputs + last.outputs,
        gradients=first.gradients + mine.gradients + last.gradients,
        sources=first.sources,
    )


ONE, TWO = slice(0, 2), slice(2, None)


@pytest.mark.parametrize(
    ("calls", "wrong"),
    [
        ([(ONE, True, False), (TWO, True, False), (ONE, False, True), (TWO, True, True)], [2]),
        ([(ONE, True, False), (TWO, True, False), (ONE, False, True), (TWO, False, True)], [2, 3]),
        ([(ONE, True, False), (TWO, True, False), (ONE, True, True), (TWO, True, True)], []),
        ([(ONE, False, True), (TWO, True, True)], []),  # its only pass
        ([(ONE, True, True), (TWO, False, True)], []),
        ([(ONE, False, True), (ONE, True, False)], []),  # what comes later is not done again
        ([(ONE, True, False), (slice(0, 1), False, True)], []),  # other rows
    ],
)
def test_what_is_computed_again_by_hand(calls, wrong):
    found = first_wrong_recomputed(look(in_turn(*calls)))
    assert [s.call.number for s in found.seen] == wrong if wrong else found is None


@pytest.mark.parametrize(("part", "num"), [(0, 1), (1, 0)])
def test_another_output_is_not_what_is_done_again(part, num):
    """A right one of an earlier call, without a gradient, in place of a wrong one: as a teacher's
    beside a student's."""
    found = look(in_turn((ONE, True, False), (ONE, False, True))).seen["second"]
    first = replace(found[0], call=replace(found[0].call, part=part))
    assert len(_again_by_hand((first, found[1]))) == num


def test_what_a_checkpoint_computes_again_has_the_gradient():
    """With reentrance the first call has no graph, and the second one gets the gradients."""
    first = trace([(n, o, None) for n, o, _ in rank()])

    def both(**changed):
        again = trace(rank(**changed)[:2], recomputed=True)
        last = trace(rank()[2:])
        return Trace(
            calls=first.calls[:2] + last.calls + again.calls,
            outputs=first.outputs[:2] + last.outputs + again.outputs,
            gradients=first.gradients[:2] + last.gradients + again.gradients,
            sources=first.sources,
        )

    found = look(both())
    assert [found.backward(m) for m in MODULES] == ["right"] * 3
    found = first_wrong_backward(look(both(grad_first=lambda g: g.roll(1, 0) + g)), ())
    assert (found.wrong, found.beside, found.lost) == ("first", ("second",), False)
    twice = first_wrong_backward(look(both(grad_first=lambda g: 2 * g)), ())
    assert (twice.wrong, twice.ratio) == ("first", pytest.approx(2))


@pytest.mark.parametrize("lacking", [True, False])
def test_the_output_of_a_stage_is_that_of_its_last_layer(lacking):
    """The whole model's, on a rank that has not all of its layers; else it is wrong."""
    held = [(n, OUT[n], GRAD[n]) for n in MODULES]
    single = trace([*held, ("", OUT["third"] + 1, GRAD["third"])], batch=BATCH)
    mine = trace([*held[: 2 if lacking else 3], ("", OUT["second"], GRAD["second"])])
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    found = look_at(traces, "float64", ())
    assert found.forward("") == ("untold" if lacking else "wrong")
    wrong = trace([*held[:2], ("", OUT["second"] + 2, GRAD["second"])])
    found = look_at(replace(traces, ranks={0: wrong}), "float64", ())
    assert found.forward("") == "wrong"


@pytest.mark.parametrize("elsewhere", [True, False])
def test_what_a_stage_has_so_far_is_no_output_of_the_whole_model(elsewhere):
    """Where another rank goes on; else it is wrong."""
    held = [(n, OUT[n], GRAD[n]) for n in MODULES]
    single = trace([*held, ("", OUT["third"] + 1, GRAD["third"])], batch=BATCH)
    so_far = trace([*held[:2], ("", OUT["second"] + 2, GRAD["second"])])
    ranks = {0: so_far, 1: trace(held[2 if elsewhere else 1 :][: 2 if elsewhere else 1])}
    found = look_at(Traces(tier="structure", step=0, ranks=ranks, single=single), "float64", ())
    assert found.forward("") == ("untold" if elsewhere else "wrong")
    last = trace([*held[1:], ("", OUT["second"] + 2, GRAD["second"])])
    ranks = {0: trace(held[:1]), 1: last}
    found = look_at(Traces(tier="structure", step=0, ranks=ranks, single=single), "float64", ())
    assert found.forward("") == "wrong"


@pytest.mark.parametrize("reached", [True, False])
def test_a_trial_run_that_gets_no_gradient_is_no_fault(reached):
    trial = trace([("first", OUT["first"] * 0 + 1, GRAD["first"] if reached else None)])
    mine = trace(rank())
    both = Trace(
        calls=trial.calls + mine.calls,
        outputs=trial.outputs + mine.outputs,
        gradients=trial.gradients + mine.gradients,
        sources=mine.sources,
    )
    assert look(both).forward("first") == ("wrong" if reached else "right")


def test_what_all_rows_share_is_not_compared_with_the_gradient_of_them_all():
    position = numbers(30)[0]
    single = trace([("first", position, position), ("second", OUT["second"], GRAD["second"])],
                   batch=BATCH)  # fmt: skip
    mine = trace([("first", position, numbers(31)[0]),
                  ("second", OUT["second"][:2], GRAD["second"][:2])])  # fmt: skip
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    found = look_at(traces, "float64", ())
    assert found.backward("first") == "untold"
    assert first_wrong_backward(found, MODULES) is None


def test_weights_of_the_loss_by_rank_and_by_own_count():
    counts = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    by = {name: (lambda f: lambda g: f * g) for name in MODULES}
    mine = [
        rank(slice(0, 2), **{f"grad_{n}": by[n](1 / 3) for n in MODULES}),
        rank(slice(2, 4), **{f"grad_{n}": by[n](1 / 7) for n in MODULES}),
    ]
    module, shares = shares_at_the_loss(look(*mine))
    assert module == "third"
    assert [(s.rank, s.rows) for s in shares] == [(0, (0, 1)), (1, (2, 3))]
    assert own_counts(shares, counts, level="rank") == pytest.approx(1.0)
    assert own_counts(shares, torch.ones(4, dtype=torch.float64), level="rank") is None
    assert row_weights(shares, 4).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 7, 1 / 7])


def test_parts_of_a_row_divide_by_their_own_number_of_positions():
    single = whole()
    gradients = [g.clone() for g in single.gradients]
    gradients[2][:, 2] = 0  # the last position of every row is no part of the loss
    single = replace(single, gradients=tuple(gradients))
    held = [(n, o, g) for n, o, g in zip(MODULES, single.outputs, gradients, strict=True)]

    def of(factors):
        cuts = (slice(0, 1), slice(1, 3), slice(0, 2))
        ranks = {
            i: trace([(n, o[:, cut], f * g[:, cut]) for n, o, g in held])
            for i, (cut, f) in enumerate(zip(cuts, factors, strict=True))
        }
        traces = Traces(tier="structure", step=0, ranks=ranks, single=single)
        return shares_at_the_loss(look_at(traces, "float64", ()))[1]

    shares = of((1 / 4, 1 / 4, 1 / 8))
    assert [s.live for s in shares] == [4, 4, 8]
    assert own_positions(shares, level="rank")
    assert not own_positions(of((1 / 4, 1 / 4, 1 / 4)), level="rank")
    assert not own_positions([replace(s, live=None) for s in shares], level="rank")
    assert not own_positions(shares[:2], level="rank")  # one number, and nothing to tell it by


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        ([BATCH["x"][:2]], {0: 1, 1: 1}),
        ([BATCH["x"][2:, :-1]], {2: 1, 3: 1}),
        ([BATCH["x"][[3]], BATCH["x"][[3]]], {3: 2}),
        ([torch.ones(2, 5, dtype=torch.int64), BATCH["x"][[1]]], {1: 1}),
    ],
)
def test_rows_that_a_rank_read(data, rows):
    mine = trace(rank(), data=tuple(data))
    found = rows_read(Traces(tier="structure", step=0, ranks={0: mine}, single=whole()))
    assert found == {0: rows}


def test_rows_that_nobody_can_tell():
    mine = trace(rank(), data=(BATCH["x"] + 1,))
    assert rows_read(Traces(tier="structure", step=0, ranks={0: mine}, single=whole())) is None


def test_rows_that_go_through_a_module_twice_or_never():
    calls = [rank([0, 1]), rank([0, 1])]
    mine = trace([entry for call in calls for entry in call])
    found = rows_through(look(mine))
    assert found["first"] == {0: {0: 2, 1: 2}}


def test_outputs_of_the_single_process_that_no_rank_has_are_missed():
    more = [("first", numbers(41), None)]
    single = trace([*[(n, OUT[n], GRAD[n]) for n in MODULES], *more], batch=BATCH)
    traces = Traces(tier="structure", step=0, ranks={0: trace(rank())}, single=single)
    assert look_at(traces, "float64", ()).lacking == ("first",)
    both = replace(traces, ranks={0: trace(rank()), 1: trace([*rank(), *more])})
    assert look_at(both, "float64", ()).lacking == ()
    assert look(rank(slice(0, 2)), rank(slice(2, 4))).lacking == ()
    assert look(rank(slice(0, 2))).lacking == tuple(MODULES)


def test_outputs_of_a_module_that_no_gradient_reaches_are_missed_too():
    single = trace([("first", OUT["first"], None)], batch=BATCH)
    mine = trace([("first", OUT["first"][:2], None)])
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    assert look_at(traces, "float64", ()).lacking == ("first",)


def test_outputs_that_are_masked_out_are_missed_by_nobody():
    masked = GRAD["first"].clone()
    masked[2:] = 0
    single = trace([("first", OUT["first"], masked)], batch=BATCH)
    mine = trace([("first", OUT["first"][:2], masked[:2])])
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    assert look_at(traces, "float64", ()).lacking == ()
    fewer = replace(traces, ranks={0: trace([("first", OUT["first"][:1], masked[:1])])})
    assert look_at(fewer, "float64", ()).lacking == ("first",)


def test_a_mask_tells_no_rows():
    mask = torch.ones(ROWS, 5, dtype=torch.int64).tril()
    single = replace(whole(), batch={"mask": mask}, data=(mask,))
    mine = trace(rank(), data=(mask[3:, :3],))
    assert rows_read(Traces(tier="structure", step=0, ranks={0: mine}, single=single)) is None


def test_counts_over_some_ranks_are_told_by_the_groups():
    counts = torch.tensor([5.0, 7.0, 11.0, 18.0, 2.0, 29.0], dtype=torch.float64)
    own = {0: (0, 1), 1: (2,), 2: (3, 4), 3: (5,)}
    total = {r: float(counts[list(rows)].sum()) for r, rows in own.items()}

    def shares(groups):
        divisor = {r: sum(total[m] for m in group) for group in groups for r in group}
        return [
            Share(rank=r, number=0, rows=rows, factor=72 / divisor[r], by_row={})
            for r, rows in own.items()
        ]

    for groups in ([(0, 1), (2, 3)], [(0,), (1, 2, 3)], [(0, 3), (1, 2)]):
        assert counts_of_groups(shares(groups), counts) == groups
    assert counts_of_groups(shares([(0, 1, 2, 3)]), counts) is None
    alike = torch.ones(6, dtype=torch.float64)
    assert counts_of_groups(shares([(0, 1), (2, 3)]), alike) is None


def test_directions_that_are_too_few_tell_nothing():
    """Gradients along one line fit one factor each, whatever made them."""
    line = numbers(51)[:1, :1]
    sizes = torch.arange(1.0, 13.0).reshape(ROWS, TOKENS, 1).double()
    single = replace(whole(), gradients=(GRAD["first"], GRAD["second"], sizes * line))
    for change, state in ((sizes.flip(0) * line, "untold"), (3 * sizes * line, "right")):
        mine = trace(rank(grad_third=lambda _, change=change: change))
        traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
        found = look_at(traces, "float64", ())
        assert found.backward("third") == state
        at_loss = shares_at_the_loss(found)
        assert at_loss[0] == ("second" if state == "untold" else "third")
        assert behind_few_directions(found, "second") == ("third" if state == "untold" else None)


def test_a_part_of_an_output_that_gets_no_gradient_is_lost():
    def with_part(traced, gradient):
        call = replace(traced.calls[2], part=1, operation_back=None if gradient is None else 0)
        return replace(traced, calls=(*traced.calls, call), gradients=(*traced.gradients, gradient),
                       outputs=(*traced.outputs, torch.tensor(2.5).double()))  # fmt: skip

    single = with_part(whole(), torch.tensor(0.5).double())
    for gradient, state in ((None, "wrong"), (torch.tensor(0.5).double(), "right")):
        mine = with_part(trace(rank()), gradient)
        if gradient is None:  # a part of the sum over all rows: its value is nowhere
            mine = replace(mine, outputs=(*mine.outputs[:-1], torch.tensor(1.0).double()))
        traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
        found = look_at(traces, "float64", ())
        assert found.backward("third") == state
    assert first_wrong_backward(look_at(replace(traces, ranks={0: with_part(trace(rank()), None)}),
                                        "float64", ()), ()) is not None  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1, 1)])
def test_a_loss_that_a_model_gives_itself_is_no_slice_of_another(shape):
    """transformers' models return theirs: of fewer rows it is another number."""

    def loss(value):
        return torch.full(shape, value).double()

    held = [(n, OUT[n], GRAD[n]) for n in MODULES]
    single = trace([*held, ("", loss(2.5), loss(1.0))], batch=BATCH)
    mine = trace([*rank(slice(0, 2)), ("", loss(1.5), loss(1.0))])
    found = look_at(Traces(tier="structure", step=0, ranks={0: mine}, single=single), "float64", ())
    assert found.forward("") == ("wrong" if shape else "untold")


def test_ranks_of_an_axis_that_share_vectors_are_summed_by_themselves():
    """Two copies of each head on four ranks: a gradient is whole within a pair."""
    cuts = [slice(0, 3), slice(0, 3), slice(3, 6), slice(3, 6)]
    part = numbers(61)

    def held(i):
        sign = 1 if i % 2 else -1
        return rank(second=lambda x: x[..., cuts[i]],
                    grad_second=lambda g: (g / 2 + sign * part)[..., cuts[i]])  # fmt: skip

    found = look(*map(held, range(4)), groups=[("tp", [(0, 1, 2, 3)])])
    assert found.backward("second") == "part"
    alone = look(*map(held, range(4)), groups=[("tp", [(0, 2), (1, 3)])])
    assert alone.backward("second") == "wrong"


def test_a_call_that_is_computed_again_has_lost_nothing():
    first = [(n, o, None) for n, o, _ in rank()]
    assert look(trace(first + rank())).backward("first") == "right"
    assert look(trace(first)).backward("first") == "wrong"


@pytest.mark.parametrize("where", ["rank", "single"])
def test_what_is_left_out_over_the_limit_accuses_nobody(where):
    """A gradient that came and was not kept is not one that never came."""
    held = [(n, o, None if n == "first" else g) for n, o, g in rank()]
    mine, single = trace(held if where == "rank" else rank()), whole()
    left = {"left_out": ("first",)}
    if where == "rank":
        mine = replace(mine, **left)
    else:
        single = replace(single, gradients=(None, *single.gradients[1:]), **left)
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    found = look_at(traces, "float64", ())
    assert (found.forward("first"), found.backward("first")) == ("untold", "untold")
    assert first_wrong_backward(found, MODULES) is None
    assert first_wrong_forward(found) is None


TERMS = {"main": numbers(40), "other": numbers(41)}


def of_terms(main: float, other: float) -> torch.Tensor:
    return main * TERMS["main"] + other * TERMS["other"]


def with_terms(*ranks):
    single = trace([("first", OUT["first"], of_terms(1, 1))], batch=BATCH)
    by_term = {name: (gradient,) for name, gradient in TERMS.items()}
    single = replace(single, by_term=by_term)
    traces = {i: trace([("first", OUT["first"], g)]) for i, g in enumerate(ranks)}
    return look_at(Traces(tier="structure", step=0, ranks=traces, single=single), "float64", ())


def test_terms_with_factors_of_their_own():
    found = with_terms(of_terms(1, 3), of_terms(2, 2))
    assert found.backward("first") == "right"
    assert found.terms_at["first", 0] == ("main", "other")
    by_term = {t: [s.factor for s in shares_of_term(found, t)[1]] for t in TERMS}
    assert by_term == {"main": pytest.approx([1, 2]), "other": pytest.approx([3, 2])}
    assert with_terms(of_terms(1, 1) + numbers(42)).backward("first") == "wrong"


def test_terms_that_a_rank_computes_in_calls_of_their_own():
    single = trace([("first", OUT["first"], of_terms(1, 1))], batch=BATCH)
    single = replace(single, by_term={name: (g,) for name, g in TERMS.items()})
    mine = trace([("first", OUT["first"], g) for g in TERMS.values()])
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    (seen,) = look_at(traces, "float64", ()).seen["first"]
    assert seen.backward == "right"
    assert seen.factors.tolist() == pytest.approx([1.0] * ROWS * TOKENS)


def test_a_trace_is_read_back(tmp_path):
    mine = whole()
    write_trace(single_trace(tmp_path), mine)
    from sumgrad.record.trace import read_trace

    back = read_trace(single_trace(tmp_path))
    assert back.calls == mine.calls
    assert all(torch.equal(a, b) for a, b in zip(back.outputs, mine.outputs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(back.gradients, mine.gradients, strict=True))
    assert list(back.batch) == ["x"]
    assert read_traces(tmp_path, [0]) is None


@pytest.mark.parametrize(
    ("terms", "factor", "told"),
    [
        ([[1.0, 2.0, 0.0, 1.0], [0.0, 1.0, 3.0, 1.0]], 2.0, [2.0, 2.0]),
        ([[1.0, 2.0, 0.0, 1.0], [2.0, 4.0, 0.0, 2.0]], 2.0, None),  # of one direction
        ([[1.0, 2.0, 0.0, 1.0], [2.0, 4.0, 0.0, 2.0]], 1.0, [1.0, 1.0]),
        ([[1.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], 2.0, [2.0, None]),
    ],
)
def test_terms_of_one_direction_tell_no_factor_of_their_own(terms, factor, told):
    by_term = torch.tensor(terms, dtype=torch.float64)[:, None]
    wanted = by_term.sum(0)
    where = match(wanted, wanted, 1e-8)
    found = compare_gradient(factor * wanted, wanted, where, 1e-8, by_term)
    assert found.right.tolist() == [True]
    assert found.factors.tolist() == pytest.approx([factor])
    nothing = float("nan")
    expected = [nothing if x is None else x for x in told or (None, None)]
    assert found.terms[0].tolist() == pytest.approx(expected, nan_ok=True)


def share_of(rank: int, vectors: dict[int, float], *, number=0, rows=(0, 1), each=3) -> Share:
    return Share(
        rank=rank,
        number=number,
        rows=rows,
        factor=None,
        by_row=dict.fromkeys(rows),
        shape=(len(rows), each, WIDTH),
        vectors=vectors,
        row_of={at: rows[at // each] for at in vectors},
    )


def test_the_usual_factor_is_that_of_a_third_of_all_ranks_vectors():
    one = share_of(0, {0: 2.0, 1: 3.0, 2: 2.0})
    other = share_of(1, {0: 0.1, 1: 0.2, 2: 0.3})
    assert usual_factor([one]) == 2
    assert usual_factor([one, other]) == 2
    assert usual_factor([one, other, share_of(2, {0: 7.0})]) is None  # two of seven
    assert usual_factor([one, share_of(1, {0: 3.0})]) is None  # two of each
    assert usual_factor([other]) is None
    assert usual_factor([]) is None
    assert odd_vectors(one, 2.0) == [1]


def test_places_are_those_that_are_meant_and_no_others():
    share = share_of(0, dict.fromkeys(range(6), 1.0))
    assert places_of(share, [1, 2, 4, 5]) == "positions 1-2 of 3 in rows 0-1"
    assert places_of(share, [1, 3]) == "position 1 of 3 in row 0, position 0 of 3 in row 1"
    many = share_of(0, dict.fromkeys(range(12), 1.0), rows=(0, 1, 2, 3))
    assert places_of(many, [0, 4, 8, 9, 10]) == "5 of the 12 tokens that show one"
    flat = replace(share, shape=(6, WIDTH))
    assert places_of(flat, [0, 1, 4]) == "vectors 0-1, 4 of 6"
    assert places_of(replace(share, row_of={}), [0]) == "1 of the 6 tokens that show one"


def test_zeros_of_two_micro_batches_are_two_calls_of_a_loss_of_several_terms():
    """The first state of a recurrence is zeros whatever the rows are."""
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    ones = torch.ones_like(zeros)
    held = [("first", zeros, ones), ("first", zeros, 2 * ones), ("first", ones, ones)]
    twice = trace([*held, ("first", ones, 3 * ones)])
    single = replace(trace(held), by_term={"a": (), "b": ()})
    both = terms_together(Traces(tier="structure", step=0, ranks={0: twice}, single=single))
    found = both.ranks[0]
    assert [float(g[0, 0]) for g in found.gradients] == [1.0, 2.0, 4.0]
    assert [c.number for c in found.calls] == [0, 1, 2]


def test_calls_for_other_rows_are_not_those_of_terms_though_one_module_gives_the_same():
    same, ones = torch.full((2, 3), 3.0).double(), torch.ones(2, 3).double()
    held = [("first", same, ones), ("second", same, ones),
            ("first", same, 2 * ones), ("second", same + 1, ones)]  # fmt: skip
    single = replace(trace(held), by_term={"a": (), "b": ()})
    both = Traces(tier="structure", step=0, ranks={0: trace(held)}, single=single)
    assert len(terms_together(both).ranks[0].calls) == 4
    again = [*held[:2], ("first", same, 2 * ones), ("second", same, ones)]
    both = Traces(tier="structure", step=0, ranks={0: trace(again)}, single=single)
    assert [float(g[0, 0]) for g in terms_together(both).ranks[0].gradients] == [3.0, 2.0]


@pytest.mark.parametrize("used", [False, True])
def test_vectors_that_no_loss_uses_accuse_nobody(used):
    def other(x):
        x[:, 2] += 1.0
        return x

    def none(g):
        if not used:
            g[:, 2] = 0
        return g

    held = {f"grad_{m}": none for m in MODULES}
    found = look(rank(slice(0, 2), **dict.fromkeys(MODULES, other), **held))
    wrong = first_wrong_forward(found)
    assert (wrong is None) != used
    if not used:
        assert found.forward("first") == "right"
        assert found.seen["first"][0].where.picked.tolist() == [0, 1, 3, 4]


@pytest.mark.parametrize(
    ("row", "wrong"),
    [(3, [2]), (0, None)],  # of another row; of its own, in another order, all is as it may be
)
def test_a_vector_of_another_row_is_wrong_where_the_rest_of_its_row_stands(row, wrong):
    def moved(x):
        x[0, 2] = OUT["first"][row, 1]
        return x

    seen = look(rank(slice(0, 2), first=moved)).seen["first"][0]
    assert seen.forward == ("wrong" if wrong else "right")
    assert (seen.wrong.tolist() if seen.forward == "wrong" else None) == wrong


@pytest.mark.parametrize(("cut", "shifted"), [(0, False), (1, True)])
def test_a_row_that_is_padded_on_one_side_is_right_in_what_counts(cut, shifted):
    """Numbers of positions, as logits of spans: a shorter row stands further to the right."""

    def padded(x, fill):
        x = x.clone()
        x[0, 0] = torch.cat([torch.full((cut,), fill), of_first[fill][0, 0][: WIDTH - cut]])
        return x

    of_first = {7.5: OUT["first"], 0.0: GRAD["first"]}
    found = look(rank(slice(0, 2), first=lambda x: padded(x, 7.5),
                      grad_first=lambda g: padded(g, 0.0)), rank(slice(2, 4)))  # fmt: skip
    seen = found.seen["first"][0]
    assert (seen.forward, seen.shifted) == ("right", shifted)
    assert seen.backward == ("untold" if shifted else "right")
    assert found.backward("first") == seen.backward  # though it is right on the other rank


def test_a_call_without_a_gradient_lost_none_where_others_together_had_all_of_it():
    held = [("first", OUT["first"], None), ("first", OUT["first"][:1], GRAD["first"][:1]),
            ("first", OUT["first"][1:], GRAD["first"][1:])]  # fmt: skip
    assert first_wrong_backward(look(trace(held)), MODULES) is None
    lost = first_wrong_backward(look(trace(held[:2])), MODULES)
    assert lost is not None
    assert lost.lost


def test_what_has_the_same_factor_further_down_is_not_right_again():
    """A graph that is walked twice doubles all that comes after it."""
    held = rank(grad_first=lambda g: 2 * g, grad_second=lambda g: 2 * g)
    found = first_wrong_backward(look(held), ())
    assert (found.wrong, found.ratio) == ("second", pytest.approx(2.0))


def test_vectors_of_several_lengths_say_nothing_of_what_all_rows_share():
    """As the weights of attention over crops of two sizes, which no one tensor holds."""
    call = Call(module="first", number=0, part=1, operation=0, operation_back=0, recomputed=False)
    assert _is_even([Seen(rank=0, call=call, shape=(4, 5))], None, {}) is None


@pytest.mark.parametrize(
    ("rows", "gives", "state"),
    [
        (((0, 2), (2, 4)), 1.0, "right"),
        (((0, 2), (2, 4)), 0.5, "right"),  # half of it, as of everything: a factor
        (((0, 2), (2, 4)), None, "wrong"),
        (((0, 2), (2, 3)), None, "untold"),  # a row is on no rank
        (((0, 2), (1, 4)), None, "untold"),  # a row is on two
    ],
)
def test_what_all_rows_share_has_its_gradient_over_all_ranks(rows, gives, state):
    """Two ranks' parts add up to so many times a table's right gradient, or to something else."""
    table, wanted = numbers(30)[0], numbers(31)[0]
    single = trace([("first", table, wanted), ("second", OUT["second"], GRAD["second"])],
                   batch=BATCH)  # fmt: skip
    part = numbers(32)[0]
    parts = (part, numbers(33)[0] if gives is None else gives * wanted - part)
    mine = [
        trace([
            ("first", table, share),
            ("second", OUT["second"][start:end], GRAD["second"][start:end]),
        ])
        for (start, end), share in zip(rows, parts, strict=True)
    ]  # fmt: skip
    traces = Traces(tier="structure", step=0, ranks=dict(enumerate(mine)), single=single)
    found = look_at(traces, "float64", ())
    assert {s.over_all for s in found.seen["first"]} == {state}
    wrong = first_wrong_backward(found, ["first"])
    assert (wrong is not None) == (state == "wrong")
    assert wrong is None or (wrong.wrong, wrong.over_all) == ("first", True)


@pytest.mark.parametrize(("gives", "state"), [(1.0, "right"), (None, "wrong")])
def test_what_all_rows_share_is_told_where_all_else_is_there_in_parts(gives, state):
    """As of losses that ranks make of their own items, for the same rows."""
    table, wanted = numbers(30)[0], numbers(31)[0]
    single = trace([("first", table, wanted), ("second", OUT["second"], GRAD["second"])],
                   batch=BATCH)  # fmt: skip
    own, share = torch.randn_like(GRAD["second"]), numbers(32)[0]
    shares = (share, numbers(33)[0] if gives is None else gives * wanted - share)
    mine = [
        trace([("first", table, mine), ("second", OUT["second"], part)])
        for mine, part in zip(shares, (own, GRAD["second"] - own), strict=True)
    ]
    traces = Traces(tier="structure", step=0, ranks=dict(enumerate(mine)), single=single)
    found = look_at(traces, "float64", [("dp", [(0, 1)])])
    assert found.backward("second") == "part"
    assert {s.over_all for s in found.seen["first"]} == {state}


def test_what_is_right_again_behind_what_a_hook_hides_is_not_accused():
    """Of a row of modules c was seen behind a hook, b before it; a and z are right again, and what
    is wrong lies below them, if anywhere."""
    order = ("y", "z", "a", "b", "c", "d")
    takes = {LOSS: ("d",), **{m: (n,) for n, m in pairwise(order)}, "y": ()}

    def seen(module, factor, state="right"):
        call = Call(module=module, number=0, part=0, operation=0, operation_back=0,
                    recomputed=False)  # fmt: skip
        return Seen(rank=0, call=call, shape=(2, 3), forward="right", backward=state,
                    factors=None if factor is None else torch.tensor([factor, 1.0])
                    if math.isnan(factor) else torch.full((2,), factor),
                    wrong=torch.tensor([0]) if state == "wrong" else None)  # fmt: skip

    def accused(factors):
        """None: wrong; NaN: in one of its two vectors, and the other has the factor 1."""
        state = {m: "wrong" if f is None or math.isnan(f) else "right"
                 for m, f in zip(order, factors, strict=True)}  # fmt: skip
        held = {m: [seen(m, f, state[m])] for m, f in zip(order, factors, strict=True)}
        found = Look(modules=order, seen=held, sources={}, paths=paths_of(order, takes), terms=())
        first = first_wrong_backward(found, ())
        return None if first is None else first.wrong

    assert accused((1.0, 1.0, 1.0, 3.0, 0.3, 1.0)) is None
    assert accused((None, 1.0, 1.0, 3.0, 0.3, 1.0)) == "y"
    assert accused((0.3, 0.3, 0.3, 0.3, 0.3, 1.0)) == "c"
    assert accused((2.0, 2.0, 2.0, 3.0, 0.3, 1.0)) == "a"
    # Where nothing was passed over, what is wrong in one vector is accused.
    assert accused((None, None, None, None, math.nan, 1.0)) == "c"


def read_in(entered, *, counted=False):
    """entered: of each call which rows enter `first`, and whether a gradient reaches its output."""
    data = tuple(BATCH["x"][rows] for rows, _ in entered)
    held = [("first", OUT["first"][rows], GRAD["first"][rows] if reached else None)
            for rows, reached in entered]  # fmt: skip
    mine = trace(held, data=data)
    mine = replace(mine, entered_as=tuple((i, "x") for i in range(len(data))))
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=whole())
    return rows_read(traces, counted=counted), calls_of_rows(traces)


def test_rows_that_are_read_again_without_a_gradient_count_once():
    entered = [([0, 1], True), ([0], False), ([2, 3], True)]
    read, calls = read_in(entered)
    assert read == {0: {0: 2, 1: 1, 2: 1, 3: 1}}
    assert calls == {0: {0: {0, 1}, 1: {0}, 2: {2}, 3: {2}}}
    assert read_in(entered, counted=True)[0] == {0: {0: 1, 1: 1, 2: 1, 3: 1}}


def test_where_no_gradient_reaches_any_call_all_count():
    entered = [([0, 1], False), ([0], False)]
    assert read_in(entered, counted=True)[0] == {0: {0: 2, 1: 1}}


def test_of_what_is_not_there_only_what_counts_is_wrong():
    """Two vectors that are in no output of the single process, one of them without a gradient."""

    def off(x):
        x[0, :2] += 1
        return x

    def lost(g):
        g[0, 1] = 0
        return g

    (one,) = look(rank(slice(0, 2), first=off, grad_first=lost)).seen["first"]
    assert (one.forward, one.wrong.tolist()) == ("wrong", [0])
    (one,) = look(rank(slice(0, 2), first=off)).seen["first"]
    assert one.wrong.tolist() == [0, 1]


@pytest.mark.parametrize("used", [True, False])
def test_an_output_beside_that_no_rank_uses_is_not_held_against_it(used):
    """As of a loss that a model gives besides, over the own rows."""

    def with_a_loss(traced, value, gradient):
        call = replace(traced.calls[-1], part=1, operation_back=None if gradient is None else 0)
        return replace(traced, calls=(*traced.calls, call), gradients=(*traced.gradients, gradient),
                       outputs=(*traced.outputs, value))  # fmt: skip

    reached, (a, b) = numbers(70)[:, :, :1], (numbers(71), numbers(72))
    single = with_a_loss(whole(), a, reached.expand_as(a))
    mine = with_a_loss(trace(rank()), b, reached.expand_as(b) if used else None)
    found = look_at(Traces(tier="structure", step=0, ranks={0: mine}, single=single), "float64", ())
    assert found.forward(MODULES[-1]) == ("wrong" if used else "right")
