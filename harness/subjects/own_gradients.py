"""What autograd gave one rank for each parameter, before anything was reduced: samples of it.

What a rank ends with is a combination of what the ranks' own backwards gave, and so is the single
run's gradient; which, tells how they were put together. A sample of each parameter is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from sumgrad.base.tensors import to_local
from sumgrad.record.ranks import SAMPLES, sample_of
from sumgrad.record.reference import Grads
from sumgrad.subjects.users_line import users_own_line
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

MAX_PASSES = 16  # backwards of a step; further ones are added to the last


class OwnGradients:
    """Observes one rank. samples: at most so many elements of each parameter."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._most = samples
        self._passes: dict[str, list[Tensor]] = {}
        self._lines: dict[str, list[str]] = {}
        self._held: dict[str, int] = {}  # elements that are here; a gradient may have all
        self._sample: dict[str, Tensor] = {}
        self._at: Grads = {}
        self._nodes: dict[str, Any] = {}  # a node lives as long as somebody holds it
        self._hooks: dict[str, Any] = {}

    def look_at(self, name: str, leaf: Tensor, index: Tensor | None) -> None:
        """A parameter as autograd accumulates it; the last that was named is looked at.

        index: its elements in the flat whole one, None for all of them.
        """
        if not leaf.requires_grad:
            return
        if name in self._hooks:
            self._hooks.pop(name).remove()
        self._held[name] = leaf.numel() if index is None else index.numel()
        self._sample[name] = sample_of(self._held[name], self._most)
        sample = self._sample[name]
        self._at[name] = sample if index is None else index.reshape(-1)[sample]
        # Before any hook that reduces what is there. On the node that accumulates, if that can be
        # had: a hook on the tensor also fires inside autograd.grad. Not of a freed storage.
        if getattr(leaf, "_local_tensor", leaf).untyped_storage().size():
            self._nodes[name] = get_gradient_edge(leaf).node
            self._hooks[name] = self._nodes[name].register_prehook(
                lambda grads: self._saw(name, grads[0])
            )
        else:
            self._hooks[name] = leaf.register_hook(lambda grad: self._saw(name, grad))

    def knows(self, name: str) -> bool:
        """Whether a parameter is looked at."""
        return name in self._hooks

    def taken(self, names: Iterable[str]) -> tuple[Grads, Grads]:
        """Of these parameters (passes, samples), one line for each backward since they were taken
        before; and which elements these are. Not of one that is cut otherwise in some backwards."""
        every = {name: self._passes.pop(name) for name in names if name in self._passes}
        passes = {
            name: own for name, own in every.items()
            if {len(one) for one in own} == {self._at[name].numel()}
        }  # fmt: skip
        return {n: torch.stack(own) for n, own in passes.items()}, {n: self._at[n] for n in passes}

    def lines(self) -> dict[str, tuple[str, ...]]:
        """Of each parameter, the lines of a user's that called its backwards so far."""
        return {name: tuple(lines) for name, lines in self._lines.items()}

    def close(self) -> None:
        """Look no longer."""
        for hook in self._hooks.values():
            hook.remove()

    def names(self) -> dict[Any, str]:
        """By autograd's node that accumulates its gradient, the parameter; where that is known."""
        return {node: name for name, node in self._nodes.items()}

    def sampled(self, name: str, grad: Tensor) -> Tensor | None:
        """Of a gradient of it those elements that are looked at, if all of them are there."""
        local = to_local(grad).detach()
        flat = (local.to_dense() if local.is_sparse else local).reshape(-1)
        at = self._sample[name] if flat.numel() == self._held[name] else self._at[name]
        if not at.numel() or int(at.max()) >= flat.numel():
            return None
        return flat[at.to(flat.device)]

    def _saw(self, name: str, grad: Tensor | None) -> None:
        own = None if grad is None else self.sampled(name, grad)
        if own is None:
            return
        passes = self._passes.setdefault(name, [])
        if len(passes) == MAX_PASSES and len(own) == len(passes[-1]):
            passes[-1] += own
        else:
            passes.append(own)
            self._lines.setdefault(name, []).append(users_own_line())


class Losses:
    """Between `with` and its end: the values that backwards start from.

    at: is called with each tensor.
    """

    def __init__(self, at: Callable[[Tensor], None] = lambda loss: None) -> None:
        self.values: list[float] = []
        self._at = at

    def __enter__(self) -> Losses:
        own = self._own = torch.autograd.backward

        @functools.wraps(own)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if grad_tensors is None:
                found = [t for t in roots if isinstance(t, Tensor) and t.numel() == 1]
                self.values += [float(to_local(t.detach())) for t in found]
                for loss in found:
                    self._at(loss)
            return own(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = backward
        return self

    def __exit__(self, *error: object) -> None:
        torch.autograd.backward = self._own


def gathered(root: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Of fully_shard's parameters, each shard and what autograd accumulates in its place.

    Known from the first forward on.
    """
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", None) or ():
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    yield param.sharded_param, param._unsharded_param
