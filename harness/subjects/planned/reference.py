"""The reference: one process, the full batch, the same formulas, no distributed code.

What it is: the value that every rank's gradient must have, the noise that arithmetic in a dtype
makes around it, and on request every partial that it is the sum of. What it is not: it imports no
plan, no collective and nothing of the step (a test reads the imports). It takes every count itself
from the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from sumgrad.base.devices import take_device
from sumgrad.base.tensors import hash_weights
from sumgrad.record.reference import Reference
from sumgrad.subjects.noise_floor import (
    Grads,
    Run,
    differences,
    floor_runs,
    measure_floor,
    norm,
    raise_floor,
)
from sumgrad.subjects.planned.workload import (
    Formulas,
    Workload,
    check_produced,
    check_scalar,
    check_statistics,
    rank_formulas,
)
from sumgrad.topology.declaration import Declaration
from torch import Tensor

Producers = Mapping[str, Sequence[tuple[str, tuple[str, ...]]]]
Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One tier's reference. producers: term -> (pool, its units); num_chunks: a floor run's.

    kernels, ranks_on: what the ranks run on; the reference itself always has torch's operators, on
    `device`.
    """

    workload: Workload
    producers: Producers
    dtype: torch.dtype
    device: str
    steps: int
    num_chunks: int
    kernels: str = "torch"
    ranks_on: str = "cpu"


def compute_reference(job: Job, *, progress: Progress = lambda _: None) -> list[Reference]:
    """The reference of every step in one dtype, with its noise floor."""
    declaration, num_rows = job.workload.declaration, job.workload.declaration.num_rows
    everything = torch.arange(num_rows, device=job.device)
    exact, again = _Single(job, torch.float64), _Single(job, torch.float64)
    formulas = job.workload.formulas(job.dtype, job.device, rounded_to=job.dtype)
    cuts = floor_runs(num_rows, job.num_chunks, job.device)
    working = {name: _Single(job, job.dtype, formulas) for name in cuts}
    theirs = _as_ranks(job)
    out = []
    for step in range(job.steps):
        progress(f"reference, step {step}")
        reference = exact.run(step, [everything])
        other = again.run(step, list(everything.flip(0).chunk(3)))
        runs = []
        for name, chunks in cuts.items():
            progress(f"noise floor ({name}), step {step}")
            runs.append(working[name].run(step, chunks, with_scale=name == "one by one"))
        grads = reference.total()
        scale = dict(next(run.scale for run in runs if run.scale))
        for param in declaration.params:
            scale.setdefault(param.name, torch.zeros(param.shape, dtype=torch.float64))
        sizes = {name: float(s.max()) if s.numel() else 0.0 for name, s in scale.items()}
        floor = measure_floor(reference.summed(), [run.summed() for run in runs])
        found = []
        for name, single in theirs.items():
            progress(f"noise floor ({job.kernels} kernels on {job.ranks_on}, {name}), step {step}")
            chunks = [chunk.to(single.everything.device) for chunk in cuts[name]]
            found.append(single.run(step, chunks).summed().on_host())
        if found:
            floor = raise_floor(floor, reference.summed(), found, sizes, job.dtype)
        out.append(
            Reference(
                step=step,
                grads=grads,
                by_term=reference.by_term,
                resolution=differences(reference.by_term, other.by_term),
                scale=sizes,
                floor=floor.by_name,
                floor_by_term=floor.by_term,
                same_dtype=runs[0].total(),
                norm=norm(grads),
                norm_floor=floor.norm,
                counts=reference.counts,
                weights=hash_weights(_rounded(job, step)),
            )
        )
    return out


def _as_ranks(job: Job) -> dict[str, _Single]:
    """Single processes on what the ranks run on, by their cut of the rows; none where that is what
    the reference has. Several on a GPU, whose roundings are its own, one of kernels on a CPU."""
    if job.kernels == "torch" and job.ranks_on == job.device:
        return {}
    there = replace(job, device=str(take_device(job.ranks_on)))
    formulas = rank_formulas(job.workload, job.dtype, there.device, kernels=job.kernels)
    cuts = ["at once"] if job.ranks_on == job.device else ["at once", "reversed", "permuted"]
    return {name: _Single(there, job.dtype, formulas) for name in cuts}


def compute_partials(
    job: Job, *, steps: Sequence[int], local_rows: Sequence[tuple[int, int]]
) -> dict[int, dict[tuple[str, str], Grads]]:
    """Every partial of some steps, in float64: (term, producer) -> name -> (rows or 1, *shape).

    A statistic term has, besides, its partials at wrong global sums: producer `NAME@local`
    evaluates each row interval of `local_rows` at that interval's own sums, `NAME@mean` at the
    global sums over the number of intervals.
    """
    single = _Single(job, torch.float64)
    out = {}
    for step in range(max(steps) + 1):
        rows = [torch.tensor([i]) for i in range(job.workload.declaration.num_rows)]
        run = single.run(step, rows, keep=True, local_rows=local_rows)
        if step in steps:
            out[step] = run.partials
    return out


@dataclass(slots=True, kw_only=True)
class _Run:
    by_term: dict[str, Grads]
    counts: dict[str, int]
    scale: Grads = field(default_factory=dict)
    partials: dict[tuple[str, str], Grads] = field(default_factory=dict)

    def summed(self) -> Run:
        """Its terms and their sum."""
        return Run(by_term=self.by_term, total=self.total())

    def total(self) -> Grads:
        """The sum over terms, added in the run's own dtype."""
        out: Grads = {}
        for grads in self.by_term.values():
            for name, grad in grads.items():
                out[name] = out[name] + grad if name in out else grad.clone()
        return out


class _Single:
    """Runs steps one after another in one dtype, cut into any chunks, with its own term state."""

    def __init__(self, job: Job, dtype: torch.dtype, formulas: Formulas | None = None) -> None:
        self.job, self.dtype = job, dtype
        self.declaration: Declaration = job.workload.declaration
        self.formulas: Formulas = formulas or job.workload.formulas(
            dtype, job.device, rounded_to=job.dtype
        )
        self.everything = torch.arange(self.declaration.num_rows, device=job.device)
        self.state = {
            term.name: self.formulas.initial_state(term.name, self.everything)
            for term in self.declaration.terms
        }

    def run(
        self,
        step: int,
        chunks: Sequence[Tensor],
        *,
        with_scale: bool = False,
        keep: bool = False,
        local_rows: Sequence[tuple[int, int]] = (),
    ) -> _Run:
        """Gradients of every term at one step, chunk by chunk, accumulated in this dtype."""
        rounded = _rounded(self.job, step)
        leaves = {
            name: value.to(device=self.job.device, dtype=self.dtype).requires_grad_()
            for name, value in rounded.items()
        }
        counts = {
            term.name: self.formulas.count(term.name, self.everything)
            for term in self.declaration.terms
        }
        zeros = {
            term.name: {n: torch.zeros_like(x) for n, x in leaves.items()}
            for term in self.declaration.terms
        }
        run = _Run(by_term=zeros, counts=counts)
        slopes = self._statistic_slopes(leaves, chunks, counts, local_rows if keep else ())
        for chunk in chunks:
            self._chunk(step, chunk, leaves, slopes, run, with_scale=with_scale, keep=keep)
        for term in self.declaration.terms:
            if term.kind == "replicated":
                self._replicated(term.name, step, leaves, run, with_scale=with_scale, keep=keep)
        return run

    def _chunk(
        self,
        step: int,
        rows: Tensor,
        leaves: Grads,
        slopes: dict[str, list[tuple[str, range, Tensor]]],
        run: _Run,
        *,
        with_scale: bool,
        keep: bool,
    ) -> None:
        produced = self.formulas.produce(leaves, rows)
        check_produced(self.declaration, produced, len(rows))
        for term in self.declaration.terms:
            if term.kind == "rows":
                quantity = produced.quantity if term.reads_quantity else {}
                state = self._advance(term.name, leaves, quantity, rows, step)
                for producer, units in self.job.producers[term.name]:
                    loss = self.formulas.loss_sum(
                        term.name,
                        params=leaves,
                        quantity=quantity,
                        rows=rows,
                        units=units,
                        step=step,
                        state=state,
                    )
                    check_scalar(term.name, loss)
                    seed = self.formulas.coefficient(term.name) / run.counts[term.name]
                    grads = self._differentiate(loss, seed, leaves)
                    self._add(run, term.name, producer, grads, rows, with_scale, keep)
            elif term.kind == "statistic":
                sums = self.formulas.statistics(term.name, produced, rows)
                check_statistics(self.declaration, term.name, sums)
                for producer, valid, slope in slopes[term.name]:
                    if int(rows[0]) not in valid:
                        continue
                    loss = (slope * sums).sum()
                    seed = self.formulas.coefficient(term.name)
                    grads = self._differentiate(loss, seed, leaves)
                    counted = "@" not in producer
                    self._add(run, term.name, producer, grads, rows, with_scale, keep, counted)

    def _replicated(
        self, term: str, step: int, leaves: Grads, run: _Run, *, with_scale: bool, keep: bool
    ) -> None:
        for producer, units in self.job.producers[term]:
            loss = self.formulas.loss_sum(
                term,
                params=leaves,
                quantity={},
                rows=self.everything[:0],
                units=units,
                step=step,
                state={},
            )
            seed = self.formulas.coefficient(term) / run.counts[term]
            grads = self._differentiate(loss, seed, leaves)
            self._add(run, term, producer, grads, None, with_scale, keep)

    def _statistic_slopes(
        self,
        leaves: Grads,
        chunks: Sequence[Tensor],
        counts: dict[str, int],
        local_rows: Sequence[tuple[int, int]],
    ) -> dict[str, list[tuple[str, range, Tensor]]]:
        """d value / d sums at the global sums (and at wrong ones), with the rows they are for."""
        out: dict[str, list[tuple[str, range, Tensor]]] = {}
        for term in self.declaration.terms:
            if term.kind != "statistic":
                continue
            with torch.no_grad():
                by_chunk = [
                    self.formulas.statistics(term.name, self.formulas.produce(leaves, c), c)
                    for c in chunks
                ]
            total, count = torch.stack(by_chunk).sum(0), counts[term.name]
            (name, _), everything = self.job.producers[term.name][0], range(len(self.everything))
            out[term.name] = [(name, everything, self._slope(term.name, total, count))]
            for a, b in local_rows:
                if a < b:
                    own = self._slope(term.name, torch.stack(by_chunk[a:b]).sum(0), count)
                    out[term.name].append((f"{name}@local", range(a, b), own))
            if local_rows:
                mean = self._slope(term.name, total / len(local_rows), count)
                out[term.name].append((f"{name}@mean", everything, mean))
        return out

    def _slope(self, term: str, sums: Tensor, count: int) -> Tensor:
        point = sums.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.formulas.value(term, point, count), point)
        return slope

    def _advance(
        self, term: str, leaves: Grads, quantity: Grads, rows: Tensor, step: int
    ) -> dict[str, Tensor]:
        before = {name: values[rows] for name, values in self.state[term].items()}
        after = self.formulas.advance(
            term, params=leaves, quantity=quantity, rows=rows, step=step, state=before
        )
        for name, values in after.items():
            self.state[term][name][rows] = values
        return after

    def _differentiate(self, loss: Tensor, seed: float, leaves: Grads) -> dict[str, Tensor | None]:
        grads = torch.autograd.grad(
            loss,
            list(leaves.values()),
            grad_outputs=torch.full_like(loss, seed),
            allow_unused=True,
            retain_graph=True,
        )
        return dict(zip(leaves, grads, strict=True))

    def _add(
        self,
        run: _Run,
        term: str,
        producer: str,
        grads: dict[str, Tensor | None],
        rows: Tensor | None,
        with_scale: bool,
        keep: bool,
        counted: bool = True,
    ) -> None:
        for name, grad in grads.items():
            if grad is None:
                continue
            if counted:
                run.by_term[term][name] += grad
            if with_scale:
                run.scale[name] = run.scale.get(name, 0) + grad.double().abs()
            if keep:
                held = run.partials.setdefault((term, producer), {})
                num = 1 if rows is None else len(self.everything)
                if name not in held:
                    held[name] = torch.zeros(num, *grad.shape, dtype=grad.dtype)
                held[name][0 if rows is None else int(rows[0])] += grad.cpu()


def _rounded(job: Job, step: int) -> Grads:
    return {name: value.to(job.dtype) for name, value in job.workload.params(step).items()}
