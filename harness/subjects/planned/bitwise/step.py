"""A rank's step whose sums are canonical trees: the same edges, the same bits on every topology.

Counts, messages and handoffs are the plain step's. What differs: one row a call, a term's
cotangents put together before they are differentiated, and every sum over ranks by nodes of a tree
that the plan knows beforehand, so that an exchange is two collectives and no header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from sumgrad.base.tree import Key, node, root
from sumgrad.plan.edges import Emission, Norm, Reduction, Statistic
from sumgrad.plan.schedule import cotangent_transfers
from sumgrad.plan.tree import Tree, by_rows, nodes_brought, share, trees_of
from sumgrad.record.bits import BITS
from sumgrad.subjects.planned.bitwise.rows import (
    RowByRow,
    Tensors,
    clip_factor,
    flat,
    norm_of,
    square_sum,
)
from sumgrad.subjects.planned.context import Memory, RankContext
from sumgrad.subjects.planned.step import Step
from sumgrad.subjects.planned.workload import Produced
from torch import Tensor

Nodes = dict[Key, Tensor]


def run_bitwise_step(
    ctx: RankContext, params: Mapping[str, Tensor], *, step: int, memory: Memory
) -> Tensors:
    """What this rank holds, by name (record/bits.py). ctx.tier: BITS."""
    assert ctx.tier == BITS, ctx.tier
    return TreeStep(ctx, params, step, memory).run_rows()


class TreeStep(Step):
    """One step of one rank."""

    def __init__(
        self, ctx: RankContext, params: Mapping[str, Tensor], step: int, memory: Memory
    ) -> None:
        super().__init__(ctx, params, step, memory)
        self.declaration = self.plan.declaration
        self.row_by_row = RowByRow(ctx.formulas, self.declaration, self.leaves, step)
        self.member = self.plan.topology.pool(self.pool).ranks.index(ctx.rank)
        self.own = range(self.a, self.b)
        self.tensors: Tensors = {}
        self.held: dict[str, dict[str, Nodes]] = {}  # what puts it there -> unit -> leaves
        self.with_quantity = self.pool == self.plan.producer_pool

    def run_rows(self) -> Tensors:
        """The step; what it gives."""
        self._reduce_counts()
        quantity = self._exchange_quantity()
        self._statistics()
        cotangents = self._terms(quantity)
        self._take_cotangents(cotangents)
        self._handoffs_in()
        self._reduce_by_trees()
        self._handoffs_out()
        self._norm()
        return {name: value.detach() for name, value in self.tensors.items()}

    # ---- values, statistics, terms -------------------------------------------------------------

    def _exchange_quantity(self) -> Tensors:
        """Send what this rank produces, receive what it reads; (n, ...) by unit."""
        made = None
        if self.with_quantity and self.own:
            by_row = [self.row_by_row.produced(row).quantity for row in self.own]
            made = Produced(quantity={u: torch.cat([q[u].detach() for q in by_row])
                                      for u in by_row[0]})  # fmt: skip
        received = {u: value.detach() for u, value in self._move_values(made).items()}
        held = made.quantity if made is not None else received
        self.tensors |= {f"quantity/{unit}": value for unit, value in held.items()}
        return received

    def _statistics(self) -> None:
        for edge in self.plan.select(Statistic, pool=self.pool):
            sums = {row: self.row_by_row.statistic(edge.term, row) for row in self.own}
            leaves = {(0, row): value.detach() for row, value in sums.items()}
            numel = self.declaration.term(edge.term).statistic_numel
            tree = by_rows(self.plan, self.pool, edge.term, edge=edge.name)
            with self.ctx.edge(self.step, edge.name):
                if edge.mode == "local":
                    total = _loose_sum(leaves, self._zeros(numel))
                else:
                    (total,) = self._sum_by_trees([tree], [leaves], self._zeros(numel))
                total = total if edge.weight == 1 else total * float(edge.weight)
                emission = self.plan.edge(f"emit:{edge.term}@{self.pool}")
                assert isinstance(emission, Emission)
                seed = float(emission.weight) * self.ctx.formulas.coefficient(edge.term)
                slope = self.row_by_row.slope(edge.term, total, self.counts[edge.term], seed)
                if edge.mode == "differentiable":  # the fault: every rank's loss reaches every rank
                    dist.all_reduce(slope, op=dist.ReduceOp.SUM, group=self.ctx.group)
            self.tensors[f"statistic/{edge.term}"] = total
            for row, value in sums.items():
                self._hold(emission.name, (0, row), self.row_by_row.through([value], [slope]))

    def _terms(self, quantity: Tensors) -> dict[str, Tensors]:
        """Every row-wise and replicated term of this pool; term -> (n, ...) by unit."""
        out: dict[str, Tensors] = {}
        for edge in self.plan.select(Emission, pool=self.pool):
            kind = self.declaration.term(edge.term).kind
            if kind == "statistic":
                continue
            coefficient = float(edge.weight) * self.ctx.formulas.coefficient(edge.term)
            if edge.placement != "rows":
                if edge.placement == "all" or self.member == 0:
                    count = self.row_by_row.count(edge.term)
                    grads, _ = self.row_by_row.emitted(
                        edge.term, None, self.units, quantity={}, state={},
                        seed=coefficient / count,
                    )  # fmt: skip
                    self._hold(edge.name, (0, self.member), grads)
                continue
            rows = [self._row_of_a_term(edge, row, quantity, coefficient) for row in self.own]
            if rows and rows[0]:
                out[edge.term] = {u: torch.cat([row[u] for row in rows]) for u in rows[0]}
                named = {f"cotangent/{edge.term}/{u}": v for u, v in out[edge.term].items()}
                self.tensors |= named
        return out

    def _row_of_a_term(
        self, edge: Emission, row: int, quantity: Tensors, coefficient: float
    ) -> Tensors:
        """Hold the gradients of a row; returns its cotangents, (1, ...) by unit."""
        at = row - self.a
        here = {unit: value[at : at + 1].clone() for unit, value in quantity.items()}
        known = self.memory.state.setdefault(f"{edge.term}/{row}", {})
        state = self.row_by_row.advanced(edge.term, row, here, dict(known) or None)
        self.memory.state[f"{edge.term}/{row}"] = state
        grads, cotangents = self.row_by_row.emitted(
            edge.term, row, self.units, quantity=here, state=state,
            seed=coefficient / self.counts[edge.term],
        )  # fmt: skip
        self._hold(edge.name, (0, row), grads)
        return cotangents

    def _take_cotangents(self, cotangents: Mapping[str, Tensors]) -> None:
        """Readers send back; the producer differentiates through a term's cotangents at once."""
        transfers = cotangent_transfers(self.plan, self.pool)
        outgoing = {t.name: cotangents.get(t.term or "", {}) for t in transfers}
        received = self.messages.exchange(transfers, outgoing)
        by_term: dict[str, tuple[str, Tensors]] = {}
        for transfer in transfers:
            if transfer.name in received and transfer.dst == self.pool:
                first, parts = by_term.setdefault(transfer.term or "", (transfer.name, {}))
                by_term[transfer.term or ""] = (first, parts | received[transfer.name])
        quantity = self.declaration.quantity
        for term, (edge, parts) in by_term.items():
            assert quantity is not None
            units = [unit for unit in quantity.shapes if unit in parts]
            self.tensors |= {f"cotangent/{term}/{unit}": parts[unit] for unit in units}
            for row in self.own:
                made, at = self.row_by_row.produced(row).quantity, row - self.a
                grads = self.row_by_row.through(
                    [made[u] for u in units], [parts[u][at : at + 1] for u in units]
                )
                self._hold(edge, (0, row), grads)

    def _hold(self, edge: str, key: Key, grads: Tensors) -> None:
        for unit, value in grads.items():
            self.held.setdefault(edge, {}).setdefault(unit, {})[key] = value

    def _add(self, edge: str, grads: Mapping[str, Tensor | None]) -> None:
        """What is handed over: one leaf."""
        for unit in self.units:
            parts = {p.name: grads[p.name] for p in self.declaration.params_of(unit)}
            known = {name: part for name, part in parts.items() if part is not None}
            if len(known) == len(parts):
                self._hold(edge, (0, 0), {unit: flat(known, known)})

    # ---- reductions ----------------------------------------------------------------------------

    def _reduce_by_trees(self) -> None:
        home = self.plan.role(self.pool).home
        for edge in self.plan.select(Reduction, pool=self.pool):
            params = self.declaration.params_of(edge.unit)
            nothing = self._zeros(sum(p.numel for p in params), self.ctx.dtype)
            trees = trees_of(self.plan, self.pool, edge.unit)
            leaves = [self._leaves(edge, tree, nothing) for tree in trees]
            with self.ctx.edge(self.step, edge.name):
                if edge.op == "none":
                    roots = [_loose_sum(own, nothing) for own in leaves]
                else:
                    roots = self._sum_by_trees(trees, leaves, nothing)
            if edge.op == "avg":
                roots = [value / len(trees[0].keys) for value in roots]
            for tree, value in zip(trees, roots, strict=True):
                self.tensors[f"root/{tree.name}/{edge.unit}"] = value
            total = roots[0]
            for value in roots[1:]:
                total = total + value
            for param, part in zip(params, total.split([p.numel for p in params]), strict=True):
                self.partial[param.name] = part.view(param.shape).clone()
                if home:
                    self.tensors[f"gradient/{param.name}"] = self.partial[param.name]

    def _leaves(self, edge: Reduction, tree: Tree, nothing: Tensor) -> Nodes:
        """What this rank brings to a tree: every leaf of its own rows, as the plan weighs it."""
        held = self.held.get(tree.edge, {}).get(edge.unit, {})
        keys = tree.keys[self.member]
        wanted = [(0, row) for row in self.own] if tree.over_rows else list(keys)
        own = {key: held.get(key, nothing) for key in wanted}
        before = self.memory.contributions
        stale = {key: before.get(f"{tree.edge}/{edge.unit}/{key}") for key in own}
        for key, value in own.items():
            before[f"{tree.edge}/{edge.unit}/{key}"] = value
        if edge.weight != 1:
            own = {key: value * float(edge.weight) for key, value in own.items()}
        if edge.stale_rank == self.ctx.rank:
            own = {k: v if (old := stale[k]) is None else v + old for k, v in own.items()}
        return own

    def _sum_by_trees(
        self, trees: Sequence[Tree], leaves: Sequence[Nodes], like: Tensor
    ) -> list[Tensor]:
        """Every tree's root, the same bits on every rank of the pool.

        Each rank gets its share of all nodes by an all-to-all, finishes the trees for it, and an
        all-gather joins the shares.
        """
        size, numel = len(trees[0].keys), like.numel()
        width, counts = share(numel, size), nodes_brought(tuple(trees))
        own = [
            node(key, held, tree.leaves)
            for tree, held in zip(trees, leaves, strict=True)
            for key in tree.keys[self.member]
        ]
        sends = torch.zeros(len(own), size * width, dtype=like.dtype, device=like.device)
        for place, value in enumerate(own):
            sends[place, :numel] = value
        sends = sends.view(len(own), size, width).transpose(0, 1).contiguous()
        received = torch.empty(sum(counts) * width, dtype=like.dtype, device=like.device)
        dist.all_to_all_single(
            received,
            sends.flatten(),
            output_split_sizes=[count * width for count in counts],
            input_split_sizes=[len(own) * width] * size,
            group=self.ctx.group,
        )
        brought = iter(received.view(-1, width))
        by_tree: list[Nodes] = [{} for _ in trees]
        for member in range(size):
            for i, tree in enumerate(trees):
                by_tree[i] |= {key: next(brought).clone() for key in tree.keys[member]}
        shares = torch.stack([root(by_tree[i], tree.leaves) for i, tree in enumerate(trees)])
        joined = torch.empty(size * shares.numel(), dtype=like.dtype, device=like.device)
        _all_gather(joined, shares.flatten(), self.ctx.group)
        parts = joined.view(size, len(trees), width).transpose(0, 1).reshape(len(trees), -1)
        return [part[:numel].clone() for part in parts]

    def _norm(self) -> None:
        """Every unit's part from the leader of its home, added in declared order; twice, as the
        plain step does: of the gradients, and of what clipping leaves of them."""
        (edge,) = self.plan.select(Norm)
        units = list(dict.fromkeys(p.unit for p in self.declaration.params))
        home = self.plan.role(self.pool).home
        factor = torch.ones((), dtype=torch.float64)
        for last in (False, True):
            mine = torch.zeros(len(units), dtype=torch.float64)
            for i, unit in enumerate(units):
                if home and unit in self.units and self.member == 0:
                    names = [p.name for p in self.declaration.params_of(unit)]
                    mine[i] = square_sum(flat(self.partial, names) * factor.to(self.ctx.dtype))
            size = self.plan.topology.world_size
            everybody = torch.empty(size * len(units), dtype=torch.float64)
            with self.ctx.edge(self.step, edge.name):
                _all_gather(everybody, mine, None)
            table = everybody.view(size, len(units))
            leaders = [self.plan.leader(self.plan.home(unit)) for unit in units]
            norm = norm_of(table[leader, i] for i, leader in enumerate(leaders))
            if not last:
                factor = clip_factor(norm, edge.max_norm)
                self.tensors["norm/all"], self.tensors["clip/all"] = norm, factor

    def _zeros(self, numel: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(numel, dtype=dtype or self._wide, device=self.ctx.device)


def _loose_sum(leaves: Nodes, nothing: Tensor) -> Tensor:
    """What a rank has without the others: no tree, its leaves in order."""
    total = nothing.clone()
    for key in sorted(leaves):
        total = total + leaves[key]
    return total


def _all_gather(out: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> None:
    """torch 2.13 renamed all_gather_into_tensor; older versions have only that name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, own, group=group)
