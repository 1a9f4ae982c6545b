"""What the verdict of every kind of run has in common: a tier's figures, and parts of the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Status, TierVerdict, merge
from sumgrad.judge.comparison import TensorDiff
from sumgrad.topology.pools import Topology

SCHEMA = 1
PLAIN = (
    "name", "rank", "pool", "tier", "step", "status", "reason", "max_abs", "max_rel", "l2_rel",
    "ratio", "noise_floor", "threshold", "max_rel_same_dtype", "l2_rel_same_dtype",
)  # fmt: skip


def topology_json(topology: Topology) -> dict[str, Any]:
    """Name, size and pools."""
    return {
        "name": topology.name,
        "world_size": topology.world_size,
        "pools": {
            p.name: {"role": p.role, "axes": dict(p.axes), "ranks": list(p.ranks)}
            for p in topology.pools
        },
    }


def tier_verdict(
    tier: str,
    dtype: str,
    *,
    statuses: Iterable[Status],
    diffs: Sequence[TensorDiff],
    reasons: Iterable[str],
) -> TierVerdict:
    """A tier's verdict from the statuses found and its own tensors."""
    judged = [d for d in diffs if d.comparable]
    # Of a gradient that is zero by mathematics, roundings over roundings say nothing.
    told = [d for d in judged if d.power_whole < 1 or d.status == "fail"] or judged
    worst = max(told, key=lambda d: d.max_rel, default=None)
    same = [d.max_rel_same_dtype for d in judged if d.max_rel_same_dtype is not None]
    same_l2 = [d.l2_rel_same_dtype for d in judged if d.l2_rel_same_dtype is not None]
    return TierVerdict(
        name=tier,
        dtype=dtype,
        status=merge(statuses),
        worst_rel=worst.max_rel if worst else None,
        worst_tensor=worst.name if worst else None,
        worst_of_threshold=max((d.of_threshold for d in judged), default=None),
        median_of_threshold=median([d.of_threshold for d in judged]) if judged else None,
        worst_rel_same_dtype=max(same, default=None) if tier != "structure" else None,
        worst_l2_rel_same_dtype=max(same_l2, default=None) if tier != "structure" else None,
        reasons=tuple(reasons),
    )


def unknown_tensors(diffs: Sequence[TensorDiff]) -> dict[str, None]:
    """Why tensors are UNKNOWN, each reason once, in order, with the tensors that have it."""
    found: dict[str, dict[str, None]] = {}
    for d in diffs:
        if d.status == "unknown" and d.reason:
            found.setdefault(d.reason, {})[d.name] = None
    return {f"{some_of(list(names))}: {reason}": None for reason, names in found.items()}


def tensor_json(d: TensorDiff) -> dict[str, Any]:
    """One tensor of one rank in one tier and step."""
    return {
        **{name: getattr(d, name) for name in PLAIN},
        "smallest_scale_error_caught": d.smallest_scale_error_caught,
        "smallest_lost_share_caught": d.lost_share_caught,
        "scale_error_caught_by_term": d.power,
        "index": list(d.index),
    }
