"""Where a weight's gradient goes: into its tree if the caller keeps one, else into `.grad`.

Nodes bypass autograd's `.grad +=`, which would add micro-batches in arrival order and round them.
A caller that wants the same bits over micro-batches or ranks hands every use of a weight its own
Accumulator, adds the roots in a declared order and rounds once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from sumgrad.kernels.tree import Accumulator, Nodes, sum_nodes
from torch import Tensor

Sinks = Mapping[str, Accumulator]


def check_sinks(operator: str, sinks: Sinks | None, names: Sequence[str]) -> None:
    """Raise KeyError, before anything runs, where a tree is missing."""
    missing = [name for name in names if sinks is not None and name not in sinks]
    if missing:
        raise KeyError(f"{operator}: sinks has no accumulator for {missing[0]!r}")


def deliver(nodes: Nodes, name: str, sinks: Sinks | None, dtype: torch.dtype) -> Tensor | None:
    """Nodes to the sink of `name`; without sinks the folded gradient, rounded once to dtype."""
    if sinks is None:
        return sum_nodes(nodes).to(dtype)
    sinks[name].add(nodes)
    return None
