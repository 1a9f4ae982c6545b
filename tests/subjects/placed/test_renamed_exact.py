"""Names of modules where a rank's model is a part of build()'s that numbers its layers anew."""

from __future__ import annotations

import copy

from sumgrad.subjects.program.placed.placement import Placed, Placement
from sumgrad.subjects.program.placed.renamed import OWN, names_of_modules
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.up = nn.Tanh(), nn.Linear(2, 2)


def model() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(4))})


def names(rank: nn.Module, first: int, built: nn.Module) -> dict[str, str]:
    """By the names of the rank's model. first: of its layers in build()'s."""
    placed = [
        Placed(name=f"layers.{first + int(n.split('.')[1])}.{n.split('.', 2)[2]}", param=p,
               index=None)
        for n, p in rank.named_parameters()
    ]  # fmt: skip
    found = names_of_modules(
        rank, dict(built.named_modules()), Placement(placed=tuple(placed), unknown=())
    )
    return {n: found[id(m)] for n, m in rank.named_modules() if id(m) in found}


def test_copies_that_are_numbered_anew_have_the_names_of_what_they_are():
    built = model()
    rank = nn.ModuleDict({"layers": nn.ModuleList(copy.deepcopy([*built["layers"]][2:]))})
    found = names(rank, 2, built)
    assert found["layers.0.up"] == "layers.2.up"
    assert found["layers.1"] == "layers.3"
    assert found["layers.0.act"] == f"{OWN}layers.0.act"  # not build()'s layers.0.act
    assert "" not in found


def test_build_s_own_modules_and_names_that_are_the_same_are_left_alone():
    built = model()
    assert names(built, 0, built)["layers.3.up"] == "layers.3.up"
    assert names(copy.deepcopy(built), 0, built) == {}
