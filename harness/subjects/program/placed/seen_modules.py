"""The modules of a model that are watched, by the names that build() gave them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping

from sumgrad.subjects.program.placed.placement import WRAPPERS, bare_name
from torch import nn

_PREFIXES = {a + b for a in (*WRAPPERS, "") for b in WRAPPERS}


def seen_modules(model: nn.Module, names: Mapping[int, str]) -> Iterator[tuple[str, nn.Module]]:
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
        name = bare_name(shown)
        found[names.get(id(module), name)] = module  # the innermost of wrapped ones
    yield from found.items()


def _is_whole(module: nn.Module, names: Mapping[int, str]) -> bool:
    """Whether the outermost module is build()'s model, or a wrapper around it alone."""
    inside = [module, *(m for n, m in module.named_modules() if f"{n}." in _PREFIXES)]
    return any(names.get(id(m)) == "" for m in inside)


def source_of(module: nn.Module) -> str:
    """A module's class, and the line of its forward, which it may have of its own, where it is not
    torch's own."""
    cls = type(module)
    own = inspect.unwrap(module.__dict__.get("forward", cls.forward))
    called = own if hasattr(own, "__code__") else vars(type(own)).get("__call__")
    forward = called if hasattr(called, "__code__") else inspect.unwrap(cls.forward)
    code = getattr(forward, "__code__", None)
    if code is None or (forward.__module__ or "").startswith("torch."):  # inherited, perhaps
        return cls.__name__
    return f"{cls.__name__} at {code.co_filename}:{code.co_firstlineno}"


def is_trial() -> bool:
    """Whether a pipeline runs a stage on memory as it is, to learn its shapes."""
    if "torch.distributed.pipelining" not in sys.modules:
        return False
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name.endswith(("_metadata_inference", "_shape_inference")):
            return "pipelining" in code.co_filename
        frame = frame.f_back  # type: ignore[assignment]
    return False
