"""Lines that go by the hash of a string, as they are written."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from sumgrad.subjects import hashed
from sumgrad.subjects.hashed import hashed_lines, is_salted, lines_by_hash


@pytest.mark.parametrize(
    "code",
    [
        "for name in set(params): reduce(name)",
        "for name in {n for n in params}: reduce(name)",
        "for name in {'a', 'b'}: reduce(name)",
        "for name in {first, second}: reduce(name)",
        "names = set(params)\nfor n in names: reduce(n)",
        "self.names = set(params)\nfor n in self.names: reduce(n)",
        "names: set[str] = set(params)\nmore = names | {'x'}\nout = [p[n] for n in more]",
        "names = frozenset(params)\nout = list(names)",
        "first = next(iter(set(params)))",
        "out = [*set(params)]",
        "for i, n in enumerate(set(params)): reduce(n)",
        "for n in a.keys() & b.keys(): reduce(n)",
        "for n in a.keys() - kept: reduce(n)",
        "for n in set(a).union(b): reduce(n)",
        "left = set(params)\nlast = left.pop()",
        "owner = hash(name) % world",
        "def f(x):\n    return hash(x)",
    ],
)
def test_a_line_that_goes_by_it(code):
    assert lines_by_hash(code) == [1 + code.count("\n")]


@pytest.mark.parametrize(
    "code",
    [
        "for n in sorted(set(params)): reduce(n)",
        "known = set(params)\nassert 'w' in known and len(known) == 3",
        "for i in {1, 2, 3}: send(i)",  # the hash of a whole number is the number
        "for i in set(range(4)): send(i)",
        "for i in set(range(4)) - set(kept): send(i)",
        "for n in params: reduce(n)",
        "for n in a.keys(): reduce(n)",
        "n = a - b\nfor x in n: send(x)",
        "last = stack.pop()",
        "value = held.pop('w')",
        "class P:\n    def __hash__(self):\n        return hash(self.name)",
        "x = model.hash(name)",
    ],
)
def test_a_line_that_does_not(code):
    assert lines_by_hash(code) == []


def test_names_of_one_function_are_none_of_another():
    code = "def f():\n    x = set(a)\ndef g(x):\n    return list(x)"
    assert lines_by_hash(code) == []


def test_only_the_users_modules_are_read(tmp_path, monkeypatch):
    modules = {}
    for place in ("mine.py", "site-packages/theirs.py", "broken.py"):
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_text("x =\n" if "broken" in place else "\nfor n in set(names):\n    pass\n")
        module = types.ModuleType(f"of_the_test_{path.stem}")
        module.__file__ = str(path)
        modules[module.__name__] = module
    modules |= {"json": json, "torch": torch, "of_ours": hashed, "built_in": sys}
    monkeypatch.setattr(sys, "modules", modules)
    assert hashed_lines() == ("mine.py:2",)


def test_no_more_lines_than_tell(tmp_path, monkeypatch):
    path = tmp_path / "many.py"
    path.write_text("list(set(a))\n" * 30)
    module = types.ModuleType("of_the_test_many")
    module.__file__ = str(path)
    monkeypatch.setattr(sys, "modules", {"of_the_test_many": module})
    assert hashed_lines() == tuple(f"many.py:{n}" for n in range(1, hashed.MOST_LINES + 1))


@pytest.mark.parametrize(
    ("given", "salted"), [(None, True), ("random", True), ("0", False), ("7", False)]
)
def test_whoever_sets_the_salt_has_one_for_all(monkeypatch, given, salted):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    assert is_salted() is salted
