"""What every use of a parameter gives of its gradient: of each line that takes it, in a backward.

A gradient that is the sum of several uses can be counted rightly in one of them and wrongly in
another, as where one is each rank's own part and another all ranks have alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sumgrad.record.uses import Use
from sumgrad.subjects.own_gradients import OwnGradients
from sumgrad.subjects.program.watched.ways import MOST_IN_ALL, passed_by
from torch import Tensor

Node = Any  # torch.autograd.graph.Node: what made a tensor

MOST_USES = 8  # of one parameter; where it has more, none of them is told
MOST_ELEMENTS = 1 << 12  # of one parameter, that are kept


class Uses:
    """Of one rank's parameters, as `own` has them. `begin` comes before every backward."""

    def __init__(self, own: OwnGradients) -> None:
        self._own = own
        self._hooked: dict[tuple[Node, int], None] = {}
        self._found: dict[str, dict[Use, Tensor]] = {}

    def begin(self, roots: Sequence[Tensor]) -> None:
        """A backward starts from these."""
        names = self._own.names()
        for node in _nodes([r.grad_fn for r in roots if r.grad_fn is not None]):
            for i, (below, _) in enumerate(node.next_functions):
                if below in names and (node, i) not in self._hooked:
                    self._hooked[node, i] = None
                    node.register_hook(partial(self._saw, names[below], node, i))

    def taken(self) -> Mapping[str, Mapping[Use, Tensor]]:
        """Of those parameters that several lines use: of each line the sum over all backwards, at
        the first of the elements that `own` keeps."""
        return {name: uses for name, uses in self._found.items() if 1 < len(uses) <= MOST_USES}

    def _saw(
        self, name: str, node: Node, at: int, inner: Sequence[Tensor | None], outer: Any
    ) -> None:
        grad = inner[at] if at < len(inner) else None
        sample = None if grad is None else self._own.sampled(name, grad)
        if sample is None:
            return
        passed = passed_by(node)
        use = Use(function=passed.function, line=passed.line, code=passed.code)
        uses = self._found.setdefault(name, {})
        gave = sample[:MOST_ELEMENTS].double()
        uses[use] = uses[use] + gave if use in uses else gave


def _nodes(roots: Sequence[Node]) -> Iterator[Node]:
    todo, seen = list(roots), set(roots)
    while todo and len(seen) < MOST_IN_ALL:
        at = todo.pop()
        yield at
        for below, _ in at.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
