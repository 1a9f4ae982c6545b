"""A Program built, distributed and stepped on one rank in one dtype; what it leaves.

The gradients are read where the step leaves them, on every rank, with no gather in between.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.base.memory import give_back_memory
from sumgrad.base.outcome import SETUP, describe_operation
from sumgrad.base.tensors import bits, hash_weights, is_in_a_buffer, same_bits
from sumgrad.faults.collective import CollectiveFault
from sumgrad.faults.misbehaviour import Misbehaviour
from sumgrad.faults.step import find_program_fault, plant_in_step, planted_class
from sumgrad.ledger.delegation import operations_elsewhere
from sumgrad.ledger.evidence import GradientWatch
from sumgrad.ledger.process_group import Interposer, Observer
from sumgrad.record.ranks import AGAIN, BUFFER, INDEX, INDEX_IN, RankFiles
from sumgrad.record.spec import RunSpec
from sumgrad.subjects.program.batch import (
    full_batch,
    hold_batch,
    on_device,
    round_batch,
    takes_step,
)
from sumgrad.subjects.program.context import Context, Seat, make_context
from sumgrad.subjects.program.frozen import Frozen
from sumgrad.subjects.program.held_gradients import ddp_divides_by, held_gradients
from sumgrad.subjects.program.lift import Lift, is_compiled, lifting
from sumgrad.subjects.program.placed.numbered import Found, Numbers
from sumgrad.subjects.program.placed.placement import Placed, Placement, place
from sumgrad.subjects.program.protocol import (
    Weights,
    build,
    coarsest,
    default_dtype,
    hash_model,
    make_program,
    scramble,
    tied,
    to_precision,
    trained,
    untied,
    with_place,
)
from sumgrad.subjects.program.second_run import bits_of, second_run
from sumgrad.subjects.program.unseen import (
    buffers_after,
    come_alive,
    gradients_elsewhere,
    trained_names,
)
from torch import Tensor, nn

LEFT_S = 0.3  # for what a step leaves running to do something to its gradients
Result = dict[str, Any]
Tensors = dict[str, Tensor]


class TierRun:
    """A Program built, distributed and stepped in one dtype. watching: what is on while it is
    distributed. like: another of the same, whose code it runs, as it is now."""

    program: Any
    hash_of_batch: str

    def __init__(
        self,
        seat: Seat,
        job: RunSpec,
        tier: str,
        dtype: torch.dtype,
        watching: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        like: TierRun | None = None,
    ) -> None:
        self._like = None if like is None else like.program
        self.seat, self.job, self.tier, self.dtype = seat, job, tier, dtype
        self._while_distributing = watching
        self.fault = find_program_fault(job.fault, job.workload) if job.fault else None
        self.rounded = coarsest(getattr(torch, d) for d in job.tiers.values())
        self.misbehaviour = (
            Misbehaviour(self.fault, job.topology)
            if isinstance(self.fault, CollectiveFault)
            else None
        )
        self.stepped = False
        self.elsewhere = operations_elsewhere()
        self._build()
        self._distribute(None)
        if self._is_any_untold():
            numbered = self._numbered()
            self._build()  # once more: the last that a Program distributes is the one that it steps
            self._distribute(numbered)

    def _make(self, dtype: torch.dtype) -> tuple[Any, Context]:
        """A fresh Program, and what its methods are told."""
        job, seat = self.job, self.seat
        workload = planted_class(job.workload, job.fault) if job.fault else job.workload
        program = make_program(workload, job.topology, seed=job.seed, like=self._like)
        ctx = make_context(
            job.topology, seat.rank, seat.meshes, dtype=dtype, seed=job.seed, device=seat.device
        )
        scramble(101, seat.rank)
        return program, ctx

    def _build(self) -> None:
        self.program, self.ctx = self._make(self.dtype)
        model = build(self.program)
        self.built = hash_model(model)
        self.base = {n: p.detach().clone() for n, p in trained(model).items()}
        scramble(102, self.seat.rank)
        self._set_batch(0)
        self.batch_hash = self.hash_of_batch
        model = to_precision(to_precision(model, self.rounded), self.dtype)
        self.model = model.to(self.seat.device)
        self.full = self._weights(0)

    def _distributed(
        self, program: Any, model: nn.Module, ctx: Context, dtype: torch.dtype
    ) -> nn.Module:
        """What the Program's own `distribute` makes of a model; the model where it has none."""
        scramble(103, self.seat.rank)
        if not hasattr(program, "distribute"):
            return model
        with (
            self.seat.ledger.label(f"{SETUP}/distribute"),
            default_dtype(dtype),
            lifting(dtype, change=self.job.lift),
            self._while_distributing(),
        ):
            given = program.distribute(model, ctx)
        if not isinstance(given, nn.Module):
            raise TypeError(
                with_place(
                    program,
                    f"distribute() returned {type(given).__name__}, expected the nn.Module whose "
                    f"gradients are to be read",
                )
            )
        return given

    def _is_any_untold(self) -> bool:
        """Whether some rank holds a parameter without a place: all ranks distribute together."""
        cut = hasattr(self.program, "distribute")
        return self.on_any(cut and bool(self.placement.unknown))

    def on_any(self, own: bool) -> bool:
        """Whether it is so on some rank: all ranks ask."""
        count = torch.tensor(int(own))
        with self.seat.ledger.label(f"{SETUP}/places"):
            dist.all_reduce(count, dist.ReduceOp.MAX)
        return bool(count)

    def is_whole(self) -> bool:
        """Whether every element of every parameter is on some rank: all ranks ask."""
        held = {n: torch.zeros(full.numel(), dtype=torch.uint8) for n, full in self.base.items()}
        for p in () if self.placement.unknown else self.placement.placed:
            held[p.name][slice(None) if p.index is None else p.index.flatten().cpu()] = 1
        every = torch.cat([*held.values()])
        with self.seat.ledger.label(f"{SETUP}/places"):
            dist.all_reduce(every, dist.ReduceOp.MAX)
        return bool(every.all())

    def _numbered(self) -> Found:
        """Where every shard lies of a model that is distributed with a number as each weight."""
        numbers = Numbers({name: value.shape for name, value in self.base.items()})
        try:
            program, ctx = self._make(torch.float64)
            model = to_precision(build(program), torch.float64)
            scramble(102, self.seat.rank)
            rows = round_batch(full_batch(program), self.rounded, torch.float64)
            hold_batch(program, on_device(rows, self.seat.device))
            numbers.write(trained(model))
            model = model.to(self.seat.device)
            return numbers.read(self._distributed(program, model, ctx, torch.float64))
        except Exception:  # it looks at the values, or at how often: what is unknown is said so
            return {}

    def _distribute(self, numbered: Found | None) -> None:
        ties = tied(self.model)
        kept = trained(self.model)  # kept alive until all is placed: ids would be used again
        self.modules = dict(self.model.named_modules())
        self.model = self._distributed(self.program, self.model, self.ctx, self.dtype)
        declared = getattr(self.program, "shard_of", None)
        self.placement: Placement = place(
            self.model,
            {id(param): name for name, param in kept.items()},
            dict(self.full),
            (lambda name: declared(name, self.ctx)) if declared else None,
            {id(module): name for name, module in self.modules.items()},
            numbered,
        )
        self.untied = untied(ties, self.model)
        self.buffers = {n: b.detach().clone() for n, b in self.model.named_buffers()}
        self.frozen = Frozen(self.model)
        self.trained = trained_names(self.model)
        params = self.model.parameters()
        self.brought = {id(p) for p in params if p.grad is not None}  # with a gradient from here on
        self.shapes = {p.name: p.local().shape for p in self.placement.placed}
        self.watch = GradientWatch({p.name: p.param for p in self.placement.placed})
        self.observe: Observer = self.watch.observe
        self.left: dict[int, dict[str, Any]] = {}  # what the last step did not wait for
        self.sites: dict[str, str] = {}  # of such, by what they are in words
        self.waited_later: set[str] = set()  # sites of those that the next one has waited for
        give_back_memory()  # whole models, before they were cut

    def steps(self, files: RankFiles, result: Result, *, again: bool) -> None:
        """Every step, and the last one again."""
        result["unknown"] += [u for u in self.placement.unknown if u not in result["unknown"]]
        facts = self.job.facts
        assert facts is not None
        result["built"], result["batch"] = self.built, self.batch_hash
        result["untied"] = self.untied
        result["ddp"] = ddp_divides_by(self.model)
        for p in self.placement.placed:
            self._keep_place(p, files.others, known=p.name in result["params"])
            result["params"][p.name] = {"sharded": p.index is not None}
        for step in range(self.job.steps):
            grads, info = self.step(step)
            files.keep(f"{self.tier}/{step}", grads)
            gave = bits_of(grads) if again and step == self.job.steps - 1 else ""
            del grads  # the next step has its own: two would be two models' size
            held, info["changed_buffers"] = buffers_after(self.model, self.buffers, facts.compares)
            for name, buffer in held.items():
                files.others[f"{BUFFER}/{self.tier}/{step}/{name}"] = buffer
            result["steps"].append(info)
        if again:
            grads, more = second_run(self, self.job.steps - 1, gave)
            info["unwaited"] = [*info["unwaited"], *more["unwaited"]]
            for of_waits in ("races", "written", "read_early"):
                both = [*info.get(of_waits, ()), *more.get(of_waits, ())]
                info[of_waits] = list(dict.fromkeys(both))
            files.keep(f"{AGAIN}/{self.tier}", grads)
        for info in result["steps"]:
            info["races"] = self._but_for_the_next_step(info["races"])
        result["unknown"] += [u for u in self._elsewhere() if u not in result["unknown"]]

    def _keep_place(self, p: Placed, others: Tensors, *, known: bool) -> None:
        """Which elements it holds of a parameter; where a tier cuts it otherwise than the first.

        known: an earlier tier has it.
        """
        first = others.get(f"{INDEX}/{p.name}")
        if not known and p.index is not None:
            others[f"{INDEX}/{p.name}"] = p.index
        elif known and (first is not None or p.index is not None):
            whole = torch.arange(p.local().numel()).reshape(p.local().shape)
            index = whole if p.index is None else p.index
            if first is None or not torch.equal(first, index):
                others[f"{INDEX_IN}/{self.tier}/{p.name}"] = index

    def _elsewhere(self) -> list[str]:
        """Backends over which the Program communicated unseen, by groups of its own."""
        now = operations_elsewhere()
        used = {key[0] for key, count in now.items() if count > self.elsewhere.get(key, 0)}
        return [
            f"communicates over a group of backend {backend}, which no ledger shows: leave the "
            f"backend out of new_group"
            for backend in sorted(used)
        ]

    def step(
        self, step: int, *, label: str | None = None, gone: Set[int] = frozenset()
    ) -> tuple[Tensors, Result]:
        """One step from its recorded weights: local gradients, and what else was seen. gone: ids of
        parameters without a gradient when it begins, whatever they had."""
        other = self._begin(step, gone)
        began = {p.name: bits([p.local()]) for p in self._kept_shape()}
        scramble(104, self.seat.rank, step, int(label is not None))
        self.watch.begin_step()
        if self.misbehaviour:
            self.misbehaviour.begin_step()
        lift, threads = self._lift(), {*threading.enumerate()}
        looked = lift.change or step == self.job.steps - 1
        watching = self._watching(
            f"{label or self.tier}/{step}/step", self.observe, self.misbehaviour
        )
        with watching, default_dtype(self.dtype):
            self._run(step, lift if looked else contextlib.nullcontext())
            unwaited = self.seat.ledger.nobody_waits_for()
            races = self._races(unwaited)
            info = {**self._info(step, began), "other_weights": list(other), "races": races}
            info["lifted"], info["drawn"] = dict(lift.lifted), dict(lift.draws)
            info["autocast"] = dict(lift.autocast)
            if looked and not is_compiled(self.model):
                info["narrow"] = dict(lift.narrow)
            grads = self._grads(info)
            info["changed_later"] = self._changed_later(threads, grads)
        return grads, info

    def _changed_later(self, threads: Set[threading.Thread], grads: Tensors) -> list[str]:
        """Gradients that are others soon after they were read, where the step has left a thread
        that runs on on this rank: nothing here may wait for others."""
        left = [t for t in threading.enumerate() if t not in threads and t.is_alive()]
        if not left:
            return []
        before = {name: bits([grad]) for name, grad in grads.items()}
        until = time.monotonic() + LEFT_S
        for thread in left:
            thread.join(max(until - time.monotonic(), 0.0))
        return [name for name, grad in grads.items() if bits([grad]) != before[name]]

    def bare_step(self, step: int, interpose: Interposer | None = None) -> Tensors:
        """The gradients of a step, and nothing else of it. interpose: through which its operations
        go."""
        self._begin(step)
        scramble(104, self.seat.rank, step, 0)
        lift = self._lift()
        with self._watching(f"{self.tier}/{step}/step", None, interpose), default_dtype(self.dtype):
            self._run(step, lift if lift.change else contextlib.nullcontext())
            self.seat.ledger.settle()
            return self._grads({"partial": []})

    def _begin(self, step: int, gone: Set[int] = frozenset()) -> dict[str, None]:
        """Rows, weights, gradients and buffers as a step finds them. Which weights are others."""
        if step != self.batch_step and takes_step(self.program):
            self._set_batch(step)
        other = self._set_weights(step)
        self.stepped = True
        other |= self._unsynchronise()
        for param in self.model.parameters():
            grad = param.grad
            if grad is not None and is_in_a_buffer(grad) and id(param) not in gone:
                grad.zero_()  # the step reduces the buffer, and not the gradient
            else:
                param.grad = None
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.buffers and buffer.shape == self.buffers[name].shape:
                    buffer.copy_(self.buffers[name])
        self.frozen.put_back()
        return other

    def _lift(self) -> Lift:
        return Lift(self.dtype, change=self.job.lift and self.dtype == torch.float64)

    def _run(self, step: int, lift: contextlib.AbstractContextManager[object]) -> None:
        ctx = replace(self.ctx, step=step)
        batch = {key: value.clone() for key, value in self.batch.items()}
        planted = plant_in_step(self.fault, self.model, self.placement.placed, ctx)
        with planted, lift:
            self.program.step(self.model, batch, ctx)
        if not dist.is_initialized():
            ended = "step() ends the default process group, which the next step takes: leave it"
            raise RuntimeError(with_place(self.program, ended))

    def _set_batch(self, step: int) -> None:
        """The rows of a step, also for whoever asks the Program for them."""
        batch = full_batch(self.program, step)
        self.batch_step, self.hash_of_batch = step, hash_weights(batch)
        self.batch = self._rounded(batch)
        hold_batch(self.program, self.batch, self._rounded)

    def _rounded(self, batch: Mapping[str, Tensor]) -> Tensors:
        return on_device(round_batch(batch, self.rounded, self.dtype), self.seat.device)

    def _info(self, step: int, began: dict[str, str]) -> Result:
        """began: a digest of every parameter as the step found it."""
        self.seat.ledger.settle()
        kept = self._kept_shape()
        return {
            "tier": self.tier,
            "step": step,
            "batch": self.hash_of_batch,
            "changed_weights": [p.name for p in kept if bits([p.local()]) != began.get(p.name)],
            "feeds": self.watch.feeds(),
            "backwards": max(self.watch.backwards.values(), default=0),
            "unwaited": self._unwaited(),
            "partial": [],
            **self.frozen.said(),
            "elsewhere": {}
            if hasattr(self.program, "gradient_of")
            else gradients_elsewhere(self.placement.placed),
            "alive": come_alive(self.model, self.trained),
            "reshaped": {p.name: list(p.local().shape) for p in self._reshaped()},
            "fault": {"calls": self.misbehaviour.calls, "changed": self.misbehaviour.changed}
            if self.misbehaviour
            else None,
        }

    def _kept_shape(self) -> list[Placed]:
        """Parameters whose place still holds: a step may shard what distribute left whole."""
        return [p for p in self.placement.placed if p.local().shape == self.shapes[p.name]]

    def _reshaped(self) -> list[Placed]:
        return [p for p in self.placement.placed if p.local().shape != self.shapes[p.name]]

    def _races(self, unwaited: list[int]) -> list[str]:
        """Operations that the step left without waiting for them, in words."""
        ledger = self.seat.ledger
        for number, event in self.left.items():  # by the step before
            if number in ledger.waited_for and not event.get("grads"):
                self.waited_later.add(event["site"])
        left = {n: ledger.open_ops[n] for n in unwaited if n in ledger.open_ops}
        self.left = {n: event for n, event in left.items() if "by" not in event}
        told = {text: e["site"] for e in self.left.values() if (text := describe_operation(e))}
        self.sites |= told
        return list(told)

    def _but_for_the_next_step(self, races: list[str]) -> list[str]:
        """Without those of lines whose operation the next step waits for: a metric, say."""
        return [text for text in races if self.sites.get(text) not in self.waited_later]

    def _unwaited(self) -> list[int]:
        """Operations that nobody had waited for when `settle` looked."""
        return list(self.seat.ledger.open_works)

    def _grads(self, info: Result) -> Tensors:
        """Local gradients. A DTensor that is still a partial sum is reduced here, and noted."""
        label = partial(self.seat.ledger.label, f"{SETUP}/partial")
        grads, reduced = held_gradients(self._kept_shape(), self.program, self.ctx, label)
        info["partial"] += reduced
        return grads

    def _set_weights(self, step: int) -> dict[str, None]:
        """The recorded weights, but for the very first step: it shows what distribute left.

        Returns the parameters that have others all the same.
        """
        self.full = self._weights(step)
        other: dict[str, None] = {}
        with torch.no_grad():
            for p in self._kept_shape():
                wanted = p.slice(self.full[p.name])
                if self.stepped:
                    p.local().copy_(wanted)
                if not same_bits(p.local().cpu(), wanted):
                    other[p.name] = None
        return other

    def _weights(self, step: int) -> Weights:
        """Numbers of the coarsest dtype, so that every tier has the same."""
        return Weights(self.base, step, self.rounded, self.dtype)

    def _unsynchronise(self) -> dict[str, None]:
        """The fault of replicas that start from other weights, on the last rank; which it moved."""
        last = self.seat.rank == self.job.topology.world_size - 1
        if self.job.fault != "unsynchronised_init" or not last:
            return {}
        with torch.no_grad():
            for p in self.placement.placed:
                p.local().mul_(1.01)
        return dict.fromkeys(p.name for p in self.placement.placed)

    @contextlib.contextmanager
    def _watching(
        self, label: str, observe: Observer | None, interpose: Interposer | None
    ) -> Iterator[None]:
        ledger = self.seat.ledger
        ledger.observe, ledger.interpose = observe, interpose
        try:
            with ledger.label(label):
                yield
        finally:
            ledger.observe = ledger.interpose = None

    def close(self) -> None:
        self.watch.close()
