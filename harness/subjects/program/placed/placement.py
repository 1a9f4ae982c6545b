"""Which elements of a full parameter a rank holds, whatever wrapped or sharded the model.

A DTensor says so itself, and so does FSDP1 of its flat parameters' pieces. A parameter of the full
shape is the full one. One of another shape, cut by hand, is found by its values: weights are drawn,
so a shard occurs in the full weight once. Where it does not, a model of numbers is cut by the same
code; see `numbered`. What is found is checked against the weights bit by bit before anything is
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from sumgrad.base.outcome import some_of
from sumgrad.base.tensors import bits, to_local
from sumgrad.subjects.program.placed.numbered import Found
from sumgrad.subjects.program.placed.parts_by_value import (
    agrees,
    by_value,
    equal,
    index_of,
    is_permuted,
)
from torch import Tensor, nn

Place = tuple[str | None, Tensor | None, str | None]  # name, index, why not
Layers = Mapping[str, str | None]  # a module's name here -> in the whole; see layers_of
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


def bare_name(name: str) -> str:
    """A name without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if f"{part}." not in WRAPPERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """One parameter of a rank. name: as build() has it. index: its elements in the flat full
    parameter, of the local shape (int64), or None where it holds all of it."""

    name: str
    param: nn.Parameter
    index: Tensor | None

    def local(self) -> Tensor:
        """The elements this rank holds, without a copy."""
        return to_local(self.param)

    def slice(self, full: Tensor) -> Tensor:
        """The same elements of a full tensor."""
        return full if self.index is None else full.reshape(-1)[self.index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All of a rank's parameters. unknown: those without a place, and why."""

    placed: tuple[Placed, ...]
    unknown: tuple[str, ...]


def place(
    model: nn.Module,
    known: Mapping[int, str],
    full: Mapping[str, Tensor],
    declared: Callable[[str], tuple[slice, ...] | None] | None = None,
    modules: Mapping[int, str] | None = None,
    numbered: Found | None = None,
) -> Placement:
    """Find every trained parameter of a distributed model in the full one.

    known: id of a living parameter of build()'s model -> its name; identity survives most wrappers.
    full: name -> the full weights that the model was built with, in its dtype. declared: what the
    Program's own `shard_of` says of a parameter's name. modules: id of a living module of build()'s
    model -> its name: stages that share its layers number them anew. numbered: what a model of
    numbers has shown, for those that are found in no other way.
    """
    pieces, inside = flat_pieces(model), dict(model.named_modules())
    params = [(n, p) for n, p in model.named_parameters() if not p.is_meta]  # else on other ranks
    named = {name for shown, _ in params for name in _by_name(shown, full)[:1]}
    owned = {shown: _module_name(inside, shown, modules or {}) for shown, _ in params}
    found = {shown: _place_one(owned[shown] or shown, param, known, full, declared, pieces)
             for shown, param in params}  # fmt: skip
    siblings = Siblings(
        {bare_name(n): name for n, (name, _, why) in found.items() if not why}, full
    )
    if all(index is None for _, index, why in found.values() if not why):  # none is cut here
        found = {shown: _alone_in_its_shape(param, full, found[shown]) for shown, param in params}
    claims: dict[str, list[tuple[str, bool]]] = {}
    # A name may be another module's where not all are here, or where values tell of one that it is.
    moved = any(
        why is None and name is not None and name not in _by_name(n, full)
        for n, (name, _, why) in found.items()
    )
    renumbered = named < full.keys() or moved
    for shown, param in params:
        name, index, problem = found[shown]
        by_identity = owned[shown] is not None or id(param) in known
        if not by_identity and renumbered and (problem is None or name is None):
            value = to_local(param).detach() if name is None else full[name]
            known_as = siblings.name_of(bare_name(shown), value)
            if known_as is not None:
                name, problem = known_as, None
            elif problem is None:
                problem = _one_of_several(name, full)
        if problem is not None and shown in (numbered or {}):
            name, index, problem = _as_numbered(param, full, (numbered or {})[shown], problem)
        found[shown] = name, index, problem
        if param.requires_grad and problem is None and name is not None:
            is_sure = by_identity or bare_name(shown) == name
            claims.setdefault(name, []).append((shown, is_sure))
    return _as_claimed(params, found, claims)


def _as_claimed(
    params: Sequence[tuple[str, nn.Parameter]],
    found: Mapping[str, Place],
    claims: Mapping[str, Sequence[tuple[str, bool]]],
) -> Placement:
    """Each of build()'s parameters for one of the rank's. claims: who is it, and by more than its
    values."""
    placed: list[Placed] = []
    unknown: list[str] = []
    frozen: list[str] = []
    for shown, param in params:
        name, index, problem = found[shown]
        if not param.requires_grad:
            if name is not None and problem is None:
                frozen.append(name)
        elif problem is not None or name is None:
            unknown.append(f"{shown} {tuple(param.shape)}: {problem}")
        elif _owner(claims[name]) != shown:
            unknown.append(f"{shown}: another parameter of this rank is {name} too")
        else:
            placed.append(Placed(name=name, param=param, index=index))
    # A frozen copy, as of a teacher, has the values of what is trained beside it.
    lost = [name for name in frozen if name not in {p.name for p in placed}]
    unknown += [f"{name} is frozen here, though build() trains it" for name in lost]
    return Placement(placed=tuple(placed), unknown=tuple(unknown))


def _owner(claims: Sequence[tuple[str, bool]]) -> str | None:
    """Which of a rank's parameters one of build()'s is, by name: of several the first that is known
    by more than its values; None where none of them is."""
    sure = [shown for shown, is_sure in claims if is_sure]
    if sure:
        return sure[0]
    return claims[0][0] if len(claims) == 1 else None


class Siblings:
    """How a part of a model numbers its layers, by those of their parameters that values tell.

    Norms and biases begin equal in all layers, weights do not: what is `layers.0.weight` here and
    `layers.2.weight` there says that `layers.0` is `layers.2`.
    """

    def __init__(self, found: Mapping[str, str | None], full: Mapping[str, Tensor]) -> None:
        """found: name as it is shown here -> name in the whole, as its own name or values say."""
        self._found, self._full = found, full

    @property
    def moved(self) -> bool:
        """Whether something has another name here than in the whole."""
        return any(name is not None and shown != name for shown, name in self._found.items())

    @cached_property
    def several(self) -> set[str]:
        """Names in the whole whose values others have, too."""
        alike: dict[tuple[object, ...], list[str]] = {}
        for name, value in self._full.items():
            key = tuple(value.shape), value.dtype, bits([value])
            alike.setdefault(key, []).append(name)
        return {name for names in alike.values() if len(names) > 1 for name in names}

    @cached_property
    def _layers(self) -> Layers:
        # Of what others are like it is asked which one it is.
        told = {s: n for s, n in self._found.items() if n is not None and n not in self.several}
        return layers_of(told)

    def name_of(self, shown: str, value: Tensor) -> str | None:
        """What a parameter of such a layer, which has this whole value, is called in the whole;
        None where no sibling says it, or what it says has another value."""
        *path, leaf = shown.split(".")
        numbered = [i for i, part in enumerate(path) if part.isdigit()]
        module = renamed(path, self._layers, least=numbered[-1] + 1 if numbered else 0)
        name = None if module is None else ".".join(filter(None, (module, leaf)))
        held = None if name is None else self._full.get(name)
        return name if held is not None and equal(held, value) else None


def layers_of(names: Mapping[str, str]) -> Layers:
    """What modules are called here and in the whole, by the names of parameters here and there:
    `layers.0.mlp` and `layers.2.mlp`, `layers.0` and `layers.2` of `layers.0.mlp.weight` and
    `layers.2.mlp.weight`; the model itself is ``. None of a module that is called two things."""
    layers: dict[str, str | None] = {}
    for shown, name in names.items():
        here, there = shown.split("."), name.split(".")
        for end in range(1, min(len(here), len(there)) + 1):
            if here[-end:] != there[-end:]:
                break
            at, known_as = ".".join(here[:-end]), ".".join(there[:-end])
            if layers.setdefault(at, known_as) != known_as:
                layers[at] = None
    return layers


def renamed(path: Sequence[str], layers: Layers, *, least: int = 0) -> str | None:
    """What a module is called in the whole, by the longest beginning of its path, of at least so
    many parts, that is told; None where none is, or only that the model is the model."""
    for cut in range(len(path), least - 1, -1):
        there = layers.get(".".join(path[:cut]))
        if there is not None and (cut or there):
            return ".".join(filter(None, (there, *path[cut:])))
    return None


def _as_numbered(
    param: nn.Parameter, full: Mapping[str, Tensor], found: tuple[str, Tensor | None], problem: str
) -> Place:
    """(name, index, why not) as a model of numbers was cut, where the weights agree."""
    name, index = found
    fits = to_local(param).shape == (full[name].shape if index is None else index.shape)
    if not fits or not agrees(param, full[name], index):
        return None, None, problem
    return name, index, None


def flat_pieces(model: nn.Module) -> dict[int, tuple[int, int]]:
    """Of FSDP1 with use_orig_params: id of a parameter -> (start, size) of the flattened whole
    that this rank holds."""
    out = {}
    for module in model.modules():
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        infos, params = getattr(flat, "_shard_param_infos", None), getattr(flat, "_params", None)
        if params is None or infos is None:  # one flat parameter in their place
            continue
        for param, info in zip(params, infos, strict=True):
            start = info.intra_param_start_idx if info.in_shard else 0
            out[id(param)] = (start, info.numel_in_shard if info.in_shard else 0)
    return {key: piece for key, piece in out.items() if None not in piece}


def _module_name(
    inside: Mapping[str, nn.Module], shown: str, modules: Mapping[int, str]
) -> str | None:
    """The name that build() has for a parameter of one of its own modules."""
    path, _, leaf = shown.rpartition(".")
    owner = modules.get(id(inside[path])) if path in inside else None
    return None if owner is None else f"{owner}.{leaf}" if owner else leaf


def where_is(
    shown: str,
    param: nn.Parameter,
    full: Mapping[str, Tensor],
    pieces: Mapping[int, tuple[int, int]],
) -> Place:
    """(name, index, why not) of one parameter among full ones, by its name, placement or values.

    pieces: as `flat_pieces` gives them.
    """
    return _place_one(shown, param, {}, full, None, pieces)


def _declared(name: str, cut: Any, full: Tensor, held: int) -> tuple[Tensor | None, str | None]:
    """(index, why not) of what a Program's `shard_of` says. TypeError where that is no index."""
    everything = torch.arange(full.numel()).view(full.shape)
    try:
        if not isinstance(cut, tuple | list | slice | Tensor):
            raise TypeError("no index")
        index = everything[tuple(cut) if isinstance(cut, list) else cut].contiguous()
    except (IndexError, TypeError) as error:
        raise TypeError(
            f"shard_of({name!r}) returned {type(cut).__name__} {cut!r:.60}, expected None or a "
            f"tuple of slices of its {tuple(full.shape)}: {error}"
        ) from None
    if index.numel() != held:
        return None, f"shard_of({name!r}) says {index.numel()} elements, and it holds {held}"
    return index, None


def _place_one(
    shown: str,
    param: nn.Parameter,
    known: Mapping[int, str],
    full: Mapping[str, Tensor],
    declared: Callable[[str], tuple[slice, ...] | None] | None,
    pieces: Mapping[int, tuple[int, int]],
) -> Place:
    """(name, index, why not). Identity first, then names whose values agree, then values alone."""
    named = [known[id(param)]] if id(param) in known else _by_name(shown, full)
    if id(param) in pieces and named:
        start, size = pieces[id(param)]
        return named[0], torch.arange(start, start + size), None
    if id(param) in known:
        return (named[0], *index_of(param, full[named[0]]))
    for name in named:
        cut = declared(name) if declared else None
        if cut is not None:
            return (name, *_declared(name, cut, full[name], to_local(param).numel()))
        index, problem = index_of(param, full[name])
        if problem is None and agrees(param, full[name], index):
            return name, index, None
    found = by_value(param, full, named)
    if len(found) == 1:
        return (found[0], *index_of(param, full[found[0]]))
    if named:
        index, problem = index_of(param, full[named[0]])
        if problem is None and is_permuted(param, full[named[0]], index):
            problem = "holds the values of build()'s in another order, a layout that is not known"
        return named[0], index, problem
    if len({*found}) == 1:
        return None, None, (f"its values occur {len(found)} times in {found[0]}: which part it is "
                            f"can be said by shard_of")  # fmt: skip
    if found:
        return None, None, ("its values are those of several of build()'s parameters, or in them: "
                            "which one it is can be said by shard_of")  # fmt: skip
    return None, None, "is none of build()'s parameters by name, identity or value"


def _one_of_several(name: str | None, full: Mapping[str, Tensor]) -> str | None:
    """Why neither a name nor values say which parameter it is, in a part of a model that may number
    its layers anew: others of that shape have the same values. None where none has."""
    value = full[name] if name is not None else None
    if value is None or not value.numel():
        return None
    alike = [n for n, other in full.items() if n != name and equal(other, value)]
    if not alike:
        return None
    return (f"its values are those of {name} and of {some_of(alike)}, and this rank's model is a "
            f"part of build()'s with names of its own: which one it is can be said by shard_of, or "
            f"by parts that are build()'s own modules")  # fmt: skip


def _by_name(shown: str, full: Mapping[str, Tensor]) -> list[str]:
    """Names it may have: as shown, without wrappers' prefixes, or the longest that it ends with."""
    name = bare_name(shown)
    ends = [n for n in full if shown.endswith(f".{n}") or name.endswith(f".{n}")]
    found = [n for n in (shown, name) if n in full] + sorted(ends, key=len, reverse=True)
    return list(dict.fromkeys(found))


def _alone_in_its_shape(param: Tensor, full: Mapping[str, Tensor], found: Place) -> Place:
    """Of a rank that cuts none, where no name tells: the only parameter of this shape with these
    values, if others have them several times over, as zeros."""
    held = by_value(param, full) if found[0] is None else []
    same = {name for name in held if full[name].shape == param.shape}
    others = {held.count(name) for name in {*held} - same}
    return (same.pop(), None, None) if len(same) == 1 and 1 not in others else found
