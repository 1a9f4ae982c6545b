"""A parameter that several lines use: what each gave, recorded, and which is counted wrongly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.of_factors import by_use as words
from sumgrad.diagnose.modules.autograd.by_use import counted_by_use
from sumgrad.record.trace import Trace, read_trace, write_trace
from sumgrad.record.uses import Use
from sumgrad.subjects.own_gradients import OwnGradients
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.uses import Uses

PART = Use(function="Mul", line="/x/step.py:3", code="y = x * p")
WHOLE = Use(function="Pow", line="/x/step.py:7", code="return y ** p")
THIRD = Use(function="Add", line="/x/step.py:9", code="z + p")
RANKS = range(3)


def random(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def traces(parts, n):
    """parts: of each use, by rank what it gave."""
    at = torch.arange(n)
    return {
        rank: Trace(
            calls=(), outputs=(), gradients=(), sources={}, own_at={"p": at},
            uses={"p": {use: own[rank] for use, own in parts.items() if rank in own}},
        )
        for rank in RANKS
    }  # fmt: skip


def cell(got, wanted, rank=0):
    return SimpleNamespace(
        name="p", rank=rank, measured=got, index=None,
        wanted=SimpleNamespace(value=wanted, threshold=1e-12, size=1.0, scale=1.0),
    )  # fmt: skip


def parts_of(n):
    own = {rank: random(n, rank) for rank in RANKS}
    same = random(n, 9)
    return {PART: own, WHOLE: dict.fromkeys(RANKS, same)}, sum(own.values()), same


def times(found):
    return {one.use: one.times for one in found.counted}


def test_the_part_that_all_ranks_have_alike_is_counted_as_often_as_there_are_ranks():
    parts, total, same = parts_of(20)
    one = cell((total + 3 * same) / 5, (total + same) / 5)
    found = counted_by_use(one, traces(parts, 20), None)
    assert times(found) == {PART: 1, WHOLE: pytest.approx(3)}
    assert (found.is_fit, found.ranks) == (True, (0, 1, 2))
    assert [one.alike for one in found.counted] == [False, True]


def test_of_few_numbers_simple_weights_are_guessed_where_the_scale_is_known():
    parts, total, same = parts_of(2)
    asked = cell((total + 3 * same) / 5, (total + same) / 5), traces(parts, 2)
    found = counted_by_use(*asked, 1 / 5)
    assert times(found) == {PART: 1, WHOLE: pytest.approx(3)}
    assert not found.is_fit
    assert counted_by_use(*asked, None) is None
    assert counted_by_use(*asked, 1 / 4) is None
    zero = {PART: parts[PART], WHOLE: dict.fromkeys(RANKS, torch.zeros(2).double())}
    assert counted_by_use(cell(total / 3, total), traces(zero, 2), 1.0) is None  # any weight does


def test_where_all_uses_are_off_alike_or_none_is_right_no_use_is_told():
    parts, total, same = parts_of(20)
    held = traces(parts, 20)
    assert counted_by_use(cell(total + same, total + same), held, None) is None
    assert counted_by_use(cell(2 * total + 2 * same, total + same), held, None) is None
    assert counted_by_use(cell(random(20, 5), total + same), held, None) is None
    assert counted_by_use(cell(total, random(20, 5)), held, None) is None


def test_a_use_that_is_lost_and_one_that_does_not_belong_there():
    parts, total, same = parts_of(20)
    held = traces(parts, 20)
    assert times(counted_by_use(cell(total, total + same), held, None)) == {PART: 1, WHOLE: 0}
    assert times(counted_by_use(cell(total + same, total), held, None)) == {PART: 1, WHOLE: None}


def test_what_is_not_known_tells_nothing():
    parts, total, same = parts_of(20)
    asked = cell(total + 3 * same, total + same)
    assert counted_by_use(asked, traces({PART: parts[PART]}, 20), None) is None
    one = {use: {0: own[0]} for use, own in parts.items()}
    assert counted_by_use(asked, traces(one, 20), None) is None
    held = traces(parts, 20)
    held[1].own_at["p"] = torch.arange(20) + 1  # it has another part of the parameter
    assert counted_by_use(asked, held, None) is None


def case(cells, held, right=()):
    return SimpleNamespace(
        traces=SimpleNamespace(ranks=held), exact=True, failing_cells=cells,
        cells=(*cells, *right), step=0, known={},
        record=SimpleNamespace(ranks={0: SimpleNamespace(grads={})}),
    )  # fmt: skip


def test_a_use_in_words(monkeypatch):
    parts, total, same = parts_of(20)
    held = traces(parts, 20)
    got, wanted = total + 3 * same, total + same
    monkeypatch.setattr(words, "explained", lambda case, diagnosis, others: (diagnosis, others))
    every = [cell(got, wanted, rank) for rank in RANKS]
    ((said, others),) = words.counted_by_uses(case(every, held), 0)
    assert said.cause == (
        "p is used in several places, and what comes through step.py:7 `return y ** p` (Pow) is "
        "counted 3 times as often as it should be; what comes through step.py:3 `y = x * p` (Mul) "
        "is counted as it should be"
    )
    assert said.because[0] == (
        "what rank 0-2 get through step.py:7 is all the same: each has the whole of it, and their "
        "sum counts it once for every rank"
    )
    assert (said.kind, said.standing, said.ranks, others) == (
        "counted_by_use", "proved", (0, 1, 2), []
    )  # fmt: skip
    for trace in held.values():
        trace.uses["b"] = trace.uses["c"] = trace.uses["p"]
        trace.own_at["b"] = trace.own_at["c"] = trace.own_at["p"]
    too, unlike = cell(got, wanted), cell(total + 2 * same, wanted)
    too.name, unlike.name = "b", "c"
    ((said, _),) = words.counted_by_uses(case([*every, too, unlike], held), 0)
    assert said.cause.endswith("is counted as it should be; so it is in b")
    assert said.because[-1].startswith(
        "in c what comes through step.py:7 `return y ** p` (Pow) is "
    )
    other = SimpleNamespace(**{**vars(cell(got, wanted)), "name": "q"})
    ((said, others),) = words.counted_by_uses(case([cell(got, wanted), other], held), 0)
    assert (said.standing, others) == ("likely", ["q"])
    third = SimpleNamespace(**{**vars(other), "name": "r"})
    assert not [*words.counted_by_uses(case([cell(got, wanted), other, third], held), 0)]
    assert not [*words.counted_by_uses(case([cell(got, wanted)], {}), 0)]
    ((said, _),) = words.counted_by_uses(case([cell(total, wanted)], held), 0)
    assert "(Pow) is not in its gradient at all" in said.cause
    ((said, _),) = words.counted_by_uses(case([cell(wanted, total)], held), 0)
    assert "(Pow) should not be in its gradient, and is" in said.cause


def test_the_scale_is_that_of_a_parameter_that_is_right():
    own = {rank: random(20, 20 + rank) for rank in RANKS}
    held = {
        rank: Trace(
            calls=(), outputs=(), gradients=(), sources={}, own={"q": own[rank][None]},
            own_at={"q": torch.arange(20)},
        )
        for rank in RANKS
    }  # fmt: skip
    total = sum(own.values()) / 7
    right = SimpleNamespace(**{**vars(cell(total, total)), "name": "q"})
    assert words._scale(case([], held, [right])) == pytest.approx(1 / 7)
    uneven = own[0] / 7 + own[1] + own[2]
    right = SimpleNamespace(**{**vars(cell(uneven, uneven)), "name": "q"})
    assert words._scale(case([], held, [right])) is None
    assert words._scale(case([right], held)) is None


def test_what_each_line_gives_of_a_gradient_is_recorded(tmp_path):
    p = torch.nn.Parameter(random(3, 1))
    q = torch.nn.Parameter(random(3, 2))
    own = OwnGradients()
    for name, param in (("p", p), ("q", q)):
        own.look_at(name, param, None)
    uses, x = Uses(own), random(3, 3)
    computations = Computations(lambda: ((), 0))
    computations.begins = uses.begin
    with torch.autograd.set_detect_anomaly(True, check_nan=False), computations:
        for times in (1, 2):  # two micro-batches
            y = p * x * times
            loss = (y + p.square()).sum() + (q * x).sum()
            loss.backward(retain_graph=times == 2)
        loss.backward()
    own.close()
    found = uses.taken()
    assert [*found] == ["p"]  # one line uses q
    by_code = {use.code: gave for use, gave in found["p"].items()}
    assert torch.allclose(by_code["y = p * x * times"], 5 * x)
    (square,) = [gave for code, gave in by_code.items() if "square" in code]
    assert torch.allclose(square, 3 * 2 * p.detach())
    trace = Trace(calls=(), outputs=(), gradients=(), sources={}, uses=found)
    write_trace(tmp_path / "t", trace)
    back = read_trace(tmp_path / "t").uses
    assert [*back["p"]] == [*found["p"]]
    assert all(torch.equal(back["p"][use], gave) for use, gave in found["p"].items())
