"""Functions that one calls, as they stand in its file."""

from __future__ import annotations

import pytest
from sumgrad.diagnose.explainers.by_modules.backwards.derivatives import what_they_call
from sumgrad.diagnose.modules.autograd.derivatives import OwnFormula
from sumgrad.diagnose.modules.in_code.calls_in_source import Called, called_from

FILE = """\
def slope(x, weight):
    return helper(x)


def helper(x):
    return helper(-x) if x < 0 else outside(x)


class Plain:
    @staticmethod
    def turn(y, scale):
        return y

    @classmethod
    def pull(cls, ctx, g):
        return slope(cls.turn(g, 2), g) + g.sum()

    @staticmethod
    def backward(ctx, g):
        return Plain.pull(ctx, g)


class Ported(Plain):
    @staticmethod
    def turn(y, scale):
        return y * scale

    @staticmethod
    def backward(ctx, g):
        return Ported.pull(ctx, g)


class Alone(Function):
    @staticmethod
    def backward(ctx, g):
        return g.sum(), Function.apply(g)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(FILE)
    return path


def test_functions_are_followed_to_those_of_its_own_class(file):
    def at(line, name, *unread):
        return Called(name=name, line=f"{file}:{line}", unread=unread)

    turn, of_base = at(25, "turn"), at(11, "turn", "scale")
    others = [at(1, "slope", "weight"), at(5, "helper")]
    assert called_from(f"{file}:29") == [at(15, "pull"), others[0], turn, others[1]]
    assert called_from(f"{file}:28") == called_from(f"{file}:29")  # of the decorator
    assert called_from(f"{file}:19") == [at(15, "pull"), others[0], of_base, others[1]]
    assert called_from(f"{file}:1") == [others[1]]
    assert called_from(f"{file}:5") == []
    assert called_from(f"{file}:35") == []


@pytest.mark.parametrize("line", ["", ":3", "FILE:x", "FILE:4", "gone.py:3"])
def test_what_cannot_be_read_calls_nothing(line, file):
    assert called_from(line.replace("FILE", str(file))) == []


def test_a_file_that_is_no_python_calls_nothing(tmp_path):
    path = tmp_path / "b.py"
    path.write_text("def f(:\n")
    assert called_from(f"{path}:1") == []


def test_what_a_backward_calls_is_said(file):
    found = [OwnFormula(function="Ported", written=f"{file}:29", told=())]
    assert what_they_call(found) == [
        "the backward of Ported calls pull at a.py:15, slope at a.py:1, which does not read "
        "weight, turn at a.py:25 and 1 more"
    ]
    assert what_they_call([]) == []
    assert what_they_call([OwnFormula(function="F", written=f"{file}:35", told=())]) == []
