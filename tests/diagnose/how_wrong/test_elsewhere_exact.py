"""Wrong where it stands, right in another place; and what lies on a way, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.backwards.passed import lines_of
from sumgrad.diagnose.modules.how_wrong.elsewhere import gradients_elsewhere, numbers_elsewhere
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.diagnose.modules.where.on_the_way import passed_between
from sumgrad.record.trace import INTO, Call, Trace, Traces
from sumgrad.record.ways import Passed

ROWS, WIDTH = 6, 5
generator = torch.Generator().manual_seed(3)
OUT = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
GRAD = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
HALVES = (slice(0, 3), slice(3, 6))


def trace(output: torch.Tensor, gradient: torch.Tensor, **more) -> Trace:
    call = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
    return Trace(
        calls=(call,), outputs=(output,), gradients=(gradient,), sources={"m": "Linear"}, **more
    )


WHOLE = trace(OUT, GRAD, batch={"x": torch.arange(ROWS)})


def told(*gradients: torch.Tensor, dtype: str = "float64", factor: float = 1.0):
    ranks = {
        r: trace(OUT[half], g) for r, (half, g) in enumerate(zip(HALVES, gradients, strict=True))
    }
    traces = Traces(tier="structure", step=0, ranks=ranks, single=WHOLE)
    look = look_at(traces, dtype, ())
    seen = [s for s in look.seen["m"] if s.backward == "wrong"]
    found = gradients_elsewhere(traces, look, seen, dtype, factor)
    assert all(one.calls == () for one in found)
    return [(one.rank, one.level, one.added, one.holders) for one in found]


def test_gradients_of_the_other_rank():
    assert told(GRAD[3:], GRAD[:3]) == [(0, "vectors", False, (1,)), (1, "vectors", False, (0,))]


def test_gradients_of_other_vectors_of_its_own():
    assert told(GRAD[[1, 2, 0]], GRAD[3:]) == [(0, "vectors", False, (0,))]


def test_the_right_one_with_another_added():
    mine = GRAD[:3].clone()
    mine[2] += GRAD[4]
    assert told(mine, GRAD[3:]) == [(0, "vectors", True, (1,))]


def test_what_is_no_number_is_not_that_of_others():
    mine = GRAD[:3].clone()
    mine[1] = float("nan")
    assert told(mine, GRAD[:3]) == [(1, "vectors", False, (0,))]


def test_the_same_numbers_in_another_order():
    assert told(GRAD[:3].flip(1), GRAD[3:]) == [(0, "numbers", False, ())]


@pytest.mark.parametrize("one", [(0, 0), (2, 4)])
def test_one_number_that_is_another_makes_it_no_such_thing(one):
    mine = GRAD[3:].clone()
    mine[one] += 1e-6
    assert told(mine, GRAD[3:]) == []
    turned = GRAD[:3].flip(1).clone()
    turned[one] += 1e-6
    assert told(turned, GRAD[3:]) == []


def test_a_sum_of_two_others_is_none_of_them():
    assert told(GRAD[3:] + GRAD[[4, 5, 3]], GRAD[3:]) == []


def test_a_factor_that_all_have_is_taken_out():
    assert told(2 * GRAD[3:], GRAD[3:], factor=2.0) == [(0, "vectors", False, (1,))]
    assert told(2 * GRAD[3:], GRAD[3:]) == []


def test_in_fewer_digits_nothing_is_told():
    assert told(GRAD[3:], GRAD[3:], dtype="float32") == []


def test_calls_that_get_each_others_gradients():
    mine = trace(OUT[:3], GRAD[3:])
    other = trace(OUT[3:], GRAD[:3])
    both = replace(
        mine,
        calls=(*mine.calls, replace(mine.calls[0], number=1)),
        outputs=(*mine.outputs, *other.outputs),
        gradients=(*mine.gradients, *other.gradients),
    )
    traces = Traces(tier="structure", step=0, ranks={0: both}, single=WHOLE)
    look = look_at(traces, "float64", ())
    (found,) = gradients_elsewhere(traces, look, look.seen["m"], "float64")
    assert (found.holders, found.calls) == ((0,), ((0, 1), (1, 0)))


@pytest.mark.parametrize(
    ("second", "calls"), [(GRAD[:3] + GRAD[3:], ((1, 0), (1, 1))), (GRAD[:3] + GRAD[4], None)]
)
def test_calls_that_get_those_of_earlier_ones_too(second, calls):
    mine = trace(OUT[:3], GRAD[:3])
    both = replace(
        mine,
        calls=(*mine.calls, replace(mine.calls[0], number=1)),
        outputs=(*mine.outputs, OUT[3:]),
        gradients=(*mine.gradients, second),
    )
    traces = Traces(tier="structure", step=0, ranks={0: both}, single=WHOLE)
    look = look_at(traces, "float64", ())
    seen = [s for s in look.seen["m"] if s.backward == "wrong"]
    found = gradients_elsewhere(traces, look, seen, "float64")
    assert [(one.level, one.calls) for one in found] == ([("sums", calls)] if calls else [])


def forward(output: torch.Tensor) -> bool:
    traces = Traces(tier="structure", step=0, ranks={0: trace(output, GRAD[:3])}, single=WHOLE)
    look = look_at(traces, "float64", ())
    seen = [s for s in look.seen["m"] if s.forward == "wrong"]
    assert seen
    return numbers_elsewhere(traces, seen, "float64")


def test_outputs_whose_numbers_stand_in_other_places():
    assert forward(OUT[:3].flip(1))
    assert forward(OUT[:3].t().reshape(3, 5))
    off = OUT[:3].flip(1).clone()
    off[1, 1] += 1e-6
    assert not forward(off)


def test_few_numbers_are_there_by_chance():
    assert not forward(OUT[:1].flip(1))


ONE, TWO, THREE = (Passed(function=name, line=f"/x/step.py:{i}", code=name.lower())
                   for i, name in enumerate(("One", "Two", "Three"), 1))  # fmt: skip
WAYS = {
    f"{INTO}c": {"b": (THREE,)},
    "b": {"a": (ONE, TWO), "b.inner": ()},
    "b.inner": {"b": ()},
    "other": {"b": (ONE,)},
}


@pytest.mark.parametrize(
    ("start", "end", "wanted"),
    [
        ("b", f"{INTO}c", [THREE]),
        ("a", f"{INTO}c", [ONE, TWO, THREE]),
        ("a", "other", [ONE, TWO]),
        ("b.inner", f"{INTO}c", [THREE]),
        ("other", f"{INTO}c", None),
        ("a", "nowhere", None),
    ],
)
def test_a_way_by_way_of_other_modules(start, end, wanted):
    found = passed_between(trace(OUT, GRAD, ways=WAYS), start, end)
    assert (found if found is None else list(found)) == wanted


def test_of_many_lines_the_first_and_the_last_ones_in_their_order():
    many = [
        Passed(function="F", line=f"/x/step.py:{n}", code=f"c{n}")
        for n in (9, 10, 2, 2, 30, 4, 5, 7)
    ]
    assert lines_of(many[:3]) == "step.py:2 `c2`; :9 `c9`; :10 `c10`"
    assert lines_of(many) == (
        "step.py:2 `c2`; :4 `c4`; :5 `c5`; ...; :9 `c9`; :10 `c10`; :30 `c30`"
    )
    assert lines_of([Passed(function="F")]) == ""
    assert lines_of([Passed(function="F", line="/x/a.py:1", code="y" * 99)]) == (
        f"a.py:1 `{'y' * 57}...`"
    )


@pytest.mark.parametrize(("held", "told"), [
    ([0.123456789123, 2.718281828459], True),
    ([0.123456789123], False),
    ([0.5, 0.25], False),  # what people write
    ([1 / 3, 0.123456789123], False),
    ([0.5, 0.25, 0.125], True),
    ([1.0, 0.123456789123], False),  # whole numbers tell nothing
])  # fmt: skip
def test_few_numbers_are_told_by_their_digits(held, told):
    value = torch.tensor(held, dtype=torch.float64)
    there = Numbers([torch.zeros(3).double(), torch.cat([OUT[0], value])])
    assert there.holding(value) == (frozenset({1}) if told else frozenset())
    assert (there.places(value, 1) is not None) == told or 1.0 in held
