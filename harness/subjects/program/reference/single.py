"""A Program in one process: its terms over any rows, in one dtype, at weights that are set."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sumgrad.base.errors import Broken
from sumgrad.base.tensors import hash_weights
from sumgrad.record.spec import Facts
from sumgrad.subjects.noise_floor import Grads
from sumgrad.subjects.program.batch import (
    cut,
    full_batch,
    hold_batch,
    on_device,
    round_batch,
    takes_step,
)
from sumgrad.subjects.program.lift import lifting
from sumgrad.subjects.program.protocol import (
    Weights,
    build,
    default_dtype,
    hash_model,
    loss_of,
    scramble,
    terms_of,
    to_precision,
    trained,
)
from sumgrad.subjects.program.unseen import buffers_after, describe_tensor, leaves_of
from torch import Tensor, nn

SAME = 1e-9  # of the scale: float64 runs of one term that differ by more are not one computation


_shares: dict[int, tuple[Any, bool]] = {}  # by id of a Program, which is kept alive


def own_model(program: Any) -> nn.Module:
    """build()'s model, whose memory nobody else has: some Programs give the same object each time,
    or models over weights that they hold.

    Only theirs is copied: a copy loses the hooks and attributes of its parameters, and a forward
    that was put in place of another still leads to the original.
    """
    scramble(11)
    model = build(program)
    if id(program) not in _shares:
        scramble(11)
        _shares[id(program)] = program, bool(_memory(model) & _memory(build(program)))
    return copy.deepcopy(model) if _shares[id(program)][1] else model


def _memory(model: nn.Module) -> set[int]:
    """Where a model's numbers are."""
    held = [t for t in (*model.parameters(), *model.buffers()) if t.layout == torch.strided]
    return {t.untyped_storage().data_ptr() for t in held if t.numel() and not t.is_meta}


class Single:
    """A Program's terms in one process and one dtype, at weights that are set for each run."""

    def __init__(
        self,
        program: Any,
        facts: Facts,
        dtype: torch.dtype,
        *,
        rounded_to: torch.dtype,
        lift: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        self.lift, self.device = lift, torch.device(device)
        model = own_model(program)
        self.facts, self.dtype = facts, dtype
        self.base = {n: p.detach().clone() for n, p in trained(model).items()}
        self.built = hash_model(model)
        self.model = to_precision(to_precision(model, rounded_to), dtype).to(self.device)
        self.buffers = copy.deepcopy(dict(self.model.named_buffers()))
        self.program, self.terms = program, terms_of(program)
        self.rounded_to = rounded_to
        self._set_batch(0)
        self._runs, self.value = 0, 0.0
        self.leaves: dict[int, tuple[Tensor, int]] = {}
        self.at_loss: Callable[[Tensor], object] = lambda _: None  # whoever wants to see it

    def set_step(self, step: int, *, jitter: int = 0, rows_of: int | None = None) -> str:
        """Set the weights and rows of a step, rounded; returns the weights' hash, rounded.

        rows_of: the step whose rows are taken, if not its own.

        jitter: a seed; every weight is then moved by one rounding of the dtype, up or down.
        A step that cuts sums within a row (tensor parallelism) rounds like that, and no order of
        the rows shows it.
        """
        rows_of = step if rows_of is None else rows_of
        if rows_of != self.batch_step and takes_step(self.program):
            self._set_batch(rows_of)
        weights = Weights(self.base, step, self.rounded_to, self.rounded_to)
        eps, generator = torch.finfo(self.dtype).eps, torch.Generator().manual_seed(jitter)
        with torch.no_grad():
            for name, param in self._params().items():
                param.copy_(weights[name])
                if jitter:
                    sign = 2 * torch.randint(0, 2, param.shape, generator=generator) - 1
                    param.mul_(1 + eps * sign.to(param))
        return hash_weights(weights)

    def _set_batch(self, step: int) -> None:
        """The rows of a step. Broken where they are more or fewer than those of the first."""
        batch = full_batch(self.program, step)
        self.batch_step, self.batch_hash = step, hash_weights(batch)
        self.batch = self._rounded(batch)
        found = len(next(iter(batch.values())))
        if found != self.facts.num_rows:
            raise Broken(f"batch({step}) has {found} rows, batch(0) has {self.facts.num_rows}")

    def _rounded(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return on_device(round_batch(batch, self.rounded_to, self.dtype), self.device)

    def _params(self) -> dict[str, nn.Parameter]:
        """What build() trains; what the loss thaws later is outside."""
        params = dict(self.model.named_parameters())
        return {name: params[name] for name in self.base}

    def gradient(
        self, name: str, rows: Tensor, whole: Tensor, *, seed: float = 1.0
    ) -> tuple[Grads, float]:
        """A term's gradient over some rows, and its count. rows: (n,) int64.

        whole: the rows at whose sums a statistics term is evaluated. seed: what the loss is
        multiplied by before the backward, as a step's own division does.
        """
        self._begin()
        rows, whole = rows.to(self.device), whole.to(self.device)
        params = self._params()
        for param in params.values():
            param.grad = None
        term = self.terms[name]
        with default_dtype(self.dtype), lifting(self.dtype, change=self.lift):
            if isinstance(term, tuple):
                loss, count = self._statistic(term, rows, whole)
            else:
                given = cut(self.batch, rows, self.facts.rows_as)
                loss, count = loss_of(term, name, self.model, given)
            self._see_leaves(loss)
            self.at_loss(loss)
            self.value = float(loss.detach())
            if loss.requires_grad:
                loss.backward(torch.full_like(loss, seed))
        return {n: _taken(p) for n, p in params.items()}, count

    def value_and_count(self, name: str, rows: Tensor) -> tuple[float, float]:
        """A term's SUM over some rows, and its count; without a graph where it can do without."""
        term = self.terms[name]
        if isinstance(term, tuple):
            _, count = self.gradient(name, rows, rows)
            return self.value, count
        for graph in (False, True):
            self._begin()
            with (
                torch.set_grad_enabled(graph),
                default_dtype(self.dtype),
                lifting(self.dtype, change=self.lift),
            ):
                given = cut(self.batch, rows, self.facts.rows_as)
                try:
                    total, count = loss_of(term, name, self.model, given)
                    return float(total.detach()), count
                except RuntimeError:  # a gradient is part of the loss itself
                    if graph:
                        raise
        raise AssertionError

    def _begin(self) -> None:
        """Before each run: other random numbers, the same buffers and rows."""
        self._runs += 1
        scramble(13, self._runs)
        hold_batch(self.program, self.batch, self._rounded)
        with torch.no_grad():
            for key, value in self.model.named_buffers():
                value.copy_(self.buffers[key])

    def _see_leaves(self, loss: Tensor) -> None:
        """Count in how many runs each tensor is trained by the loss."""
        for leaf in leaves_of(loss):
            self.leaves[id(leaf)] = (leaf, self.leaves.get(id(leaf), (leaf, 0))[1] + 1)

    def outside(self) -> tuple[str, ...]:
        """What the loss trains that is none of build()'s parameters. What a run makes for itself
        (the points of a gradient penalty) is another tensor each time."""
        params = trained(self.model)
        own = {id(param) for param in params.values()}
        found = [leaf for leaf, runs in self.leaves.values() if runs > 1 and id(leaf) not in own]
        words = [
            f"{describe_tensor(leaf, self.program)} is trained by the loss and is none of "
            f"build()'s parameters, so its gradient was not compared: hold it in build()'s model, "
            f"or freeze it"
            for leaf in found
        ]
        late = [name for name in params if name not in self.facts.params]
        words += [f"{name} requires a gradient only after loss_sum has run" for name in late]
        return tuple(dict.fromkeys(words))

    def buffers_after(self) -> tuple[Grads, list[str]]:
        """Buffers as the last run left them, and which of them it changed."""
        return buffers_after(self.model, self.buffers, self.facts.compares)

    def gradient_exact(
        self, name: str, rows: Tensor, whole: Tensor, *, seed: float = 1.0
    ) -> tuple[Grads, float]:
        """The same as float64 tensors."""
        grads, count = self.gradient(name, rows, whole, seed=seed)
        return {n: g.double() for n, g in grads.items()}, count

    @property
    def same(self) -> float:
        """Runs of one computation differ by no more than this part of the scale."""
        return SAME if self.dtype == torch.float64 else 1e4 * torch.finfo(self.dtype).eps

    def _statistic(self, term: Any, rows: Tensor, whole: Tensor) -> tuple[Tensor, float]:
        """<d value / d S at the sums of `whole`, statistics(rows)>, so that rows add up."""
        statistics, value = term
        with torch.no_grad():
            sums = statistics(self.model, cut(self.batch, whole, self.facts.rows_as))
        point = sums.detach().requires_grad_()
        (slope,) = torch.autograd.grad(value(point, len(whole)), point)
        own = statistics(self.model, cut(self.batch, rows, self.facts.rows_as))
        return (slope * own).sum(), 1.0


def _taken(param: nn.Parameter) -> Tensor:
    """Its gradient, which it has no more; copied only where somebody else may have it too."""
    grad, param.grad = param.grad, None
    if grad is None:
        return torch.zeros_like(param, device="cpu")
    if grad.device.type != "cpu":
        return (grad.to_dense() if grad.is_sparse else grad).detach().cpu()
    if grad.is_sparse:
        return grad.to_dense().detach()
    whole = grad.untyped_storage().nbytes() == grad.numel() * grad.element_size()
    alone = sys.getrefcount(grad) <= 2  # this function's name for it, and the call's
    return grad.detach() if whole and alone else grad.detach().clone()
