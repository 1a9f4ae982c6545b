"""Hooks that see what goes through modules: every output, and the gradient that reaches it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from sumgrad.base.tensors import to_local
from sumgrad.record.trace import LOSS, Call, Trace
from sumgrad.subjects.program.placement import WRAPPERS
from sumgrad.subjects.program.taken_up import taken_up
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MAX_BYTES = 1 << 28  # of outputs and gradients, on each rank
_PREFIXES = {a + b for a in (*WRAPPERS, "") for b in WRAPPERS}
MAX_PARTS = 4  # tensors of one output that are looked at


class ModuleWatch:
    """Between `with` and its end, what goes through the modules of a model.

    names: id of a module -> its name in build()'s model, for those that a wrapper renamed.
    operations: how many collectives this rank has issued so far. with_paths: also which outputs
    others are made from.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[int, str] | None = None,
        operations: Callable[[], int] = lambda: 0,
        *,
        with_paths: bool = False,
    ) -> None:
        self.operations = operations
        self._modules = dict(_seen_modules(model, names or {}))
        self._sources = {name: source_of(module) for name, module in self._modules.items()}
        self._numbers: dict[str, int] = {}
        self._calls: list[dict[str, Any]] = []
        self._outputs: list[Tensor] = []
        self._gradients: dict[int, Tensor] = {}
        self._last: dict[int, Tensor] = {}
        self._data: list[Tensor] = []
        self._entered: list[str] = []
        self._bytes, self._left_out = 0, dict[str, None]()
        self._handles: list[Any] = []
        self._with_paths = with_paths
        self._made_by: list[tuple[str, Any]] = []

    def at_loss(self, loss: Tensor) -> None:
        """What the modules' outputs end in."""
        self._made(LOSS, loss)

    def __enter__(self) -> ModuleWatch:
        for name, module in self._modules.items():
            hook = self._hook(name)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def trace(self, batch: Mapping[str, Tensor] | None = None) -> Trace:
        """What was seen. batch: the full batch, where this is the single process."""
        return Trace(
            calls=tuple(Call(**call) for call in self._calls),
            outputs=tuple(self._outputs),
            gradients=tuple(self._gradients.get(i) for i in range(len(self._calls))),
            sources={call["module"]: self._sources[call["module"]] for call in self._calls},
            data=tuple(self._data),
            entered=tuple(self._entered),
            batch=batch,
            left_out=tuple(self._left_out),
            takes=taken_up(self._made_by),
        )

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if _is_trial():
                return
            with torch.no_grad():
                self._see(name, args, kwargs, output)

        return hook

    def _see(self, name: str, args: Any, kwargs: Any, output: Any) -> None:
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        for tensor in _tensors((args, kwargs)):
            if tensor.grad_fn is None and not tensor.requires_grad:
                self._keep_data(name, tensor)
        parts = [t for t in _tensors(output) if t.is_floating_point() or t.is_complex()]
        for tensor in parts:
            self._made(name, tensor)
        for part, tensor in enumerate(parts[:MAX_PARTS]):
            held = self._kept(name, tensor)
            if held is None:
                continue
            at = len(self._calls)
            self._calls.append(
                {
                    "module": name,
                    "number": number,
                    "part": part,
                    "operation": self.operations(),
                    "operation_back": None,
                    "recomputed": torch._C._current_graph_task_id() != -1,
                }
            )
            self._outputs.append(held)
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._gradient_hook(name, at))

    def _made(self, name: str, tensor: Tensor) -> None:
        if self._with_paths and tensor.grad_fn is not None:
            self._made_by.append((name, tensor.grad_fn))

    def _gradient_hook(self, name: str, at: int) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            held = self._kept(name, gradient)
            if held is None or (at in self._last and torch.equal(self._last[at], held)):
                return  # passed through again, as by a backward for inputs and one for weights
            self._last[at] = held
            self._gradients[at] = self._gradients[at] + held if at in self._gradients else held
            self._calls[at]["operation_back"] = self.operations()

        return hook

    def _kept(self, name: str, tensor: Tensor) -> Tensor | None:
        local = to_local(tensor).detach()
        if local.is_complex():
            local = torch.view_as_real(local)
        self._bytes += local.numel() * local.element_size()
        if self._bytes > MAX_BYTES:
            self._left_out[name] = None
            return None
        return local.to(device="cpu", copy=True).contiguous()

    def _keep_data(self, name: str, tensor: Tensor) -> None:
        held = self._kept(name, tensor)
        if held is not None and held.dim() and held.numel():
            self._data.append(held)
            self._entered.append(name)


def _is_trial() -> bool:
    """Whether a pipeline runs a stage on memory as it is, to learn its shapes."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name.endswith(("_metadata_inference", "_shape_inference")):
            return "pipelining" in code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a module's output or arguments, in order."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, str | bytes | int | float | type(None)):
            held = getattr(leaf, "__dict__", {})
            yield from (v for v in held.values() if isinstance(v, Tensor))


def _seen_modules(model: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules by the names of build()'s model; of a compiled one its border alone."""
    found: dict[str, nn.Module] = {}
    compiled: list[str] = []
    for shown, module in model.named_modules():
        if any(shown.startswith(inside) for inside in compiled):
            continue
        if type(module).__name__ == "OptimizedModule":
            compiled.append(f"{shown}." if shown else "")
            if not shown:
                compiled[-1] = "_orig_mod"
        if names and not shown and not _is_whole(module, names):
            continue  # a stage of a pipeline is not the model
        name = f"{shown}."
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        found[names.get(id(module), name.rstrip("."))] = module  # the innermost of wrapped ones
    yield from found.items()


def _is_whole(module: nn.Module, names: Mapping[int, str]) -> bool:
    """Whether the outermost module is build()'s model, or a wrapper around it alone."""
    inside = [module, *(m for n, m in module.named_modules() if f"{n}." in _PREFIXES)]
    return any(names.get(id(m)) == "" for m in inside)


def source_of(module: nn.Module) -> str:
    """A module's class, and the line of its forward where it is not torch's own."""
    cls = type(module)
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    if code is None or cls.__module__.startswith("torch."):
        return cls.__name__
    return f"{cls.__name__} at {code.co_filename}:{code.co_firstlineno}"
