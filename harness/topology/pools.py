"""Topology: pools of ranks, each pool a mesh of named axes, read from YAML.

What it is: plain data with validation. What it is not: it knows no workload, no tensor and no
process group. Any size is legal, nothing need divide anything, a rank may own no row.

    topology = load_topology(Path("topologies/three_pool.yaml"))
    topology.pool("ci").ranks        # (0, 1, 2, 3)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from sumgrad.base.devices import Kind, chosen_device
from sumgrad.base.errors import UserError
from sumgrad.base.plain_text import meant, shown
from sumgrad.topology.yaml_source import YamlSource, dotted, read_yaml

MAX_RANKS = 1 << 20
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
Where = Callable[[tuple[str | int, ...]], str]
FLAGS = ("fault", "law", "seed", "steps", "tiers", "timeout")  # that people write into a topology
Model = TypeVar("Model", bound=BaseModel)
Size = Annotated[int, Field(ge=1, le=MAX_RANKS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A mesh of ranks that does one job. `ranks` are global, in row-major order of the axes."""

    name: str
    role: str
    axes: tuple[tuple[str, int], ...]
    ranks: Sequence[int]
    rows_per_rank: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def symbol(self) -> str:
        """How a factor of this pool's size is written: `ci.dp`, or `pool.a*pool.b`."""
        return "*".join(f"{self.name}.{axis}" for axis, _ in self.axes)

    def coords(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a global rank on this pool's axes."""
        index, out = self.ranks.index(rank), []
        for _, size in reversed(self.axes):
            index, coord = divmod(index, size)
            out.append(coord)
        return tuple(reversed(out))


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Pools that together hold the ranks 0..world_size-1, each rank in exactly one.

    workload: None where the file leaves it to --workload. rows: how many rows of a Program's batch
    are used; None for all.
    """

    name: str
    why: str
    workload: str | None
    kernels: Literal["auto", "triton", "torch"]
    device: Literal["cpu", "cuda", "auto"]
    plan_only: bool
    pools: tuple[Pool, ...]
    options: dict[str, Any]
    rows: int | None = None
    source: YamlSource | None = field(default=None, compare=False, repr=False)

    @property
    def world_size(self) -> int:
        return sum(pool.size for pool in self.pools)

    def pool(self, name: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == name)

    def pool_of(self, rank: int) -> Pool:
        return next(pool for pool in self.pools if rank in pool.ranks)

    def with_role(self, role: str) -> tuple[Pool, ...]:
        return tuple(pool for pool in self.pools if pool.role == role)

    def place(self, rank: int) -> str:
        """`rank 5 (block0[1])`, as reports write it."""
        pool = self.pool_of(rank)
        return f"rank {rank} ({pool.name}[{','.join(map(str, pool.coords(rank)))}])"

    def where(self, loc: Sequence[str | int]) -> str:
        """`file.yaml:LINE: key.path`, for errors about a value of this topology."""
        return self.source.where(loc) if self.source else f"{self.name}: {dotted(loc)}"

    def chosen_device(self, flag: str | None) -> Kind:
        """Where the ranks' tensors are: as a flag says, else as the file does. Raises UserError."""
        return chosen_device(flag or self.device, "--device" if flag else self.where(("device",)))


class _PoolFile(BaseModel):
    """One pool: its axes and, where the default does not serve, its ranks and rows."""

    model_config = ConfigDict(extra="forbid", strict=True)

    axes: Annotated[
        dict[Name, Size],
        Field(min_length=1, description="Axis name to size; the pool has as many ranks as cells."),
    ]
    role: Annotated[
        Name | None, Field(description="What the pool does in the workload (default: its name).")
    ] = None
    ranks: Annotated[
        list[Annotated[int, Field(ge=0, lt=MAX_RANKS)]] | None,
        Field(description="Global ranks of the pool (default: those after the highest so far)."),
    ] = None
    rows_per_rank: Annotated[
        list[Annotated[int, Field(ge=0)]] | None,
        Field(description="Rows of each rank, 0 allowed (default: as even as the rows go)."),
    ] = None


class TopologyFile(BaseModel):
    """A sumgrad topology: pools of ranks under one workload."""

    model_config = ConfigDict(extra="forbid", strict=True, title="sumgrad topology")

    name: Annotated[Name | None, Field(description="Default: the file's name.")] = None
    why: Annotated[str, Field(description="One line: what this topology is there to show.")] = ""
    workload: Annotated[
        str | None,
        Field(
            description="NAME, file.py:Class (beside this file) or package.module:Class; may be "
            "left out where --workload is given.",
            min_length=1,
        ),
    ] = None
    kernels: Annotated[
        Literal["auto", "triton", "torch"],
        Field(description="auto: Triton on a GPU, torch on a CPU."),
    ] = "auto"
    device: Annotated[
        Literal["cpu", "cuda", "auto"],
        Field(description="Where the ranks' tensors are; auto: cuda where there is a GPU."),
    ] = "cpu"
    plan_only: Annotated[
        bool, Field(description="Too large to start: `sumgrad plan` proves it, no run.")
    ] = False
    options: Annotated[
        dict[str, Any], Field(description="Sizes and choices of the workload; it validates them.")
    ] = {}
    rows: Annotated[
        int | None, Field(ge=1, description="Only the first rows of a Program's batch.")
    ] = None
    pools: Annotated[dict[Name, _PoolFile], Field(min_length=1)]


def json_schema() -> str:
    """The JSON schema of a topology file, for editors (shipped as topologies/schema.json)."""
    schema = TopologyFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2) + "\n"


def load_topology(path: Path) -> Topology:
    """Read and validate a topology file; UserError lists every problem with file and line."""
    path = Path(path)
    topology = parse_topology(read_yaml(path))
    return replace(topology, workload=_beside(path, topology.workload))


def _beside(path: Path, workload: str | None) -> str | None:
    """`file.py:Class` with the file beside the YAML, if it is there; else as it stands."""
    file, colon, name = (workload or "").rpartition(":")
    here = path.parent / file
    if colon and file.endswith(".py") and here.is_file():
        return f"{here}:{name}"
    return workload


def parse_topology(source: YamlSource) -> Topology:
    """Validate parsed YAML. The data is not changed."""
    file = validate_model(TopologyFile, source.data, where=source.where)
    problems: list[str] = []
    pools = _place_pools(file, source, problems)
    if problems:
        raise UserError(problems)
    return Topology(
        name=file.name or _name_from(source.path),
        why=file.why,
        workload=file.workload,
        kernels=file.kernels,
        device=file.device,
        plan_only=file.plan_only,
        pools=pools,
        options=dict(file.options),
        rows=file.rows,
        source=source,
    )


def _name_from(path: Path) -> str:
    """A file's name as the name of its topology: what is no letter or digit becomes `_`."""
    text = re.sub(r"[^A-Za-z0-9_]", "_", path.stem)[:60]
    return text if text[:1].isalpha() else f"t_{text}"


def topology_to_json(topology: Topology) -> dict[str, Any]:
    """The content of the YAML file, defaults written out; `topology_from_json` reads it."""
    pools = {
        pool.name: {
            "axes": dict(pool.axes),
            "role": pool.role,
            "ranks": list(pool.ranks),
            "rows_per_rank": list(pool.rows_per_rank) if pool.rows_per_rank else None,
        }
        for pool in topology.pools
    }
    return {
        "name": topology.name,
        "why": topology.why,
        "workload": topology.workload,
        "kernels": topology.kernels,
        "device": topology.device,
        "plan_only": topology.plan_only,
        "options": topology.options,
        "rows": topology.rows,
        "pools": pools,
    }


def topology_from_json(data: Any, *, path: Path) -> Topology:
    """Read back what `topology_to_json` wrote; UserError if somebody changed it badly."""
    return parse_topology(YamlSource(path=path, data=data, lines={}))


def _place_pools(file: TopologyFile, source: YamlSource, problems: list[str]) -> tuple[Pool, ...]:
    owner: dict[int, str] = {}
    pools, free, total = [], 0, 0
    for name, entry in file.pools.items():
        size = _num_cells(entry.axes)
        loc = ("pools", name)
        total += size
        if total > MAX_RANKS:
            problems.append(
                f"{source.where((*loc, 'axes'))}: too many ranks, at most {MAX_RANKS} in all"
            )
            break
        ranks: Sequence[int] = range(free, free + size) if entry.ranks is None else entry.ranks
        if len(ranks) != size:
            problems.append(
                f"{source.where((*loc, 'ranks'))}: got {len(ranks)} ranks, expected {size} "
                f"(the product of the axes)"
            )
        for rank in ranks:
            if rank in owner:
                problems.append(
                    f"{source.where((*loc, 'ranks'))}: rank {rank} is already in pool "
                    f"{owner[rank]}; pools must not overlap"
                )
                break
            owner[rank] = name
        free = max(free, max(ranks, default=-1) + 1)
        rows = entry.rows_per_rank
        if rows is not None and len(rows) != size:
            problems.append(
                f"{source.where((*loc, 'rows_per_rank'))}: got {len(rows)} numbers, expected "
                f"{size}, one for each rank of the pool"
            )
        pools.append(
            Pool(
                name=name,
                role=entry.role or name,
                axes=tuple(entry.axes.items()),
                ranks=ranks if isinstance(ranks, range) else tuple(ranks),
                rows_per_rank=None if rows is None else tuple(rows),
            )
        )
    missing = next((rank for rank in range(len(owner)) if rank not in owner), None)
    if missing is not None and not problems:
        problems.append(f"{source.where(('pools',))}: no pool holds rank {missing}")
    return tuple(pools)


def _num_cells(axes: Mapping[str, int]) -> int:
    """The product of the axes, or the first partial product that no topology can have."""
    size = 1
    for axis in axes.values():
        size *= axis
        if size > MAX_RANKS:
            break
    return size


def validate_model(
    model: type[Model], data: Any, *, where: Where, prefix: tuple[str | int, ...] = ()
) -> Model:
    """Validate `data`; UserError lists all problems as `PLACE: got X, expected Y`.

    where: key path -> the place to print, as YamlSource.where or Topology.where.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UserError(
            [
                f"{where((*prefix, *_clean_loc(item['loc'])))}: {_describe(item)}"
                f"{_meant(model, item) if item['type'] == 'extra_forbidden' else ''}"
                for item in error.errors()
            ]
        ) from None


def _meant(model: type[BaseModel], item: Any) -> str:
    """What an unknown key may have meant: a key that there is, or a flag."""
    *outer, key = (str(part) for part in _clean_loc(item["loc"]))
    known, inside = model, None
    for part in outer:
        field = known.model_fields.get(part)
        models = [] if field is None else _models_in(field.annotation)
        if field is None and inside is not None:
            known, inside = inside, None
        elif models and get_origin(field.annotation if field else None) is dict:
            inside = models[0]
        elif models:
            known = models[0]
    if model is TopologyFile and not outer and key in FLAGS:
        return f"; it is a flag, --{key}"
    near = meant(key, known.model_fields)
    return near or f"; known are {', '.join(known.model_fields)}"


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _clean_loc(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    return tuple(part for part in loc if part != "[key]")


def _describe(item: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    got = repr(shown(item["input"])) if isinstance(item["input"], str) else shown(item["input"])
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "missing":
        return "missing; it is required"
    expected = {
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "bool_type": "true or false",
        "string_type": "a text",
        "dict_type": "a mapping",
        "model_type": "a mapping",
        "list_type": "a list",
        "greater_than_equal": f"a number >= {context.get('ge')}",
        "greater_than": f"a number > {context.get('gt')}",
        "less_than_equal": f"a number <= {context.get('le')}",
        "less_than": f"a number < {context.get('lt')}",
        "string_pattern_mismatch": "a name: letters, digits and _, starting with a letter",
        "too_short": "at least one entry",
        "literal_error": f"one of {context.get('expected')}",
    }.get(kind, shown(item["msg"], 200))
    if kind == "greater_than_equal" and isinstance(item["input"], int):
        expected = f"an integer >= {context.get('ge')}"
    return f"got {got}, expected {expected}"
