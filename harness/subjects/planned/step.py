"""One rank's training step: executes the Plan's own edges and nothing else.

What it is: the distributed path that the harness judges, on real collectives. What it is not: it
holds no formula (the workload's) and no expectation (the reference's). Gradients come out fully
reduced and before clipping, as this rank holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.convention import clip_by_global_norm_, global_grad_norm, global_residual
from sumgrad.plan.edges import Count, Emission, Handoff, Norm, Reduction, Statistic
from sumgrad.plan.schedule import cotangent_transfers, value_transfers
from sumgrad.subjects.planned.context import Digest, Memory, RankContext, StepResult, digest
from sumgrad.subjects.planned.exchange import exchange
from sumgrad.subjects.planned.messages import Messages
from sumgrad.subjects.planned.workload import (
    Produced,
    check_produced,
    check_scalar,
    check_statistics,
)
from torch import Tensor


def run_step(
    ctx: RankContext, params: Mapping[str, Tensor], *, step: int, memory: Memory
) -> StepResult:
    """Run one step. params: all weights in the working dtype; those of this pool get gradients."""
    return Step(ctx, params, step, memory).run()


class Step:
    """One step of one rank, piece by piece."""

    def __init__(
        self, ctx: RankContext, params: Mapping[str, Tensor], step: int, memory: Memory
    ) -> None:
        self.ctx, self.plan, self.step, self.memory = ctx, ctx.plan, step, memory
        self.pool = ctx.pool
        self.units = self.plan.units[self.pool]
        self.a, self.b = self.plan.rows(ctx.rank)
        self.rows = torch.arange(self.a, self.b, device=ctx.device)
        declared = [p for unit in self.units for p in self.plan.declaration.params_of(unit)]
        self.leaves = {p.name: params[p.name].detach().requires_grad_() for p in declared}
        self.partial = {name: torch.zeros_like(leaf) for name, leaf in self.leaves.items()}
        self.messages = Messages(ctx, step)
        self.digests: list[Digest] = []
        self.counts: dict[str, int] = {}

    def run(self) -> StepResult:
        self._reduce_counts()
        produced = self._produce()
        quantity = self._move_values(produced)
        self._emit_statistic_terms(produced)
        cotangents = self._emit_terms(quantity)
        self._move_cotangents(produced, cotangents)
        self._handoffs_in()
        self._reduce()
        self._handoffs_out()
        norm, clipped_norm = self._norm_and_clip()
        return StepResult(
            grads={name: grad.detach() for name, grad in self.partial.items()},
            digests=tuple(self.digests),
            counts=self.counts,
            norm=norm,
            clipped_norm=clipped_norm,
        )

    # ---- counts, values, statistics ------------------------------------------------------------

    def _reduce_counts(self) -> None:
        for edge in self.plan.select(Count, pool=self.pool):
            local = [self._count_local(term) for term in edge.terms]
            total = torch.tensor(local, dtype=torch.int64, device=self.ctx.device)
            with self.ctx.edge(self.step, edge.name):
                dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.ctx.group)
            for term, value in zip(edge.terms, total.tolist(), strict=True):
                self.counts[term] = int(value * edge.weight)

    def _count_local(self, term: str) -> int:
        return self.ctx.formulas.count(term, self.rows) if len(self.rows) else 0

    def _count_replicated(self, term: str) -> int:
        return self.ctx.formulas.count(term, self.rows)

    def _produce(self) -> Produced | None:
        needed = self.pool == self.plan.producer_pool or self.plan.select(Statistic, pool=self.pool)
        if not needed or not len(self.rows):
            return None
        produced = self.ctx.formulas.produce(self.leaves, self.rows)
        check_produced(self.plan.declaration, produced, len(self.rows))
        return produced

    def _move_values(self, produced: Produced | None) -> dict[str, Tensor]:
        """Send the quantity to its readers; on a reader, return it as leaves, (n, ...) by unit."""
        values = {u: q.detach() for u, q in produced.quantity.items()} if produced else {}
        transfers = value_transfers(self.plan, self.pool)
        received = self.messages.exchange(transfers, {t.name: values for t in transfers})
        leaves: dict[str, Tensor] = {}
        for parts in received.values():
            leaves |= {u: x.requires_grad_() for u, x in parts.items()}
        return leaves

    def _emit_statistic_terms(self, produced: Produced | None) -> None:
        formulas, wide = self.ctx.formulas, self._wide
        for edge in self.plan.select(Statistic, pool=self.pool):
            if produced is not None:
                local = formulas.statistics(edge.term, produced, self.rows)
                check_statistics(self.plan.declaration, edge.term, local)
            else:
                numel = self.plan.declaration.term(edge.term).statistic_numel
                # Tied to the weights, so that a backward collective runs here too.
                tie = sum(leaf.sum() * 0 for leaf in self.leaves.values())
                local = torch.zeros(numel, dtype=wide, device=self.ctx.device) + tie
            with self.ctx.edge(self.step, edge.name):
                total = self._global_sum(edge, local)
                if produced is None and edge.mode != "differentiable":
                    continue
                value = formulas.value(edge.term, total, self.counts[edge.term])
                self._emit(edge.term, value, retain=True)

    def _global_sum(self, edge: Statistic, local: Tensor) -> Tensor:
        if edge.mode == "local":
            return local
        if edge.mode == "differentiable":
            leaf = local if local.requires_grad else local.requires_grad_()
            return _DifferentiableSum.apply(leaf, self.ctx.group)
        return global_residual(local, group=self.ctx.group) * float(edge.weight)

    # ---- terms ---------------------------------------------------------------------------------

    def _emit_terms(self, quantity: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Every row-wise and replicated term of this pool; returns term -> d loss / d quantity."""
        cotangents: dict[str, dict[str, Tensor]] = {}
        for edge in self.plan.select(Emission, pool=self.pool):
            kind = self.plan.declaration.term(edge.term).kind
            idle = not len(self.rows) if edge.placement == "rows" else False
            if edge.placement == "leader":
                idle = self.ctx.rank != self.plan.leader(self.pool)
            if kind == "statistic" or idle:
                continue
            loss = self.ctx.formulas.loss_sum(
                edge.term,
                params=self.leaves,
                quantity=quantity,
                rows=self.rows,
                units=self.units,
                step=self.step,
                state=self._advanced(edge.term, quantity),
            )
            cotangents[edge.term] = self._emit(edge.term, loss, quantity=quantity)
        return cotangents

    def _advanced(self, term: str, quantity: dict[str, Tensor]) -> dict[str, Tensor]:
        formulas, state = self.ctx.formulas, self.memory.state
        if not len(self.rows):
            return {}
        if term not in state:
            state[term] = formulas.initial_state(term, self.rows)
        state[term] = formulas.advance(
            term,
            params=self.leaves,
            quantity=quantity,
            rows=self.rows,
            step=self.step,
            state=state[term],
        )
        return state[term]

    def _emit(
        self,
        term: str,
        loss: Tensor,
        *,
        quantity: Mapping[str, Tensor] | None = None,
        retain: bool = False,
    ) -> dict[str, Tensor]:
        """Seed the loss with coefficient / count, once, and add the partials it gives."""
        edge = self.plan.edge(f"emit:{term}@{self.pool}")
        assert isinstance(edge, Emission)
        check_scalar(term, loss)
        divided = self.plan.declaration.term(term).kind != "statistic"
        count = self.counts[term] if term in self.counts else self._count_replicated(term)
        seed = float(edge.weight) * self.ctx.formulas.coefficient(term) / (count if divided else 1)
        leaves, quantity = list(self.leaves.values()), quantity or {}
        grads = torch.autograd.grad(
            loss,
            [*leaves, *quantity.values()],
            grad_outputs=torch.full_like(loss, seed),
            allow_unused=True,
            retain_graph=retain,
        )
        self._add(edge.name, dict(zip(self.leaves, grads[: len(leaves)], strict=True)))
        return {
            unit: torch.zeros_like(value) if grad is None else grad
            for (unit, value), grad in zip(quantity.items(), grads[len(leaves) :], strict=True)
        }

    def _add(self, edge: str, grads: Mapping[str, Tensor | None]) -> None:
        """Add one contribution to the partial sums, and note its digest by unit."""
        for unit in self.units:
            names = [p.name for p in self.plan.declaration.params_of(unit)]
            held = [grads[name] for name in names]
            if all(grad is None for grad in held):
                continue
            parts = [
                torch.zeros_like(self.leaves[n]) if g is None else g
                for n, g in zip(names, held, strict=True)
            ]
            flat = torch.cat([part.reshape(-1) for part in parts])
            self.digests.append(digest(edge, unit, flat))
            for name, part in zip(names, parts, strict=True):
                self.partial[name] = self.partial[name] + part

    # ---- messages ------------------------------------------------------------------------------

    def _move_cotangents(
        self, produced: Produced | None, cotangents: dict[str, dict[str, Tensor]]
    ) -> None:
        """Readers send back; the producer differentiates through what arrives, term by term."""
        transfers = cotangent_transfers(self.plan, self.pool)
        outgoing = {t.name: cotangents.get(t.term or "", {}) for t in transfers}
        for name, parts in self.messages.exchange(transfers, outgoing).items():
            if produced is None or not parts:
                continue
            grads = torch.autograd.grad(
                [produced.quantity[unit] for unit in parts],
                list(self.leaves.values()),
                grad_outputs=list(parts.values()),
                allow_unused=True,
                retain_graph=True,
            )
            self._add(name, dict(zip(self.leaves, grads, strict=True)))

    # ---- reductions ----------------------------------------------------------------------------

    def _handoffs_in(self) -> None:
        receives = []
        for edge in self.plan.select(Handoff):
            if edge.dst_rank == self.ctx.rank:
                numel = sum(self.plan.declaration.numel_of(unit) for unit in edge.units)
                parcel = self.messages.parcel(
                    edge.name, edge.src_rank, 0, 0, self.messages.empty(numel)
                )
                receives.append((edge, parcel))
        if receives:
            exchange([], [parcel for _, parcel in receives], label=self.messages.label)
        for edge, parcel in receives:
            names = [p.name for u in edge.units for p in self.plan.declaration.params_of(u)]
            sizes = [self.leaves[name].numel() for name in names]
            parts = parcel.payload.split(sizes)
            views = {n: x.view(self.leaves[n].shape) for n, x in zip(names, parts, strict=True)}
            self._add(edge.name, {name: views.get(name) for name in self.leaves})

    def _handoffs_out(self) -> None:
        sends = []
        for edge in self.plan.select(Handoff):
            if edge.src_rank == self.ctx.rank:
                names = [p.name for u in edge.units for p in self.plan.declaration.params_of(u)]
                flat = torch.cat([self.partial[name].reshape(-1) for name in names])
                flat = flat if edge.weight == 1 else flat * float(edge.weight)
                sends.append(self.messages.parcel(edge.name, edge.dst_rank, 0, 0, flat))
        if sends:
            exchange(sends, [], label=self.messages.label)

    def _reduce(self) -> None:
        for edge in self.plan.select(Reduction, pool=self.pool):
            names = [p.name for p in self.plan.declaration.params_of(edge.unit)]
            flat = torch.cat([self.partial[name].reshape(-1) for name in names])
            own = flat.clone()
            if edge.weight != 1:
                flat = flat * float(edge.weight)
            if edge.stale_rank == self.ctx.rank and edge.name in self.memory.contributions:
                flat = flat + self.memory.contributions[edge.name]
            self.memory.contributions[edge.name] = own
            if edge.op != "none":
                op = dist.ReduceOp.SUM if edge.op == "sum" else dist.ReduceOp.AVG
                with self.ctx.edge(self.step, edge.name):
                    dist.all_reduce(flat, op=op, group=self.ctx.group)
            sizes = [self.partial[name].numel() for name in names]
            for name, part in zip(names, flat.split(sizes), strict=True):
                self.partial[name] = part.view(self.partial[name].shape)

    def _norm_and_clip(self) -> tuple[float, float]:
        """The global norm, and that of the gradients as they are after clipping to max_norm."""
        (edge,) = self.plan.select(Norm)
        home = self.plan.role(self.pool).home
        clipped = {name: grad.clone() for name, grad in self.partial.items()}
        norms: list[float] = []
        with self.ctx.edge(self.step, edge.name):
            for grads in (self.partial, clipped):
                held = [(grad if home else None, self.ctx.group) for grad in grads.values()]
                norm = global_grad_norm(held, device=self.ctx.device)
                if not norms:
                    clip_by_global_norm_(clipped.values(), norm=norm, max_norm=edge.max_norm)
                norms.append(float(norm))
        return norms[0], norms[1]

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.ctx.dtype == torch.float64 else torch.float32


class _DifferentiableSum(torch.autograd.Function):
    """The fault: all-reduce forward and backward, so every rank's loss reaches every rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = local.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ctx.group)
        return total, None
