"""A line that is right when it runs first, and wrong when it runs again: steps that really ran."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.in_code import wrong_later as words
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.in_code.wrong_later import wrong_later
from sumgrad.subjects.program.watched.computations import Computations

G = torch.Generator().manual_seed(0)
H = torch.randn(4, 3, generator=G, dtype=torch.float64)
A = torch.randn(4, 4, generator=G, dtype=torch.float64)
OWN, REST = slice(0, 2), slice(2, 4)
POWERS = [torch.linalg.matrix_power(A, n) for n in (1, 2, 3)]


def whole(h):
    for _ in range(3):
        h = A @ h
    return h


def in_parts(h, fetch):
    """A rank's own rows; those of others are the same in every turn, or as they are then."""
    all_rows, mine = h, h[OWN]
    for turn in range(3):
        rest = all_rows[REST] if fetch else h[REST]
        mine = A[OWN, OWN] @ mine + A[OWN, REST] @ rest
        all_rows = POWERS[turn] @ h
    return mine


def lines_of(function, *more):
    with Computations(lambda: ((), 0)) as computations:
        function(H.clone().requires_grad_(), *more).sum().backward()
    return computations.computed()


def lines(*ranks):
    held = {r: SimpleNamespace(computed=one) for r, one in enumerate(ranks)}
    single = SimpleNamespace(computed=lines_of(whole), params={})
    return Lines(SimpleNamespace(ranks=held, single=single), (), 1e-8)


def test_the_turn_is_told_at_which_it_goes_wrong():
    found = next(wrong_later(lines(lines_of(in_parts, False)), 0))
    assert found.mine.part == "A[OWN, OWN] @ mine + A[OWN, REST] @ rest"
    assert (found.rank, found.since, found.times) == (0, 1, 3)


def test_a_line_that_is_right_in_each_turn_is_none():
    assert [*wrong_later(lines(lines_of(in_parts, True)), 0)] == []
    assert [*wrong_later(lines(lines_of(whole)), 0)] == []


def test_a_first_turn_that_gives_what_it_takes_says_nothing():
    def powers(h):
        return sum(torch.linalg.matrix_power(A, turn) @ h for turn in (1, 2))

    told = [one.mine.function for one in wrong_later(lines(lines_of(powers)), 0)]
    assert "linalg_matrix_power" not in told


def test_what_takes_what_goes_wrong_then_is_not_told():
    def then(h):
        for turn in range(2):
            odd = h.sin() + (1.5 + turn)
            h = odd * A
        return h

    def single(h):
        for _ in range(2):
            odd = h.sin() + 1.5
            h = odd * A
        return h

    with Computations(lambda: ((), 0)) as computations:
        then(A.clone().requires_grad_()).sum().backward()
    with Computations(lambda: ((), 0)) as there:
        single(A.clone().requires_grad_()).sum().backward()
    traces = SimpleNamespace(
        ranks={0: SimpleNamespace(computed=computations.computed())},
        single=SimpleNamespace(computed=there.computed(), params={}),
    )
    assert [one.mine.part for one in wrong_later(Lines(traces, (), 1e-8), 0)] == [
        "h.sin() + (1.5 + turn)"
    ]


@pytest.mark.parametrize(
    ("kind", "forward", "line", "told"),
    [
        ("open", None, (), True),
        ("backward", None, (), True),
        ("factor", None, (), False),
        ("open", "found", (), False),  # a module tells it
        ("open", None, ("line",), False),
    ],
)
def test_it_leads_where_no_module_and_no_line_tells_more(monkeypatch, kind, forward, line, told):
    held = lines(*[lines_of(in_parts, False)] * 2)
    monkeypatch.setattr(words, "looked", lambda case: "look")
    monkeypatch.setattr(words, "first_wrong_forward", lambda look: forward)
    monkeypatch.setattr(words, "lines_that_differ", lambda case: line)
    monkeypatch.setattr(words, "known_lines", lambda case: held)
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: None, 1: None}))
    said = words.with_the_turn(case, Diagnosis(cause="open: w is wrong", kind=kind))
    if told:
        assert "runs 3 times on rank 0-1: the first time it gives what the single" in said.cause
        assert "from the second on what that has nowhere" in said.cause
        assert said.because == ("w is wrong",)
    else:
        assert said.cause == "open: w is wrong"
