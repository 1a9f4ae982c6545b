"""The reference as a value, and its files: what each gradient must be, in one tier and step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sumgrad.base.files import is_regular, read_json, write_json
from sumgrad.base.tensors import overlapping

Grads = dict[str, torch.Tensor]
Partials = dict[tuple[str, str], Grads]
Kind = Literal["rows", "coupled", "once"]
ALL = "all"  # the producer of partials where no plan names one


def as_count(count: float) -> float:
    """What a term is divided by: rows or tokens, or the sum of their weights."""
    return int(count) if count == int(count) else float(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Everything that judging one step in one dtype needs.

    grads, by_term: float64. resolution: term -> name -> how far two float64 runs differ, so that a
    term which is zero by mathematics is told from a small one. scale: name -> largest sum of
    absolute parts of the gradient. floor: name -> largest absolute error of the single-process runs
    in the working dtype; floor_by_term, norm_floor: the same for every term alone and for the norm.
    same_dtype: one of these runs, or none. weights: hash of the weights in the working dtype.

    partials: (term, producer) -> name -> (rows or intervals, *shape) float64; empty where none are
    stored. intervals: their row bounds [a, b); row_counts: term -> the count of each interval.
    kinds: what kind each term is. reached: parameters whose gradient is not zero at weights moved a
    little, whatever it is at these. problems: why the comparison cannot be trusted. warnings: what
    a reader should know. outside: what the loss trains beside the model's parameters. buffers:
    after one pass over all rows, of a single term only; changed_buffers: those that it changed.
    factor: what a step multiplies its reduced gradients by; it is in everything above, and norm is
    the norm before it. batch: a hash of the step's rows, where the reference says it. after,
    after_floor: of a script, its weights after an optimizer's step, and how far off they may be.
    """

    step: int
    grads: Grads
    by_term: dict[str, Grads]
    resolution: dict[str, dict[str, float]]
    scale: dict[str, float]
    floor: dict[str, float]
    floor_by_term: dict[str, dict[str, float]]
    same_dtype: Grads
    norm: float
    norm_floor: float
    counts: Mapping[str, float]
    weights: str
    partials: Partials = field(default_factory=dict)
    intervals: tuple[tuple[int, int], ...] = ()
    row_counts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    reached: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    buffers: Grads = field(default_factory=dict)
    changed_buffers: tuple[str, ...] = ()
    factor: float = 1.0
    batch: str = ""
    after: Grads = field(default_factory=dict)
    after_floor: dict[str, float] = field(default_factory=dict)


PLAIN = (
    "scale", "floor", "floor_by_term", "resolution", "norm", "norm_floor", "counts", "weights",
)  # fmt: skip
SAID = (
    "kinds", "reached", "problems", "warnings", "outside", "changed_buffers", "factor", "batch",
    "after_floor",
)  # fmt: skip
SHARED = "grads_in"  # where another tier's file holds the gradients of this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A step's gradient in parts: what a failure is explained from. As in Reference."""

    partials: Partials
    intervals: tuple[tuple[int, int], ...] = ()
    row_counts: dict[str, tuple[float, ...]] = field(default_factory=dict)


def files_of(tier: str, step: int) -> tuple[str, ...]:
    """Names of the files that hold a tier's reference of a step; of the parts, where there are."""
    return (
        f"reference_{tier}_{step}.json",
        f"reference_{tier}_{step}.safetensors",
        f"partials_{tier}_{step}.json",
        f"partials_{tier}_{step}.safetensors",
    )


def write_reference(
    directory: Path, tier: str, reference: Reference, *, shared: dict[int, str] | None = None
) -> None:
    """Write one tier's reference of one step, and its parts where there are any.

    shared: id of gradients that are written already -> their file; another tier's, of this step.
    """
    plain, numbers, *_ = files_of(tier, reference.step)
    shared = {} if shared is None else shared
    held = shared.setdefault(id(reference.grads), numbers)
    tensors = {f"same_dtype/{n}": t for n, t in reference.same_dtype.items()}
    if held == numbers:
        tensors |= {f"grads/{name}": tensor for name, tensor in reference.grads.items()}
        for term, grads in reference.by_term.items():
            tensors |= {
                f"term:{term}/{name}": tensor
                for name, tensor in grads.items()
                if tensor is not reference.grads[name]  # a single term is the whole gradient
            }
        tensors |= {f"buffer/{name}": tensor for name, tensor in reference.buffers.items()}
        tensors |= {f"after/{name}": tensor for name, tensor in reference.after.items()}
    write_tensors(directory / numbers, tensors)
    said = {name: getattr(reference, name) for name in (*PLAIN, *SAID)}
    write_json(directory / plain, {"step": reference.step, SHARED: held, **said})
    if reference.partials:
        parts = Parts(
            partials=reference.partials,
            intervals=reference.intervals,
            row_counts=reference.row_counts,
        )
        write_parts(directory, tier, reference.step, parts)


def write_parts(directory: Path, tier: str, step: int, parts: Parts) -> None:
    """Write the parts of a step, so that a failure can be explained without the workload."""
    *_, plain, numbers = files_of(tier, step)
    tensors = {
        f"{term}/{producer}/{name}": tensor
        for (term, producer), grads in parts.partials.items()
        for name, tensor in grads.items()
    }
    write_tensors(directory / numbers, tensors)
    write_json(directory / plain, {"intervals": parts.intervals, "row_counts": parts.row_counts})


def read_reference(
    directory: Path, tier: str, step: int, *, names: Sequence[str], terms: Sequence[str]
) -> Reference:
    """Read one tier's reference of a step. Raises FileNotFoundError or one of spec.DAMAGED."""
    plain, numbers, *_ = files_of(tier, step)
    item = read_json(directory / plain)
    held: dict[str, Grads] = {}
    for file in dict.fromkeys((str(item[SHARED]), numbers)):
        if Path(file).name != file:
            raise ValueError(f"{file!r} is no file of a run")
        for key, tensor in read_tensors(directory / file):
            kind, name = key.split("/", 1)
            if kind != "same_dtype" or file == numbers:
                held.setdefault(kind, {})[name] = tensor
    grads = {name: held["grads"][name] for name in names}
    same = held.get("same_dtype", {})

    def by_term(table: dict[str, Any]) -> dict[str, dict[str, float]]:
        return {term: {name: float(table[term][name]) for name in names} for term in terms}

    return Reference(
        step=int(item["step"]),
        grads=grads,
        same_dtype={name: same[name] for name in names} if same else {},
        by_term={
            term: {n: held.get(f"term:{term}", {}).get(n, grads[n]) for n in names}
            if len(terms) == 1
            else {n: held[f"term:{term}"][n] for n in names}
            for term in terms
        },
        scale={name: float(item["scale"][name]) for name in names},
        floor={name: float(item["floor"][name]) for name in names},
        floor_by_term=by_term(item["floor_by_term"]),
        resolution=by_term(item["resolution"]),
        norm=float(item["norm"]),
        norm_floor=float(item["norm_floor"]),
        counts={term: as_count(item["counts"][term]) for term in terms},
        weights=str(item["weights"]),
        kinds=item["kinds"],
        buffers=held.get("buffer", {}),
        reached=tuple(item["reached"]),
        problems=tuple(item["problems"]),
        warnings=tuple(item["warnings"]),
        outside=tuple(item["outside"]),
        changed_buffers=tuple(item["changed_buffers"]),
        factor=float(item.get("factor", 1.0)),
        batch=str(item.get("batch", "")),
        after=held.get("after", {}),
        after_floor={str(n): float(x) for n, x in item.get("after_floor", {}).items()},
    )


def with_parts(reference: Reference, parts: Parts) -> Reference:
    """The reference, and what a failure of it is explained from."""
    return replace(
        reference, partials=parts.partials, intervals=parts.intervals, row_counts=parts.row_counts
    )


def read_parts(directory: Path, tier: str, step: int) -> Parts | None:
    """The parts of a step; None where none are stored. Raises one of spec.DAMAGED."""
    *_, plain, numbers = files_of(tier, step)
    if not (directory / numbers).exists():
        return None
    partials: Partials = {}
    for key, tensor in read_tensors(directory / numbers):
        term, producer, name = key.split("/", 2)
        partials.setdefault((term, producer), {})[name] = tensor
    item = read_json(directory / plain)
    return Parts(
        partials=partials,
        intervals=tuple((int(a), int(b)) for a, b in item["intervals"]),
        row_counts={term: tuple(counts) for term, counts in item["row_counts"].items()},
    )


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a file by its key, mapped, not copied. FileNotFoundError, SafetensorError."""
    if not path.exists():
        raise FileNotFoundError(path)
    if not is_regular(path):
        raise ValueError(f"{path.name} is no regular file")
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            yield key, file.get_tensor(key)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors atomically, without a copy of them in memory where they are contiguous and
    do not overlap."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(_each_alone(tensors), temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _each_alone(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU; of those that overlap in memory, as weights that are tied by it, copies."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for _, name in list(overlapping(held.items())):
        held[name] = held[name].clone()
    return held
