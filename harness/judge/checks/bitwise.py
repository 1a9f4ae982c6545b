"""The bitwise tier: everything that any rank held, bit by bit beside one process. 0 or FAIL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.tensors import same_bits
from sumgrad.judge.finding import Compared, Finding
from sumgrad.judge.knowledge import plan_of
from sumgrad.plan.edges import Norm, Plan, Reduction, Statistic, Transfer
from sumgrad.plan.tree import trees_of
from sumgrad.record.bits import BITS, KINDS, ROWS, kind_of
from sumgrad.record.directory import Record
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Different:
    """A tensor with other bits. index: of the first such element, as the rank holds it. max_ulp:
    None where a number is not finite on one side only, or shapes differ."""

    name: str
    step: int
    rank: int
    elements: int
    differing: int
    index: tuple[int, ...]
    max_ulp: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsCompared:
    """All of it. first: what differs first in the order of a step, by kind; ranks, names: where
    anything does. missing: ranks that wrote no bits. problems: why one process tells nothing."""

    tensors: int
    elements: int
    differing: int
    max_ulp: int | None
    first: Different | None
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    missing: tuple[str, ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As verdict.json has it."""
        return {
            "tensors": self.tensors,
            "elements": self.elements,
            "differing": self.differing,
            "max_ulp": self.max_ulp,
            "first": None if self.first is None else asdict(self.first),
        }


def the_same_bits(compared: Compared) -> Iterator[Finding]:
    """Other bits than one process's, on any rank, in any step."""
    record = compared.record
    if not record.spec.bitwise:
        return
    found = compared_bits(record)
    for text in (*found.problems, *found.missing[:3]):
        yield Finding(level="unknown", text=text, tier=BITS, aside=True)
    if found.first is None or found.problems:
        return  # a process that differs from itself tells nothing of the ranks
    text = f"other bits in {some_of(list(found.names))} on rank {spans(list(found.ranks))}"
    yield Finding(level="fail", text=text, tier=BITS, aside=True)


def compared_bits(record: Record) -> BitsCompared:
    """Every tensor that a rank holds beside the same of one process."""
    found: BitsCompared = record.once("bits", lambda: _compared(record))
    return found


def _compared(record: Record) -> BitsCompared:
    plan = plan_of(record)
    assert plan is not None, record.directory
    missing: list[str] = []
    differing: list[Different] = []
    tensors = elements = 0
    problems = [text for single in record.bits for text in single.problems]
    for step, single in enumerate(record.bits):
        for rank in range(record.spec.topology.world_size):
            held = record.ranks[rank].grads.get((BITS, step)) if rank in record.ranks else None
            if held is None:
                missing.append(f"rank {rank} wrote no bits of step {step}")
                continue
            a, b = plan.rows(rank)
            for name in expected_names(plan, rank):
                if name not in single.tensors:
                    problems.append(f"one process has no {name} at step {step}")
                    continue
                whole = single.tensors[name]
                wanted = whole[a:b] if kind_of(name) in ROWS else whole
                tensors, elements = tensors + 1, elements + wanted.numel()
                other = _other(name, step, rank, held.get(name), wanted)
                if other is not None:
                    differing.append(other)
    if record.spec.bitwise and len(record.bits) < record.spec.steps:
        problems.append("what one process has was not stored")
    differing.sort(key=lambda d: (d.step, KINDS.index(kind_of(d.name))))
    ulps = [d.max_ulp for d in differing]
    return BitsCompared(
        tensors=tensors,
        elements=elements,
        differing=sum(d.differing for d in differing),
        max_ulp=None if None in ulps else max((u for u in ulps if u is not None), default=0),
        first=differing[0] if differing else None,
        ranks=tuple(sorted({d.rank for d in differing})),
        names=tuple(dict.fromkeys(d.name for d in differing)),
        missing=tuple(missing),
        problems=tuple(dict.fromkeys(problems)),
    )


def expected_names(plan: Plan, rank: int) -> list[str]:
    """What a rank must hold, in the order in which a step makes it."""
    pool = plan.topology.pool_of(rank).name
    a, b = plan.rows(rank)
    out = [f"statistic/{edge.term}" for edge in plan.select(Statistic, pool=pool)]
    for transfer in plan.select(Transfer) if a < b else ():
        if pool in (transfer.src, transfer.dst):
            kind = "quantity" if transfer.kind == "value" else f"cotangent/{transfer.term}"
            out += [f"{kind}/{unit}" for unit in transfer.units]
    for edge in plan.select(Reduction, pool=pool):
        out += [f"root/{tree.name}/{edge.unit}" for tree in trees_of(plan, pool, edge.unit)]
        if plan.role(pool).home:
            out += [f"gradient/{p.name}" for p in plan.declaration.params_of(edge.unit)]
    if plan.select(Norm):
        out += ["norm/all", "clip/all"]
    return sorted(dict.fromkeys(out), key=lambda name: KINDS.index(kind_of(name)))


def _other(name: str, step: int, rank: int, got: Tensor | None, wanted: Tensor) -> Different | None:
    if got is not None and same_bits(got, wanted) and bool(torch.isfinite(got).all()):
        return None
    elements = wanted.numel()
    if got is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return Different(
            name=name, step=step, rank=rank, elements=elements, differing=max(elements, 1),
            index=(), max_ulp=None,
        )  # fmt: skip
    there = (_words(got) != _words(wanted)) | ~torch.isfinite(got)
    first = there.nonzero()[0]
    finite = bool(torch.isfinite(got).all()) and bool(torch.isfinite(wanted).all())
    far = [abs(x - y) for x, y in zip(_steps(got[there]), _steps(wanted[there]), strict=True)]
    return Different(
        name=name,
        step=step,
        rank=rank,
        elements=elements,
        differing=int(there.sum()),
        index=tuple(first.tolist()),
        max_ulp=max(far) if finite else None,
    )


def _words(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int64 if value.element_size() == 8 else torch.int32)


def _steps(value: Tensor) -> list[int]:
    """Numbers as places in the order of all floats, so that neighbours are one apart."""
    low = -(1 << (8 * value.element_size() - 1))
    return [word if word >= 0 else low - word for word in _words(value).reshape(-1).tolist()]
