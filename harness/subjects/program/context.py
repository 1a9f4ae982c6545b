"""Where a rank is, as a Program's step is told: pool, coordinates, meshes, device, dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.ledger.process_group import Ledger
from sumgrad.topology.pools import Topology
from torch.distributed.device_mesh import DeviceMesh


class Coords(dict[str, int]):
    """Axis name -> coordinate; also by position, as a tuple has it."""

    def __missing__(self, key: Any) -> int:
        if isinstance(key, int):
            return list(self.values())[key]
        raise KeyError(f"no axis {key!r}; this pool has {', '.join(self)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """This rank's place.

    pool: the name of its pool; axes: that pool's axes and sizes; coords: its place on them.
    pools: every pool's name -> its global ranks. mesh: the DeviceMesh of its pool, dims named as
    the axes; meshes: those of all pools. dtype: of floating parameters and data. step: 0, 1, ...
    groups: those of several axes that were made so far.
    """

    rank: int
    world_size: int
    pool: str
    axes: dict[str, int]
    coords: Coords
    pools: dict[str, tuple[int, ...]]
    mesh: DeviceMesh
    meshes: dict[str, DeviceMesh]
    device: torch.device
    dtype: torch.dtype
    seed: int
    step: int = 0
    groups: dict[frozenset[str], dist.ProcessGroup] = field(default_factory=dict, repr=False)

    @property
    def pool_rank(self) -> int:
        """This rank's index in its pool."""
        return self.pools[self.pool].index(self.rank)

    @property
    def pool_size(self) -> int:
        return len(self.pools[self.pool])

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The group of an axis of this rank's pool, or of several taken together; without an axis,
        of all ranks. A group of several is made when it is first asked for, by its members.

        Raises KeyError for an axis that the pool does not have.
        """
        for axis in axes:
            self.coords[axis]
        if len(axes) == 1:
            return self.mesh.get_group(axes[0])
        if not axes:
            world = dist.group.WORLD
            assert world is not None
            return world
        key = frozenset(axes)
        if key not in self.groups:
            at = tuple(slice(None) if a in key else c for a, c in self.coords.items())
            ranks = torch.as_tensor(self.mesh.mesh)[at].flatten().tolist()
            made = dist.new_group(ranks, use_local_synchronization=True)
            assert isinstance(made, dist.ProcessGroup)
            self.groups[key] = made
        return self.groups[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a rank sits: its number among the topology's, its ledger, its meshes by pool, its
    device."""

    topology: Topology
    rank: int
    ledger: Ledger
    meshes: dict[str, DeviceMesh]
    device: torch.device


def make_meshes(topology: Topology, device: torch.device) -> dict[str, DeviceMesh]:
    """One DeviceMesh for each pool. Every rank makes all of them: groups are made together."""
    meshes = {}
    for pool in topology.pools:
        shape = [size for _, size in pool.axes]
        ranks = torch.tensor(list(pool.ranks)).view(shape)
        meshes[pool.name] = DeviceMesh(
            device.type, ranks, mesh_dim_names=tuple(a for a, _ in pool.axes)
        )
    return meshes


def of_all_ranks(own: Any) -> list[Any]:
    """What each rank has, by rank; all have to come here."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, own)
    return held


def make_context(
    topology: Topology,
    rank: int,
    meshes: dict[str, DeviceMesh],
    *,
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
) -> Context:
    """The Context of one rank before its first step."""
    pool = topology.pool_of(rank)
    return Context(
        rank=rank,
        world_size=topology.world_size,
        pool=pool.name,
        axes=dict(pool.axes),
        coords=Coords(zip((a for a, _ in pool.axes), pool.coords(rank), strict=True)),
        pools={p.name: tuple(p.ranks) for p in topology.pools},
        mesh=meshes[pool.name],
        meshes=meshes,
        device=device,
        dtype=dtype,
        seed=seed,
    )
