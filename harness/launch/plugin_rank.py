"""What a rank does for the pytest plugin: one test function, as pytest itself would call it.

The test's fixtures were made by pytest in its own process; their values arrive here by cloudpickle.
The test's module is imported again, under its own name and with its asserts rewritten. How the test
ended goes into the rank's end record; of an exception, its rendering and itself are written beside.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pickle
import sys
import threading
import unittest
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Literal

import cloudpickle
import pytest
import torch
from sumgrad.launch.guard import RankEnv, RankGuard
from sumgrad.record.endings import rank_file

CALL_FILE = "call.pickle"
ERROR_SUFFIX = ".error.pickle"
MUTABLE = (list, dict, set, deque)
PLAIN = (int, float, complex, str, bytes, bool, type(None))
MOST_SHOWN, MOST_HELD = 200, 10_000  # characters of a value; what is looked at of a container
DEPTH = 4  # of containers in containers, that are looked at
Ending = Literal["passed", "skipped", "xfailed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A test function to be called on every rank.

    file, module: where it is defined and the name that module has in pytest's process. name: as
    collected, within the module. arguments: pickled, as cloudpickle does. attributes, of_class,
    of_module: what fixtures set on the test's instance, class and module, pickled one by one; None
    where that is not possible. torn_down: arguments whose fixtures go on after the test, and
    the names that stand in those that may fail it then; None of others. warnings: filters as pytest
    writes them, and whether they are to be escaped. ranks_as, monkeypatch_as: the names of the
    parameters that each rank fills itself. style: of pytest's tracebacks.
    """

    file: Path
    module: str
    name: str
    arguments: bytes
    attributes: dict[str, bytes | None] = field(default_factory=dict)
    of_class: dict[str, bytes | None] = field(default_factory=dict)
    of_module: dict[str, bytes | None] = field(default_factory=dict)
    torn_down: dict[str, frozenset[str] | None] = field(default_factory=dict)
    warnings: tuple[tuple[str, bool], ...] = ()
    ranks_as: str | None = "ranks"
    monkeypatch_as: str | None = None
    rewrite_asserts: bool = True
    style: str = "long"
    show_locals: bool = False

    def store(self, directory: Path) -> None:
        """Write it where the ranks of a run directory look for it."""
        (directory / CALL_FILE).write_bytes(cloudpickle.dumps(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An exception that ended a test on a rank. text: as pytest renders it; pickled: None where
    the exception cannot be sent."""

    text: str
    pickled: bytes | None

    def exception(self) -> Exception | None:
        """The exception itself, if it arrives whole and ends a test only."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:
            return None
        return error if isinstance(error, Exception) else None


def run_test_on_rank(guard: RankGuard) -> dict[str, str]:
    """Make the default group, call the test function, end the group; say how the test ended."""
    from sumgrad.launch.rank import local_group

    call: Call = pickle.loads((guard.env.directory / CALL_FILE).read_bytes())
    with _reported(guard.env, call):
        with _undone():  # what its top level sets, the test's fixtures may have set otherwise
            module = import_test_module(call.file, call.module, rewrite=call.rewrite_asserts)
        arguments = cloudpickle.loads(call.arguments)
        with local_group(guard):
            return _ending(lambda: _call(module, call, arguments, guard.env))


def read_error(directory: Path, rank: int) -> RankError | None:
    """What `run_test_on_rank` wrote of an exception on a rank; None if it wrote nothing."""
    try:
        return RankError(**pickle.loads(rank_file(directory, rank, ERROR_SUFFIX).read_bytes()))
    except (OSError, EOFError, pickle.UnpicklingError, TypeError):
        return None


@contextmanager
def _undone() -> Iterator[None]:
    """Leave environment, working directory and sys.path as they were before."""
    environment, directory, paths = dict(os.environ), Path.cwd(), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:] = paths


def _ending(run: Callable[[], None]) -> dict[str, str]:
    ending: Ending = "passed"
    try:
        run()
        return {"ending": ending, "reason": ""}
    except pytest.skip.Exception as skipped:
        return {"ending": "skipped", "reason": str(skipped.msg or "")}
    except unittest.SkipTest as skipped:  # raised again by pytest's process, it would be a skip
        return {"ending": "skipped", "reason": str(skipped)}
    except pytest.xfail.Exception as failed:
        return {"ending": "xfailed", "reason": str(failed.msg or "")}


def _call(module: ModuleType, call: Call, arguments: dict[str, Any], env: RankEnv) -> None:
    given = dict(arguments)
    with pytest.MonkeyPatch.context() as patch:
        if call.ranks_as:
            given[call.ranks_as] = env
        if call.monkeypatch_as:
            given[call.monkeypatch_as] = patch
        before = {n: _held(given[n], names) for n, names in call.torn_down.items()}
        with _set_up(module, call) as function, _filtered(call), _with_what_nobody_raises():
            result = function(**given)
            if inspect.isawaitable(result) or inspect.isasyncgen(result):
                with suppress(AttributeError):
                    result.close()  # type: ignore[union-attr]
                raise TypeError(f"{call.name} is async: a test on ranks is a plain function")
            if inspect.isgenerator(result):
                raise TypeError(f"{call.name} yields: a test on ranks is a plain function")
            if result is not None:
                warnings.warn(
                    f"{call.name} returned {_shown(result)}: a test is to assert, and to return "
                    f"nothing",
                    pytest.PytestReturnNotNoneWarning,
                    stacklevel=1,
                )
        changed = [n for n, names in call.torn_down.items()
                   if _held(given[n], names) != before[n]]  # fmt: skip
        if changed:
            raise AssertionError(
                f"the test has changed {changed[0]!r}, {_shown(given[changed[0]])}, and the "
                f"fixture that gave it goes on in pytest's own process, which does not see it: "
                f"look at it in the test"
            )


@contextmanager
def _with_what_nobody_raises() -> Iterator[None]:
    """What threads raise, and finalizers, are warnings at the end, as pytest has them: its filters
    may make errors of them."""
    of_threads: list[threading.ExceptHookArgs] = []
    of_finalizers: list[sys.UnraisableHookArgs] = []
    before = threading.excepthook, sys.unraisablehook
    threading.excepthook, sys.unraisablehook = of_threads.append, of_finalizers.append
    try:
        yield
        for one in of_threads:
            warnings.warn(
                f"a thread raised {one.exc_type.__name__}: {one.exc_value}",
                pytest.PytestUnhandledThreadExceptionWarning,
                stacklevel=1,
            )
        for left in of_finalizers:
            warnings.warn(
                f"nobody could be told of {left.exc_type.__name__}: {left.exc_value}",
                pytest.PytestUnraisableExceptionWarning,
                stacklevel=1,
            )
    finally:
        threading.excepthook, sys.unraisablehook = before


def _held(value: object, names: frozenset[str] | None, depth: int = DEPTH) -> object:
    """What a fixture may look at later: all that containers hold, a tensor's numbers, of an object
    that is none of torch's what containers in it hold, and all else of it under one of the names
    that the fixture has, or any where that is one of its methods. Of a fixture that only ends what
    it gave, without names, how much a container holds. Of anything else nothing, which a test may
    well use up."""
    depth = 0 if names is None else depth
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, (*MUTABLE, tuple, frozenset)):
        if not depth or len(value) > MOST_HELD:
            return len(value)
        if isinstance(value, dict):
            return [(repr(key), _held(one, names, depth - 1)) for key, one in value.items()]
        held = [_held(one, names, depth - 1) for one in value]
        return sorted(map(repr, held)) if isinstance(value, set | frozenset) else held
    if isinstance(value, torch.Tensor):
        small = depth and value.numel() <= MOST_HELD and value.device.type == "cpu"
        return repr(value.detach().tolist()) if small else None
    of_torch = any(one.__module__.partition(".")[0] == "torch" for one in type(value).__mro__)
    own = getattr(value, "__dict__", None)
    if not depth or of_torch or not isinstance(own, dict):
        return None
    by_method = any(callable(getattr(type(value), name, None)) for name in names or ())
    return {
        name: _held(v, names, depth - 1)
        for name, v in own.items()
        if isinstance(v, MUTABLE)
        or (isinstance(v, (*PLAIN, torch.Tensor)) and (by_method or name in (names or ())))
    }


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."


@contextmanager
def _filtered(call: Call) -> Iterator[None]:
    """Warnings as pytest's configuration and marks have them."""
    from _pytest.config import parse_warning_filter

    with warnings.catch_warnings():
        for text, escape in call.warnings:
            warnings.filterwarnings(*parse_warning_filter(text, escape=escape))
        yield


@contextmanager
def _set_up(module: ModuleType, call: Call) -> Iterator[Callable[..., Any]]:
    """The test function, between the xunit-style setups and teardowns that are its own.

    They run on every rank: what they set in a module, a class or an instance is this process's.
    """
    *classes, last = call.name.split(".")
    with _between(module, ("setup_module", "setUpModule"), ("teardown_module",), module):
        lost = _set_attributes(module, call.of_module)
        if not classes:
            _check_attributes(module, lost, module.__name__)
            function = getattr(module, last)
            with _between(module, ("setup_function",), ("teardown_function",), function):
                yield function
            return
        cls: Any = module
        for name in classes:
            cls = getattr(cls, name)
        with _between(cls, ("setup_class",), ("teardown_class",), cls):
            lost += _set_attributes(cls, call.of_class)
            instance = cls()
            lost += _set_attributes(instance, call.attributes)
            method = getattr(instance, last)
            with _between(instance, ("setup_method",), ("teardown_method",), method):
                _check_attributes(instance, lost, "self")
                yield method


@contextmanager
def _between(owner: Any, before: tuple[str, ...], after: tuple[str, ...], given: Any) -> Any:
    _call_first(owner, before, given)
    try:
        yield
    finally:
        _call_first(owner, after, given)


def _call_first(owner: Any, names: tuple[str, ...], given: Any) -> None:
    """Call the first of these that exists, with the argument that it may take."""
    for name in names:
        function = getattr(owner, name, None)
        if callable(function):
            function(*[given][: len(inspect.signature(function).parameters)])
            return


def _set_attributes(owner: Any, attributes: Mapping[str, bytes | None]) -> list[str]:
    """Returns those that could not be sent, and are not there."""
    for name, value in attributes.items():
        if value is not None:
            setattr(owner, name, cloudpickle.loads(value))
    return [name for name, value in attributes.items() if value is None]


def _check_attributes(owner: Any, unsent: list[str], called: str) -> None:
    lost = [name for name in unsent if not hasattr(owner, name)]
    if lost:
        raise TypeError(
            f"{called}.{lost[0]} was set by a fixture in pytest's own process and cannot be sent "
            f"to the ranks; make it in setup_method or in the test"
        )


@contextmanager
def _reported(env: RankEnv, call: Call) -> Iterator[None]:
    """Write an exception down as pytest shows it; then it goes on."""
    try:
        yield
    except BaseException as error:
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:
            pickled = None
        shown = {"text": _rendered(error, call), "pickled": pickled}
        env.file(ERROR_SUFFIX).write_bytes(pickle.dumps(shown))
        raise


def _rendered(error: BaseException, call: Call) -> str:
    """As pytest renders it, from the test's own file on."""
    info = pytest.ExceptionInfo.from_exception(error)
    own = info.traceback.cut(path=call.file)
    if own:
        info.traceback = own
    style: Any = call.style if call.style in ("long", "short", "line", "no", "native") else "long"
    try:
        return str(info.getrepr(style=style, showlocals=call.show_locals))
    except Exception:
        return str(info.getrepr(style="native"))


class _Rewriting(importlib.machinery.SourceFileLoader):
    """Compiles a test module with pytest's rewriting of asserts; keeps no bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        from _pytest.assertion.rewrite import rewrite_asserts

        path = self.get_filename(fullname)
        source = self.get_data(path)
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        return compile(tree, path, "exec", dont_inherit=True)


def import_test_module(file: Path, name: str, *, rewrite: bool) -> ModuleType:
    """Import a test module under the name that it has in pytest's own process."""
    for parent in _parents(name):  # for relative imports
        with suppress(ImportError):
            importlib.import_module(parent)
    loader_type = _Rewriting if rewrite else importlib.machinery.SourceFileLoader
    loader = loader_type(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None, (name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def is_unittest(cls: Any) -> bool:
    """Whether a test's class is unittest's: then pytest never calls its function itself."""
    return inspect.isclass(cls) and issubclass(cls, unittest.TestCase)
