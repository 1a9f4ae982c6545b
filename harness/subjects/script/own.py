"""What autograd gave one rank for each parameter, before anything was reduced: samples of it.

What a rank ends with is a combination of what the ranks' own backwards gave, and so is the single
run's gradient; which, tells how they were put together. A sample of each parameter is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from sumgrad.base.tensors import to_local
from sumgrad.record.ranks import sampled
from sumgrad.record.reference import Grads
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

MAX_PASSES = 16  # backwards of a step; further ones are added to the last


class OwnGradients:
    """Observes one rank. params: name -> parameter, held as autograd accumulates it.

    A parameter whose gradient is put in place by somebody else (FSDP's shards) has none.
    """

    def __init__(self, params: Mapping[str, Tensor]) -> None:
        self._passes: dict[str, list[Tensor]] = {}
        # On the node that accumulates, which comes before any hook that reduces what is there.
        self._nodes = {n: get_gradient_edge(p).node for n, p in params.items() if p.requires_grad}
        self._hooks = [
            node.register_prehook(lambda grads, name=name: self._saw(name, grads[0]))
            for name, node in self._nodes.items()
        ]

    def taken(self, names: Iterable[str]) -> Grads:
        """Of these parameters (passes, samples), one line for each backward since they were taken
        before."""
        passes = {name: self._passes.pop(name) for name in names if name in self._passes}
        return {name: torch.stack(own) for name, own in passes.items()}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _saw(self, name: str, grad: Tensor | None) -> None:
        if grad is None:
            return
        local = to_local(grad).detach()
        own = sampled(local.to_dense() if local.is_sparse else local).clone()
        passes = self._passes.setdefault(name, [])
        if len(passes) == MAX_PASSES:
            passes[-1] += own
        else:
            passes.append(own)
