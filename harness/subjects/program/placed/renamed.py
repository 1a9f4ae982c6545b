"""Modules of a rank's model by the names that build() has for them, where stages number them anew.

A part of a model that is a copy has modules of its own: where its parameters were found under other
names, so are the modules that own them, and what lies around these.
"""

from __future__ import annotations

from collections.abc import Mapping

from sumgrad.subjects.program.placed.placement import Placement
from torch import nn

OWN = "this rank's own "  # before names that are none of build()'s


def names_of_modules(
    model: nn.Module, built: Mapping[str, nn.Module], placement: Placement
) -> dict[int, str]:
    """id of a module -> its name in build()'s model. built: those of that, by name."""
    names = {id(module): name for name, module in built.items()}
    inside = dict(model.named_modules())
    found: dict[str, set[str]] = {}
    for shown, name in _owners(model, placement):
        for here, there in _around(shown, name):
            found.setdefault(here, set()).add(there)
    told = {here: there.pop() for here, there in found.items() if len(there) == 1}
    told = {here: there for here, there in told.items() if id(inside[here]) not in names}
    if all(here == there or here.endswith(f".{there}") for here, there in told.items()):
        return names
    for here, module in inside.items():
        if here and id(module) not in names:
            names[id(module)] = told.get(here, f"{OWN}{here}")
    return names


def _owners(model: nn.Module, placement: Placement) -> list[tuple[str, str]]:
    """The modules that own a parameter, by the names here and in build()'s model."""
    placed = {id(p.param): p.name for p in placement.placed}
    owners = []
    for shown, param in model.named_parameters():
        here, _, leaf = shown.rpartition(".")
        there, _, own = placed.get(id(param), "").rpartition(".")
        if here and there and leaf == own:
            owners.append((here, there))
    return owners


def _around(here: str, there: str) -> list[tuple[str, str]]:
    """A module by both names, and those around it as long as both call what is inside the same."""
    found = [(here, there)]
    while True:
        (a, _, last), (b, _, own) = here.rpartition("."), there.rpartition(".")
        if last != own or not a or not b:
            return found
        here, there = a, b
        found.append((here, there))
