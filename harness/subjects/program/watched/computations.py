"""What a user's lines compute outside of torch's own modules: by value, line by line.

A step and the single process's loss are often written in the same words. Where both call the same
function with the same tensor beside another one, that other one is where they part. And the first
line that gives what the single process has nowhere, of what it has, is where a step goes wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import torch
from sumgrad.record.computed import LARGE, MODULE, Change, Computation, Computed, SetGrad
from sumgrad.record.line import Line
from sumgrad.subjects.program.functions.derivatives import Derivatives
from sumgrad.subjects.program.functions.every_apply import FROM_A_USERS_LINE, around_every_apply
from sumgrad.subjects.program.placed.seen_modules import is_trial
from sumgrad.subjects.program.watched.frames import site_of, users_frame, within, words
from sumgrad.subjects.program.watched.kept import Kept
from sumgrad.subjects.program.watched.kept_values import KeptValues
from sumgrad.subjects.program.watched.leaves import Leaves
from sumgrad.subjects.program.watched.made_at import MadeAt
from sumgrad.subjects.program.watched.names_in_scope import NamesInScope
from sumgrad.subjects.program.watched.watch import ModuleWatch
from sumgrad.subjects.users_line import users_lines
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

MOST_CALLS = 40_000
MOST_RESULTS = 8  # of one call
ALIASES = {
    "true_divide": "div", "truediv": "div", "itruediv": "div", "divide": "div", "rtruediv": "rdiv",
    "multiply": "mul", "rmul": "mul", "imul": "mul", "radd": "add", "iadd": "add",
    "subtract": "sub", "isub": "sub", "mm": "matmul", "bmm": "matmul",
}  # fmt: skip
# Torch's own files on the way to the backward of a Function, and to what a checkpoint runs again.
BACKWARDS = ("autograd/function.py", "utils/checkpoint.py")
ENGINE = "_engine_run_backward"  # what every backward ends in
UNSEEN = {"get", "set", "register_hook", "backward", "requires_grad", "retain_grad"}


class Computations(TorchFunctionMode):
    """Between `with` and its end, what a user's lines compute in the forward, and of these lines
    and modules what they compute when the backward runs them again.

    now: the modules whose forward runs, and how many calls of modules there were. derivatives:
    keeps what Functions were given and gave.
    """

    def __init__(
        self, now: Callable[[], tuple[Sequence[str], int]], derivatives: Derivatives | None = None
    ) -> None:
        super().__init__()
        self._now = now
        self.derivatives = derivatives or Derivatives()
        self._functions: list[str] = []  # Functions whose forward runs
        self._forward = _Calls(KeptValues(in_a_function=lambda: bool(self._functions)))
        self._backward = _Calls(KeptValues(with_gradients=False))
        self._hooks = _Calls(self._forward.values)
        self._hooks_at: list[int] = []
        self._in_a_hook = False
        self._sites: set[str] = set()  # of what is in the forward
        self._ran: dict[str, dict[Line, None]] = {}
        self._names = NamesInScope()
        self._changes: list[Change] = []
        self._lines = MadeAt()
        self._no_more_applies: Callable[[], None] = lambda: None
        self._engine: Any = None
        self._kept = Kept()
        self._leaves = Leaves()
        self._reads: dict[Line, set[bool]] = {}  # of parameters' gradients: any there
        self._set_grads: dict[SetGrad, None] = {}
        self.name_of: Callable[[Tensor], str] = lambda _: ""  # of a parameter
        self.starts: Callable[..., object] = lambda *_: None  # a backward from a gradient
        self.begins: Callable[[Sequence[Tensor]], object] = lambda _: None  # any backward

    def computed(self) -> Computed:
        """Once the step is over: forwards of Functions are run once more for it."""
        kept = self._forward.values
        return Computed(
            computations=tuple(self._forward.found),
            values=tuple(kept.values),
            gradients=(kept.gradients,),
            with_graph=frozenset(kept.with_graph),
            arrivals={n: tuple(own) for n, own in kept.arrivals.items()},
            unlike=tuple(self._kept.unlike),
            hooks=tuple(zip(self._hooks_at, self._hooks.found, strict=True)),
            again=tuple(self._backward.found),
            values_again=tuple(self._backward.values.values),
            changes=tuple(self._changes),
            uncleared=tuple(self._leaves.uncleared),
            ran={within: tuple(lines) for within, lines in self._ran.items()},
            names=self._names.found(),
            set_grads=tuple(self._set_grads),
            found_none=tuple(line for line, some in self._reads.items() if some == {False}),
            derivatives=tuple(self.derivatives.found()),
            backs=tuple(self.derivatives.backs()),
        )

    def __enter__(self) -> Computations:
        """A Function's `apply` is none of torch's functions: it is seen by itself."""
        self._no_more_applies = around_every_apply(self._around)
        self._engine = engine = getattr(torch.autograd, ENGINE, None)
        if engine is not None:
            setattr(torch.autograd, ENGINE, functools.wraps(engine)(partial(self._run, engine)))
        self._kept.__enter__()
        super().__enter__()
        return self

    def _around(self, cls: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a Function's call gives."""
        seen = self._applied(cls, args, kwargs)
        before = None if seen is None else self.derivatives.before(args)
        self._functions.append(cls.__name__)
        try:
            out = call(*args, **kwargs)
        finally:
            self._functions.pop()
        self._add(seen, out)
        if seen is not None and not kwargs and not is_backward():
            number = len(self._forward.found) - 1
            self.derivatives.applied(cls, seen, number, before, out)
        return out

    def _run(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A backward is one of torch's functions, in which a mode is off; what runs again in it is
        to be seen."""
        self.begins([root for root in args[0] if isinstance(root, Tensor)])
        if not is_backward():
            self._at_roots(*args[:2])
        if self in _get_current_function_mode_stack():
            return engine(*args, **kwargs)
        super().__enter__()
        try:
            return engine(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _at_roots(self, roots: Sequence[Any] = (), gradients: Sequence[Any] | None = None) -> None:
        lines = users_lines()
        for root, gradient in zip(roots, gradients or (), strict=False):
            made = self.made_at(gradient) if isinstance(gradient, Tensor) else ("", "")
            if made[0] and lines and isinstance(root, Tensor):
                self.starts(root, lines[0], made)

    def __exit__(self, *what: Any) -> None:
        super().__exit__(*what)
        self._kept.__exit__(None, None, None)
        self._no_more_applies()
        if self._engine is not None:
            setattr(torch.autograd, ENGINE, self._engine)
        self._forward.values.close()
        self._leaves.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        name = name_of(func)
        if getattr(func, "__self__", None) is Tensor.grad:
            self._at_a_gradient(name, args)
        frame = users_frame() if name not in UNSEEN else None
        if frame is None or is_trial():
            return func(*args, **kwargs)
        self._names.see(frame)
        if not self._is_asked(site_of(frame)[0], frame):
            return func(*args, **kwargs)
        self._runs(frame)
        before = [] if is_backward() else self._versions(args, kwargs)
        seen = self._see(name, frame, args, kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._lines.made(out, words(frame))
        if seen is not None:
            self._changed(before, seen)
            self._add(seen, out)
        self._in_a_hook = False
        return out

    def _runs(self, frame: FrameType) -> None:
        """A line of the forward that calls something."""
        if not is_backward():
            self._ran.setdefault(within(frame), {})[words(frame)] = None

    def _at_a_gradient(self, name: str, args: tuple[Any, ...]) -> None:
        """A line reads a tensor's `.grad`, or puts something in its place."""
        frame, tensor = users_frame(3), args[0]
        if frame is None:
            return
        if name == "set" and args[1] is not None and (param := self.name_of(tensor)):
            self._set_grads[SetGrad(name=param, line=words(frame))] = None
        elif name == "get" and self.name_of(tensor):
            with torch._C.DisableTorchFunction():
                self._reads.setdefault(words(frame), set()).add(tensor.grad is not None)
        elif name == "get":
            self._leaves.read(tensor, words(frame), self.made_at(tensor))

    def _here(self) -> _Calls:
        if self._in_a_hook:
            return self._hooks
        return self._backward if is_backward() else self._forward

    def _is_asked(self, site: str, frame: FrameType | None = None) -> bool:
        """Whether a call there is kept: of the backward those alone that the forward has, too, and
        those of hooks."""
        self._in_a_hook = False  # the last may have raised
        if is_backward():
            known = site in self._sites
            self._in_a_hook = not known and frame is not None and not _is_functions(frame)
            return (known or self._in_a_hook) and len(self._here().found) < MOST_CALLS
        if len(self._forward.found) >= MOST_CALLS:
            return False
        self._sites.add(site)
        return True

    def _versions(self, args: Any, kwargs: Any) -> list[tuple[Tensor, int, int | None]]:
        """Of a call's tensors, before it: how often each was changed in place, and the number of
        the last value that was seen in it."""
        values = self._forward.values
        with torch._C.DisableTorchFunction():
            return [
                (t, t._version, values.known(t))
                for t in pytree.tree_leaves((args, kwargs))
                if isinstance(t, Tensor) and not t.is_inference()
            ]

    def _changed(self, before: Sequence[tuple[Tensor, int, int | None]], by: Computation) -> None:
        """What a call changed in place. Where it is there before, as by `x[0] += 1`, which changes
        a view of it first, from what was seen in it."""
        values = self._forward.values
        for tensor, version, last in before:
            with torch._C.DisableTorchFunction():
                if tensor._version == version:
                    continue
            self._lines.written(tensor, (by.line, by.code))
            was, now = values.known(tensor), values.number(tensor)
            was = last if was == now else was
            if was is not None and now is not None and was != now:
                self._changes.append(Change(before=was, after=now, line=by.line, code=by.code))

    def of_module(self, name: str, args: Any, kwargs: Any, output: Any, params: Any = ()) -> None:
        """A call of one of torch's own modules, inside of which nothing is seen. params: of its
        own, which it takes, too."""
        if torch.compiler.is_dynamo_compiling() or not self._is_asked(f"{MODULE}{name}"):
            return
        taken = pytree.tree_leaves((args, kwargs, list(params)))
        given = [("", t) for t in taken if isinstance(t, Tensor)]
        self._add(self._computation(f"{MODULE}{name}", given, ("", "")), output)

    def made_at(self, tensor: Tensor) -> Line:
        """The line of a user's that made a tensor, or wrote into it last; empty where none did."""
        return self._lines.of(tensor)

    def _applied(self, cls: Any, args: Any, kwargs: Any) -> Computation | None:
        frame = users_frame(1 + FROM_A_USERS_LINE)
        if frame is None or not self._is_asked(site_of(frame)[0]):
            return None
        self._runs(frame)
        given = [("", t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        code = getattr(getattr(cls, "backward", None), "__code__", None)
        written = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
        site, part = site_of(frame)
        seen = self._computation(cls.__name__, given, words(frame))
        return seen and replace(seen, site=site, part=part, written=written, within=within(frame))

    def _see(
        self, name: str, frame: FrameType, args: tuple[Any, ...], kwargs: Any
    ) -> Computation | None:
        given = [*((None, a) for a in args), *sorted(kwargs.items())]
        seen = self._computation(name, given, words(frame))
        site, part = site_of(frame)
        return None if seen is None else replace(seen, site=site, part=part, within=within(frame))

    def _computation(
        self, function: str, given: Sequence[tuple[str | None, Any]], at: Line
    ) -> Computation | None:
        named = [(key or "", taken) for key, value in given
                 for taken in self._arguments(key, value)]  # fmt: skip
        takes = [taken for _, taken in named]
        tensors = [t for _, value in given for t in several(value)]
        if not any(isinstance(t, int) for t in takes):
            return None
        (line, code), (inside, calls) = at, self._now()
        made = (self._lines.of(t) if isinstance(t, Tensor) else ("", "") for t in tensors)
        before = (self._lines.before(t) if isinstance(t, Tensor) else ("", "") for t in tensors)
        return Computation(
            function=function,
            line=line,
            code=code,
            takes=tuple(takes),
            keys=tuple(key for key, _ in named),
            made_at=tuple(made),
            written_at=tuple(before),
            inside=tuple(inside),
            calls=calls,
            function_of=self._functions[-1] if self._functions else "",
        )

    def _add(self, seen: Computation | None, out: Any) -> None:
        if seen is None:
            return
        here = self._here()
        tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
        if self._in_a_hook:
            self._hooks_at.append(len(self._forward.found))
        numbers = (here.values.number(t) for t in tensors[:MOST_RESULTS])
        here.found.append(replace(seen, gives=tuple(n for n in numbers if n is not None)))

    def _arguments(self, key: str | None, value: Any) -> list[int | str]:
        """The number of a tensor's value, the words of what is none, or is too large; of a list of
        tensors those of each."""
        out: list[int | str] = []
        here = self._here()
        for one in several(value):
            if not isinstance(one, Tensor):
                out.append(f"{key}={one!r}" if key else repr(one))
                continue
            number = here.values.number(one)
            out.append(f"{LARGE}{len(here.found)}" if number is None else number)
        return out


def computations_beside(watching: ModuleWatch) -> Computations:
    """What lines compute while modules are watched; each tells the other what it sees."""
    computations = Computations(watching.now, Derivatives(watching.operations))
    watching.of_module, watching.made_at = computations.of_module, computations.made_at
    computations.starts, computations.name_of = watching.starts, watching.name_of
    return computations


@dataclass(slots=True)
class _Calls:
    values: KeptValues
    found: list[Computation] = field(default_factory=list)


def several(value: Any) -> Sequence[Any]:
    """Of a list of tensors each, else what is given."""
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        return value
    return (value,)


def is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _is_functions(frame: FrameType | None) -> bool:
    """Whether it is in the backward of a Function, or in a graph that the backward builds."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(BACKWARDS):
            return True
        frame = frame.f_back
    return False


def name_of(func: Any) -> str:
    name = str(getattr(func, "__name__", "")).strip("_")
    return ALIASES.get(name, name)
