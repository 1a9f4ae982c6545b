"""The parts of verdict.json that every kind of run shares (the contract is INTERFACE's)."""

from __future__ import annotations

from typing import Any

from sumgrad.compare import TensorDiff
from sumgrad.topology import Topology

SCHEMA = 1


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


def tensor_json(d: TensorDiff) -> dict[str, Any]:
    """One tensor of one rank in one tier and step."""
    return {
        "name": d.name,
        "rank": d.rank,
        "pool": d.pool,
        "tier": d.tier,
        "step": d.step,
        "status": d.status,
        "reason": d.reason,
        "max_abs": d.max_abs,
        "max_rel": d.max_rel,
        "l2_rel": d.l2_rel,
        "ratio": d.ratio,
        "noise_floor": d.noise_floor,
        "threshold": d.threshold,
        "smallest_scale_error_caught": d.smallest_scale_error_caught,
        "smallest_lost_share_caught": d.lost_share_caught,
        "scale_error_caught_by_term": d.power,
        "index": list(d.index),
        "max_rel_same_dtype": d.max_rel_same_dtype,
        "l2_rel_same_dtype": d.l2_rel_same_dtype,
    }
