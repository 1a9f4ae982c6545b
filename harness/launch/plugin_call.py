"""What pytest's own process sends to the ranks of a test: the function, arguments, surroundings."""

from __future__ import annotations

import dis
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle
import pytest
from sumgrad.launch.plugin_rank import Call

# Names in a function that may fail a test: of pytest's rewritten asserts, too.
JUDGING = {"@pytest_ar", "fail", "AssertionError"}
SetThere = Mapping[Any, Mapping[str, Any]]


def refuse_patches(item: pytest.Function) -> None:
    """What a fixture patched in this process would silently be unpatched on the ranks."""
    patch: Any = item.funcargs.get("monkeypatch")
    if not isinstance(patch, pytest.MonkeyPatch):
        return
    patched = [f"attribute {name!r} of {_name_of(target)}" for target, name, _ in patch._setattr]
    patched += [
        f"key {key!r} of a {type(held).__name__}"
        for held, key, _ in patch._setitem
        if held is not os.environ
    ]
    if patched:
        pytest.fail(
            f"{item.name}: a fixture has patched {patched[0]} in pytest's own process, and ranks "
            f"are processes of their own; patch it in the test itself, where `monkeypatch` is "
            f"each rank's (environment, chdir and syspath_prepend do reach the ranks)",
            pytrace=False,
        )


def _name_of(target: object) -> str:
    return str(getattr(target, "__name__", type(target).__name__))


def call_of(item: pytest.Function, ranks_as: Sequence[str], set_by_fixtures: SetThere) -> Call:
    """What the ranks are to call: the function as it was collected, its arguments, what fixtures
    have set. ranks_as: the argument that each rank fills itself, if there is one. set_by_fixtures:
    by class or module, all that any has set there."""
    names = item._fixtureinfo.argnames
    values = {name: item.funcargs[name] for name in names}
    patch_as = next((n for n, v in values.items() if isinstance(v, pytest.MonkeyPatch)), None)
    arguments = {n: v for n, v in values.items() if n not in (*ranks_as, patch_as)}
    option = item.config.getoption
    classes = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    return Call(
        file=Path(str(item.path)),
        module=item.module.__name__,
        name=".".join([*classes, item.originalname]),  # a qualified name may be a base class's
        arguments=pickled(item.name, arguments),
        attributes=_attributes(vars(item.instance) if item.cls is not None else {}),
        of_class=_attributes(_still_there(item.cls, set_by_fixtures)),
        of_module=_attributes(_still_there(item.module, set_by_fixtures)),
        torn_down={
            n: _names_in(code) if _judges(code) else None
            for n in arguments
            if (code := _goes_on_after(item, n)) is not None
        },
        warnings=_warnings(item),
        ranks_as=next(iter(ranks_as), None),
        monkeypatch_as=patch_as,
        rewrite_asserts=option("assertmode") == "rewrite",
        style=str(option("tbstyle")),
        show_locals=bool(option("showlocals")),
    )


def _still_there(owner: Any, set_by_fixtures: SetThere) -> dict[str, Any]:
    """What stands in a class or module as a fixture has set it."""
    known = set_by_fixtures.get(owner, {}) if owner else {}
    return {name: new for name, new in known.items() if vars(owner).get(name, known) is new}


def _goes_on_after(item: pytest.Function, name: str) -> CodeType | None:
    """Of a fixture that goes on after the test, and may look at what that has made of it."""
    defined = item._fixtureinfo.name2fixturedefs.get(name)
    function = inspect.unwrap(defined[-1].func) if defined else None
    code = getattr(function, "__code__", None)
    finalizes = code is not None and "addfinalizer" in code.co_names
    return code if finalizes or inspect.isgeneratorfunction(function) else None


def _judges(code: CodeType) -> bool:
    """Whether it may fail the test by what it sees, itself or in a function in it."""
    fails = not JUDGING.isdisjoint(code.co_names)
    raises = any(one.opname == "RAISE_VARARGS" for one in dis.get_instructions(code))
    within = (one for one in code.co_consts if isinstance(one, CodeType))
    return fails or raises or any(map(_judges, within))


def _names_in(code: CodeType) -> frozenset[str]:
    """Those that it has, and functions in it."""
    within = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*map(_names_in, within))


def _warnings(item: pytest.Function) -> tuple[tuple[str, bool], ...]:
    """Filters as pytest has them, and whether they are to be escaped, in the order to be set."""
    config = item.config
    given = [(text, False) for text in config.getini("filterwarnings")]
    given += [(text, True) for text in config.known_args_namespace.pythonwarnings or ()]
    marks = item.iter_markers(name="filterwarnings")
    return (*given, *((str(text), False) for mark in marks for text in mark.args))


def pickled(test: str, arguments: dict[str, Any]) -> bytes:
    for name, value in arguments.items():
        of_pytest = type(value).__module__.partition(".")[0] in ("pytest", "_pytest")
        problem = "acts on pytest's own process" if of_pytest else _unsendable(value)
        if problem and not isinstance(value, os.PathLike):
            pytest.fail(
                f"{test}: argument {name!r} is a {type(value).__name__}, which {problem}; it "
                f"cannot be sent to the ranks",
                pytrace=False,
            )
    pickled: bytes = cloudpickle.dumps(arguments)
    return pickled


def _unsendable(value: object) -> str | None:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        return f"does not pickle ({type(error).__name__}: {error})"
    return None


def _attributes(held: Mapping[str, Any]) -> dict[str, bytes | None]:
    """Pickled one by one; None where that is not possible."""
    return {
        name: None if _unsendable(value) else cloudpickle.dumps(value)
        for name, value in held.items()
    }
