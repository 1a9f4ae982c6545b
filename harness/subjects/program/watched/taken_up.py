"""Which modules' outputs others are made from, as autograd's graph shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Node = Any  # torch.autograd.graph.Node: what made a tensor
Place = tuple[int, str]  # when a tensor was there, and whose it is


def taken_up(made: Sequence[tuple[str, Node]]) -> dict[str, tuple[str, ...]]:
    """Name -> names whose tensors its own are made from, with none in between.

    made: whose tensor, and the node that made it, in the order in which they were there. A node may
    have several names: a module's, and that of the last one inside it.
    """
    named: dict[Node, list[Place]] = {}
    for when, (name, node) in enumerate(made):
        named.setdefault(node, []).append((when, name))
    out: dict[str, dict[str, None]] = {name: {} for name, _ in made}
    for node, places in named.items():
        found = _next_places(node, named)
        for when, name in places:
            before = (other for then, other in found if then < when and other != name)
            out[name] |= dict.fromkeys(before)
    return {name: tuple(found) for name, found in out.items()}


def _next_places(node: Node, named: Mapping[Node, list[Place]]) -> list[Place]:
    """The first places on every way from a node towards the leaves."""
    found: list[Place] = []
    todo, seen = [n for n, _ in node.next_functions], {node}
    while todo:
        at = todo.pop()
        if at is None or at in seen:
            continue
        seen.add(at)
        if at in named:
            found += named[at]
        else:
            todo += [n for n, _ in at.next_functions]
    return found
