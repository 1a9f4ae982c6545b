"""Hooks that see what goes through modules: what goes in, what comes out, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from sumgrad.base.tensors import to_local
from sumgrad.record.line import NO_LINE, Line
from sumgrad.record.ranks import sample_of
from sumgrad.record.trace import INTO, LOSS, MAX_SAMPLE, MAX_USED, Call, Stack, Started, Trace
from sumgrad.subjects.program.placed.seen_modules import is_trial, seen_modules, source_of
from sumgrad.subjects.program.watched.arguments import (
    as_numbers,
    in_a_word,
    named_arguments,
    tensors_in,
    with_defaults,
)
from sumgrad.subjects.program.watched.hooked import AroundHooks
from sumgrad.subjects.program.watched.settings import settings_in, settings_of
from sumgrad.subjects.program.watched.taken_up import taken_up
from sumgrad.subjects.program.watched.ways import makers_of, ways_between
from sumgrad.subjects.users_line import users_lines
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.weak import WeakIdKeyDictionary

MAX_BYTES = 1 << 28  # of outputs and gradients, on each rank
MAX_BYTES_INTO = 1 << 27  # of what goes into modules and is no output, and its gradients
MAX_HANDED = 256  # calls of one module whose arguments are kept in words
MAX_SETTINGS = 12  # values of one attribute of a module that differ
MAX_PARTS = 4  # tensors of one output that are looked at


class ModuleWatch:
    """Between `with` and its end, what goes through the modules of a model.

    names: id of a module -> its name in build()'s model, for those that a wrapper renamed.
    operations: how many collectives this rank has issued so far. with_paths: also which outputs
    others are made from. with_ways: also what autograd passes in between, and which line called it.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str] | None = None,
        operations: Callable[[], int] = lambda: 0,
        *,
        with_paths: bool = False,
        with_ways: bool = False,
    ) -> None:
        self.operations = operations
        self._model, self._names = model, names or {}
        self._modules = dict(seen_modules(model, names or {}))
        self._sources = {name: source_of(module) for name, module in self._modules.items()}
        self._numbers: dict[str, int] = {}
        self._calls: list[dict[str, Any]] = []
        self._outputs: list[Tensor] = []
        self._gradients: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}
        self._data: list[Tensor] = []
        self._entered: list[str] = []
        self._entered_as: list[tuple[int, str]] = []
        self._entered_at: list[Line] = []
        self._started: list[Started] = []
        self._copies = WeakIdKeyDictionary()  # tensor -> its version, and what is kept of it
        self._call_of = WeakIdKeyDictionary()  # tensor -> number of the call that saw it first
        self._same: dict[int, int] = {}
        self._room = {INTO: MAX_BYTES_INTO, "": MAX_BYTES}
        self._left_out: dict[str, None] = {}
        self._handles: list[Any] = []
        self._used: dict[str, list[Tensor]] = {}
        self._used_numel: dict[str, int] = {}
        self._frozen: dict[str, dict[str, None]] = {}
        self._modes: dict[str, dict[str, None]] = {}
        self._settings: dict[str, dict[str, dict[str, None]]] = {}
        self._set_now: dict[str, dict[str, str]] = {}
        self._set_in: dict[str, list[dict[str, str]]] = {}
        self._config_of: dict[int, str] = {}
        self._hooks = AroundHooks(lambda name: self._numbers.get(name, -1) + 1)
        self._handed: dict[str, list[dict[str, str]]] = {}
        self._stacks: dict[Stack, int] = {}
        self._inside: list[str] = []  # the modules whose forward runs
        self._with_paths, self._with_ways = with_paths, with_ways
        self._made_by: list[tuple[str, Any]] = []
        self.of_module: Callable[..., object] = lambda *_: None  # of torch's own
        self.made_at: Callable[[Tensor], Line] = lambda _: NO_LINE
        self._anomaly = (False, True)
        self._params = WeakIdKeyDictionary()  # parameter, as its module has it -> its name

    def name_of(self, param: Tensor) -> str:
        """A parameter's, as its module has it; empty where it is none that was seen."""
        return self._params.get(param) or ""

    def starts(self, root: Tensor, line: Line, made: Line) -> None:
        """A backward starts at a tensor, from a gradient that it is handed."""
        if (call := self._call_of.get(root)) is not None:
            self._started.append(Started(call=call, line=line, made=made))

    def at_loss(self, loss: Tensor) -> None:
        """What the modules' outputs end in."""
        self._made(LOSS, loss)

    def __enter__(self) -> ModuleWatch:
        if self._with_ways:
            self._anomaly = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
            torch.set_anomaly_enabled(True, False)
            for name, module in self._modules.items():
                for own, param in module._parameters.items():
                    if param is not None:
                        self._params.setdefault(param, f"{name}.{own}" if name else own)
        for name, module in self._modules.items():
            self._handles += self._hooks.watch(name, module)
        for name, module in self._modules.items():
            before, after = self._hook(name, self._enter), self._hook(name, self._leave)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            ends = self._hook(name, self._ends, always=True)
            self._handles.append(module.register_forward_hook(ends, always_call=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if self._with_ways:
            torch.set_anomaly_enabled(*self._anomaly)

    def now(self) -> tuple[tuple[str, ...], int]:
        """The modules whose forward runs, and how many calls of any were recorded so far."""
        return tuple(self._inside), len(self._calls)

    def trace(self, batch: Mapping[str, Tensor] | None = None) -> Trace:
        """What was seen. batch: the full batch, where this is the single process."""
        for name in (n for n in self._modules if n not in self._modes):
            self._uses("uncalled", name)  # as a list or a dict of parameters or buffers
        first = [self._same.get(i, i) for i in range(len(self._calls))]
        losses = [node for name, node in self._made_by if name == LOSS]
        given = [(name, node) for name, node in self._made_by if not name.startswith(INTO)]
        held = _as_rows([*self._outputs, *(self._gradients.get(i) for i in first)])
        came = [
            {k: self._calls[i][k] for k in ("operation_back", "arrivals", "again")} for i in first
        ]
        return Trace(
            calls=tuple(Call(**call | b) for call, b in zip(self._calls, came, strict=True)),
            outputs=tuple(t for t in held[: len(self._outputs)] if t is not None),
            gradients=tuple(held[len(self._outputs) :]),
            sources={
                call["module"]: self._sources[call["module"]]
                for call in self._calls
                if call["module"] in self._sources
            },
            data=tuple(self._data),
            entered=tuple(self._entered),
            entered_as=tuple(self._entered_as),
            entered_at=tuple(self._entered_at),
            started=tuple(self._started),
            batch=batch,
            left_out=tuple(self._left_out),
            takes=taken_up(given) if self._with_paths else {},
            ways=ways_between(self._made_by) if self._with_ways else {},
            makers=makers_of(losses, self._params.get) if self._with_ways else {},
            used={name: tuple(held) for name, held in self._used.items()},
            used_numel=self._used_numel,
            frozen={name: tuple(when) for name, when in self._frozen.items()},
            modes={name: tuple(modes) for name, modes in self._modes.items()},
            handed={name: tuple(calls) for name, calls in self._handed.items()},
            stacks=tuple(self._stacks),
            settings={
                name: {n: tuple(values) for n, values in own.items()}
                for name, own in self._settings.items()
            },
            turned=self._turned(),
            hooked=tuple(self._hooks.kept),
            hooks=self._hooks.lines,
            classes={n: type(m).__name__ for n, m in seen_modules(self._model, self._names)},
        )

    def _hook(
        self, name: str, see: Callable[..., None], *, always: bool = False
    ) -> Callable[..., None]:
        """A plain function, which a copy of the module shares: what the copy does is none of the
        module's. always: also of calls that are no step of the model's, and that raise."""

        def hook(module: nn.Module, *given: Any) -> None:
            if module is not self._modules[name] or is_trial():
                return
            if not always:
                mode = "training" if module.training else "eval"
                self._modes.setdefault(name, {})[mode] = None
                self._set(name, module)
            with torch.no_grad():
                see(name, *given)

        return hook

    def _set(self, name: str, module: nn.Module) -> None:
        """What is set on a module when it is called."""
        held = self._settings.setdefault(name, {})
        config = getattr(module, "config", None)  # one object for many modules: the first has it
        whose = name if config is None else self._config_of.setdefault(id(config), name)
        beside = settings_in(config) if whose == name else {}
        self._set_now[name] = settings_of(module) | beside
        for attribute, value in self._set_now[name].items():
            known = held.setdefault(attribute, {})
            if len(known) < MAX_SETTINGS:
                known[value] = None

    def _turned(self) -> dict[str, tuple[dict[str, str], ...]]:
        """Of the settings that change, what they are in each call."""
        out = {}
        for name, calls in self._set_in.items():
            changed = {n for n, values in self._settings[name].items() if len(values) > 1}
            if changed:
                out[name] = tuple({n: c[n] for n in c if n in changed} for c in calls)
        return out

    def _uses(self, when: str, module: str) -> None:
        """The parameters and buffers that a module has now: a wrapper gathers those that it cuts,
        a step moves others."""
        held_by, params = self._modules[module], self._modules[module]._parameters
        buffers = {} if _counts_only(held_by) else held_by._buffers
        for own, param in (*params.items(), *buffers.items()):
            if param is None or not param.is_floating_point():
                continue
            local = to_local(param).detach()
            name = f"{module}.{own}" if module else own
            if own in params:
                self._params.setdefault(param, name)
                if not param.requires_grad:
                    self._frozen.setdefault(name, {})[when] = None
            if local.numel() != self._used_numel.setdefault(name, local.numel()):
                continue
            try:
                if not local.untyped_storage().size():
                    continue  # put away until it is gathered again
                flat = local.reshape(-1)
                at = sample_of(len(flat), MAX_SAMPLE).to(flat.device)
                value = flat[at].to(device="cpu", copy=True)
            except (RuntimeError, NotImplementedError):
                continue  # a tensor of a class of its own
            held = self._used.setdefault(f"{when}/{name}", [])
            if len(held) < MAX_USED and not any(torch.equal(value, known) for known in held):
                held.append(value)

    def _enter(self, name: str, args: Any, kwargs: Any) -> None:
        self._inside.append(name)
        if len(calls := self._set_in.setdefault(name, [])) < MAX_HANDED:
            calls.append(self._set_now[name])
        if torch._C._current_graph_task_id() == -1:
            self._uses("forward", name)
        named = named_arguments(self._modules[name], args, kwargs)
        if " at " in self._sources[name] and len(self._handed.get(name, ())) < MAX_HANDED:
            given = with_defaults(self._modules[name], named)
            self._handed.setdefault(name, []).append({n: in_a_word(v) for n, v in given.items()})
        called = {id(t): n for n, value in named.items() for t in tensors_in(value)}
        for argument, value in named.items():
            if (listed := as_numbers(value)) is not None:
                self._keep_data(name, listed, argument, ("", ""))
        tensors = list(tensors_in((args, kwargs)))
        for tensor in tensors:
            if tensor.grad_fn is None and not tensor.requires_grad:
                made = self.made_at(tensor)
                self._keep_data(name, tensor, called.get(id(tensor), ""), made)
        parts = [t for t in tensors if _has_digits(t)]
        if self._with_ways:
            for tensor in parts:
                self._made(f"{INTO}{name}", tensor)
        self._see(f"{INTO}{name}", parts)

    def _ends(self, name: str, *_: Any) -> None:
        """Also of a forward that raised, as a checkpoint's does when all is computed again that
        the backward needs."""
        if name in self._inside:
            while self._inside.pop() != name:
                pass

    def _leave(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        parts: list[Tensor | None] = [t for t in tensors_in(output) if _has_digits(t)]
        if len(parts) > 1:  # what it only hands on, its gradient is that of other uses, too
            given = {id(t) for t in tensors_in((args, kwargs))}
            parts = [None if id(t) in given else t for t in parts]
        for tensor in parts:
            if tensor is not None:
                self._made(name, tensor)
        if " at " not in self._sources[name]:
            params = self._modules[name]._parameters.values()
            self.of_module(name, args, kwargs, output, params)
        self._see(name, parts)

    def _see(self, name: str, parts: Sequence[Tensor | None]) -> None:
        """One call. What is there already, as another module's output, is not kept twice."""
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        ran = Stack(lines=users_lines(), inside=tuple(self._inside))
        goes_in = name.startswith(INTO)
        # Of many, as one for each image of all rows, the others are other rows' on each rank.
        for part, tensor in enumerate(parts if len(parts) <= MAX_PARTS else parts[:1]):
            if tensor is None:
                continue
            at = len(self._calls)
            own = replace(ran, made=self.made_at(tensor)) if goes_in else ran
            before, (_, known) = self._call_of.get(tensor), self._copies.get(tensor, (0, None))
            held = self._kept(name, tensor)
            if held is None:
                continue
            self._calls.append(
                {
                    "module": name,
                    "number": number,
                    "part": part,
                    "operation": self.operations(),
                    "operation_back": None,
                    "recomputed": torch._C._current_graph_task_id() != -1,
                    "arrivals": 0,
                    "again": 0,
                    "stack": self._stacks.setdefault(own, len(self._stacks)),
                    "changed_from": -1 if before is None or known is held else before,
                }
            )
            self._outputs.append(held)
            if name.startswith(INTO) and before is not None and self._outputs[before] is held:
                self._same[at] = before
                continue
            self._call_of[tensor] = at
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._gradient_hook(name, at))

    def _made(self, name: str, tensor: Tensor) -> None:
        if (self._with_paths or self._with_ways) and tensor.grad_fn is not None:
            self._made_by.append((name, tensor.grad_fn))

    def _gradient_hook(self, name: str, at: int) -> Callable[[Tensor | None], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is None:
                return  # a Function's own backward gave none
            if not name.startswith(INTO):
                self._uses("backward", name)
            held = self._kept(name, gradient)
            if held is None:
                return
            if at in self._last and torch.equal(self._last[at], held):
                self._calls[at]["again"] += 1  # as by a backward for inputs and one for weights
                return
            self._last[at] = held
            self._gradients[at] = self._gradients[at] + held if at in self._gradients else held
            self._calls[at]["operation_back"] = self.operations()
            self._calls[at]["arrivals"] += 1

        return hook

    def _kept(self, name: str, tensor: Tensor) -> Tensor | None:
        version, copy = self._copies.get(tensor, (None, None))
        local = to_local(tensor).detach()
        if local.is_complex():
            local = torch.view_as_real(local)
        if version == _version(tensor) and _has_still(local, copy):
            known: Tensor = copy
            return known
        kind = INTO if name.startswith(INTO) else ""
        self._room[kind] -= local.numel() * local.element_size()
        if self._room[kind] < 0:
            self._left_out[name] = None
            return None
        held = local.to(device="cpu", copy=True).contiguous()
        self._copies[tensor] = (_version(tensor), held)
        return held

    def _keep_data(self, name: str, tensor: Tensor, argument: str, made: Line) -> None:
        held = self._kept(name, tensor)
        if held is not None and held.dim() and held.numel():
            self._data.append(held)
            self._entered.append(name)
            self._entered_as.append((self._numbers.get(f"{INTO}{name}", -1) + 1, argument))
            self._entered_at.append(made)


def _as_rows(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """One number for each row is a vector for each row; what is there twice stays one tensor, and
    no two share memory."""
    known: dict[int, Tensor] = {}
    out: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is not None and tensor.dim() == 1:
            if id(tensor) not in known:
                known[id(tensor)] = tensor.unsqueeze(1).clone()
            out.append(known[id(tensor)])
        else:
            out.append(tensor)
    return out


def _counts_only(module: nn.Module) -> bool:
    """Whether a module's buffers are statistics that it writes and does not compute with."""
    return isinstance(module, _NormBase) and module.training


def _has_digits(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_still(local: Tensor, copy: Tensor) -> bool:
    """What a collective receives into a buffer is no change that torch counts."""
    return torch.equal(local.to(copy.device), copy)


def _version(tensor: Tensor) -> int:
    """How often it was changed in place; inference tensors do not count."""
    return -1 if tensor.is_inference() else tensor._version
