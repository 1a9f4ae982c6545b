"""What functions have cached in one dtype is gone in another."""

from __future__ import annotations

import functools
import sys
import types

import torch
from sumgrad.subjects.program import caches
from sumgrad.subjects.program.caches import forget_those_of_others

CODE = """
import functools

import torch

@functools.lru_cache(None)
def table():
    return torch.ones(2)

@functools.lru_cache(maxsize=8)
def bounded():
    return torch.ones(2), "two"

class Rotary:
    @functools.cache
    def of_a_class():
        return [torch.ones(2)]
    @staticmethod
    @functools.cache
    def static():
        return torch.ones(2)

@functools.cache
def registry():
    return {"table": torch.ones(2)}

@functools.cache
def group():
    return object()

@functools.cache
def numbers():
    return torch.arange(3)
"""


def test_another_dtype_makes_tables_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "_of_last", [])
    mine = types.ModuleType("mine_with_caches")
    mine.__file__ = str(tmp_path / "mine.py")
    exec(CODE, vars(mine))
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    made = [mine.table, mine.bounded, mine.Rotary.of_a_class, mine.Rotary.static]
    stay = [mine.registry, mine.group, mine.numbers]
    others = [id(make()) for make in stay]
    alive: list[object] = []  # so that no id is used again

    def tables():
        alive.extend(make() for make in made)
        return [id(make()) for make in made]

    first = tables()
    forget_those_of_others(torch.float64)  # what was before was in no dtype that is known
    assert tables() == first
    forget_those_of_others(torch.float64)
    assert tables() == first
    forget_those_of_others(torch.float32)
    second = tables()
    assert not set(second) & set(first)
    forget_those_of_others(torch.float32)
    assert tables() == second
    assert [id(make()) for make in stay] == others


def test_nobody_elses_caches_are_cleared(monkeypatch):
    monkeypatch.setattr(caches, "_of_last", [torch.float32])
    theirs = types.ModuleType("theirs_with_caches")
    theirs.__file__ = "/usr/lib/python3/site-packages/theirs.py"
    theirs.table = functools.lru_cache(None)(object)
    monkeypatch.setitem(sys.modules, theirs.__name__, theirs)
    first = theirs.table()
    forget_those_of_others(torch.float64)
    assert theirs.table() is first
