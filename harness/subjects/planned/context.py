"""What a rank needs to run planned steps, what it remembers, and what a step leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from sumgrad.ledger.process_group import Ledger
from sumgrad.plan.edges import Plan
from sumgrad.subjects.planned.workload import Formulas
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a rank needs to run planned steps. group: the process group of its own pool."""

    plan: Plan
    rank: int
    formulas: Formulas
    group: dist.ProcessGroup | None
    ledger: Ledger
    dtype: torch.dtype
    device: torch.device
    tier: str

    @property
    def pool(self) -> str:
        return self.plan.topology.pool_of(self.rank).name

    @contextmanager
    def edge(self, step: int, name: str) -> Iterator[None]:
        with self.ledger.label(f"{self.tier}/{step}/{name}"):
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """One contribution before its reduction: who emitted what, so that ranks can be named."""

    edge: str
    unit: str
    norm: float
    sha256: str


@dataclass(slots=True, kw_only=True)
class Memory:
    """What a rank keeps between steps: term state, and the contributions of the last step."""

    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    contributions: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """grads: name -> fully reduced gradient before clipping, as this rank holds it."""

    grads: dict[str, Tensor]
    digests: tuple[Digest, ...]
    counts: dict[str, int]
    norm: float
    clipped_norm: float


def digest(edge: str, unit: str, flat: Tensor) -> Digest:
    data = flat.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    norm = float(flat.detach().double().norm())
    return Digest(edge=edge, unit=unit, norm=norm, sha256=hashlib.sha256(data).hexdigest()[:16])
