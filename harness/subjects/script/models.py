"""The models that a script calls: their names in every run, and which elements a rank holds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from sumgrad.base.tensors import bits, to_local
from sumgrad.subjects.program.placed.placement import (
    Siblings,
    bare_name,
    flat_pieces,
    layers_of,
    renamed,
    where_is,
)
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

WRAPPED = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Found = tuple[str | None, Tensor | None, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter on this process. name: the same in every run. index: its elements in the flat
    whole, of the local shape (int64), or None where it holds all of it. shape: of the whole.
    window: first and last element in a flat parameter of several, or None."""

    name: str
    param: Tensor
    index: Tensor | None
    shape: tuple[int, ...]
    window: tuple[int, int] | None = None

    @property
    def part(self) -> str:
        """A digest of which part of the whole it is; ranks with the same one hold replicas."""
        return "" if self.index is None else bits([self.index])

    def local(self) -> Tensor:
        """The elements held here, without a copy."""
        return self.part_of(self.param)

    def part_of(self, tensor: Tensor) -> Tensor:
        """This parameter's part of its tensor, or of a gradient like it."""
        local = to_local(tensor)
        if self.window is None:
            return local
        part = local.reshape(-1)[slice(*self.window)]
        return part.reshape(self.shape) if self.index is None else part

    def slice(self, full: Tensor) -> Tensor:
        """The same elements of a whole tensor."""
        return full if self.index is None else full.reshape(-1)[self.index]


class Models:
    """Every model with parameters that was called so far, in the order of the first calls.

    The first one's parameters have its own names; those of another begin with its class where they
    would be taken for the first's.
    """

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.unknown: list[str] = []
        self.by_name: set[str] = set()  # told by their names alone, where others are not by theirs
        self._seen: set[int] = set()
        self._roots: list[tuple[str, nn.Module]] = []  # alive, so that no id is used again
        self._names: dict[int, dict[int, str]] = {}  # of the modules of each, as renumbered

    def meet(
        self, module: nn.Module, whole_of: Callable[[], Mapping[str, Tensor] | None]
    ) -> list[Held]:
        """The parameters that are new with a module that is called, of all that it is part of.

        whole_of: gives the weights that another run started with, where there is one.
        """
        if id(module) in self._seen or next(module.parameters(), None) is None:
            return []
        root = outermost(module)
        if any(isinstance(p, UninitializedParameter) for p in root.parameters()):
            return []  # a lazy module, which knows its shapes after its first call
        whole = whole_of()
        self._seen |= {id(m) for m in root.modules()}
        known = {id(h.param) for h in self.held.values()}
        flat = [h for h in _flat_parts(root) if id(h.param) not in known]
        shown = {n: p for n, p in root.named_parameters() if id(p) not in known}
        prefix = self._prefix(root, [*(h.name for h in flat), *(bare_name(n) for n in shown)])
        pieces = flat_pieces(root)
        new = [replace(h, name=prefix + h.name) for h in flat if h.local().numel()]
        self.held |= {h.name: h for h in new}
        shown = {n: p for n, p in shown.items() if not any(p is h.param for h in flat)}
        full = None
        if whole is not None:
            full = {n.removeprefix(prefix): t for n, t in whole.items() if n.startswith(prefix)}
        found, unsure = ({}, set()) if full is None else _found(shown, full, pieces)
        self.by_name |= {prefix + name for name in unsure}
        for name, param in shown.items():
            one = self._place(prefix, name, param, full, found.get(name), pieces)
            if one is not None:
                self.held[one.name] = one
                new.append(one)
        self._roots.append((prefix, root))
        return new

    def renumbered(self, root: nn.Module) -> dict[int, str]:
        """Id of a module -> its name in the single run; empty where all have that name here."""
        prefix = next((p for p, known in self._roots if known is root), "")
        names = {id(h.param): h.name.removeprefix(prefix) for h in self.held.values()}
        shown = {bare_name(n): names[id(p)] for n, p in root.named_parameters() if id(p) in names}
        if all(here == there for here, there in shown.items()):
            return {}
        layers, out = layers_of(shown), {}
        for path, module in root.named_modules():
            there = renamed([part for part in bare_name(f"{path}.").split(".") if part], layers)
            if there is not None:
                out[id(module)] = there
        return out

    @property
    def roots(self) -> list[nn.Module]:
        """The models, each with all that it is part of."""
        return [root for _, root in self._roots]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Every buffer by its name in every run, as it is now: a module may replace one."""
        found: dict[str, Tensor] = {}
        for prefix, root in self._roots:
            if id(root) not in self._names:
                self._names[id(root)] = self.renumbered(root)
            there = self._names[id(root)]
            for path, module in root.named_modules():
                of = there.get(id(module), bare_name(f"{path}.").removesuffix("."))
                for name, buffer in module.named_buffers(recurse=False):
                    found.setdefault(prefix + (f"{of}.{name}" if of else name), buffer)
        return found

    def _place(
        self,
        prefix: str,
        shown: str,
        param: nn.Parameter,
        whole: Mapping[str, Tensor] | None,
        found: Found | None,
        pieces: Mapping[int, tuple[int, int]],
    ) -> Held | None:
        bare = bare_name(shown)
        if param.is_complex() and param.requires_grad:
            self.unknown.append(f"{bare} is complex: such gradients are not compared")
            return None
        if whole is None or found is None:
            start, size = pieces.get(id(param), (0, param.numel()))
            if to_local(param).numel() != param.numel() or (start, size) != (0, param.numel()):
                self.unknown.append(f"{bare}: held in parts by the run that is compared with")
                return None
            return Held(name=prefix + bare, param=param, index=None, shape=tuple(param.shape))
        name, index, problem = found
        if name is None or problem is not None:
            if param.requires_grad:
                self.unknown.append(f"{bare} {tuple(param.shape)}: {_in_words(problem)}")
            return None
        if prefix + name in self.held:
            self.unknown.append(f"{bare}: another parameter of this rank is {prefix + name} too")
            return None
        shape = tuple(whole[name].shape)
        return Held(name=prefix + name, param=param, index=index, shape=shape)

    def _prefix(self, root: nn.Module, names: list[str]) -> str:
        if not any(name in self.held for name in names):
            return ""
        prefix = f"{label_of(root)}."
        again = 1
        while any(prefix + name in self.held for name in names):
            again += 1
            prefix = f"{label_of(root)}#{again}."
        return prefix


def _found(
    shown: Mapping[str, nn.Parameter],
    whole: Mapping[str, Tensor],
    pieces: Mapping[int, tuple[int, int]],
) -> tuple[dict[str, Found], set[str]]:
    """Of each parameter its name in the whole, its elements there, and why neither is known. Where
    a model numbers its layers anew, what begins equal is told by its siblings; and those that
    nothing but their names tell."""
    found = {n: where_is(n, p, whole, pieces) for n, p in shown.items()}
    told = {bare_name(n): name for n, (name, _, why) in found.items() if not why}
    siblings, by_name = Siblings(told, whole), set[str]()
    if not siblings.moved:
        return found, by_name
    for n, (name, index, problem) in found.items():
        if problem is not None and name is not None:
            continue
        value = to_local(shown[n]).detach() if name is None else whole[name]
        other = siblings.name_of(bare_name(n), value)
        if other is not None:
            found[n] = (other, index, None)
        elif name is not None:
            by_name.add(name)
    return found, by_name


def _flat_parts(root: nn.Module) -> list[Held]:
    """What FSDP1 holds of each parameter in flat ones, where it does not show them one by one."""
    found = []
    for shown, module in root.named_modules():
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        infos = getattr(flat, "_shard_param_infos", None)
        if flat is None or infos is None or getattr(flat, "_params", None) is not None:
            continue
        before = bare_name(f"{shown}.")
        for name, shape, info in zip(flat._fqns, flat._shapes, infos, strict=True):
            size = info.numel_in_shard if info.in_shard else 0
            at, start = (info.offset_in_shard, info.intra_param_start_idx) if size else (0, 0)
            whole = size == torch.Size(shape).numel()
            found.append(
                Held(
                    name=f"{before}{name}".lstrip("."),
                    param=flat,
                    index=None if whole else torch.arange(start, start + size),
                    shape=tuple(shape),
                    window=(at, at + size),
                )
            )
    return found


def outermost(module: nn.Module) -> nn.Module:
    """The module that a module is part of and that is part of no other; itself if there is none."""
    owners = {
        id(child): owner
        for owner in gc.get_objects()
        if issubclass(type(owner), nn.Module)
        for child in owner.__dict__.get("_modules", {}).values()
        if child is not None
    }
    passed = {id(module)}
    while (owner := owners.get(id(module))) is not None and id(owner) not in passed:
        module = owner
        passed.add(id(module))
    return module


def label_of(module: nn.Module) -> str:
    """The class of a module, without what wraps it."""
    passed = 0
    while passed < len(WRAPPED) * 2:
        inner = next(
            (module._modules[n] for n in WRAPPED if module._modules.get(n) is not None), None
        )
        if inner is None or len(module._modules) != 1:
            break
        module, passed = inner, passed + 1
    name = type(module).__name__
    return name.removeprefix("FSDP") if name != "FSDP" else name


def _in_words(problem: str | None) -> str:
    return (problem or "").replace("build()'s parameters", "the other run's parameters").replace(
        "build() has", "the other run has").replace("build()'s", "the other run's")  # fmt: skip
