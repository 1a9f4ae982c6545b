"""The reference as a value, and its files: what each gradient must be, in one tier and step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from sumgrad.base.files import is_regular, read_json, write_bytes, write_json

Grads = dict[str, torch.Tensor]
Partials = dict[tuple[str, str], Grads]
Kind = Literal["rows", "coupled", "once"]
ALL = "all"  # the producer of partials where no plan names one


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Everything that judging one step in one dtype needs.

    grads, by_term: float64. resolution: term -> name -> how far two float64 runs differ, so that a
    term which is zero by mathematics is told from a small one. scale: sum of absolute partials,
    elementwise, float64. floor: name -> largest absolute error of the single-process runs in the
    working dtype; floor_by_term, norm_floor: the same for every term alone and for the norm.
    same_dtype: one of these runs. weights: hash of the weights in the working dtype.

    partials: (term, producer) -> name -> (rows or intervals, *shape) float64; empty where none are
    stored. intervals: their row bounds [a, b); row_counts: term -> the count of each interval.
    kinds: what kind each term is. reached: parameters whose gradient is not zero at weights moved a
    little, whatever it is at these. problems: why the comparison cannot be trusted. warnings: what
    a reader should know. outside: what the loss trains beside the model's parameters. buffers:
    after one pass over all rows, of a single term only; changed_buffers: those that it changed.
    """

    step: int
    grads: Grads
    by_term: dict[str, Grads]
    resolution: dict[str, dict[str, float]]
    scale: Grads
    floor: dict[str, float]
    floor_by_term: dict[str, dict[str, float]]
    same_dtype: Grads
    norm: float
    norm_floor: float
    counts: dict[str, int]
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


PLAIN = ("floor", "floor_by_term", "resolution", "norm", "norm_floor", "counts", "weights")
SAID = (
    "kinds", "reached", "intervals", "row_counts", "problems", "warnings", "outside",
    "changed_buffers",
)  # fmt: skip


def files_of(tier: str) -> tuple[str, ...]:
    """Names of the files that hold a tier's reference; the last two are not always written."""
    return (
        f"reference_{tier}.json",
        f"reference_{tier}.safetensors",
        f"partials_{tier}.safetensors",
        f"program_{tier}.json",
        f"program_{tier}_buffers.safetensors",
    )


def write_references(directory: Path, tier: str, references: Sequence[Reference]) -> None:
    """Write a tier's reference of all steps, and its partials where there are any."""
    plain, numbers, _, said, buffers = (directory / name for name in files_of(tier))
    tensors = {}
    for reference in references:
        for kind in ("grads", "scale", "same_dtype"):
            for name, tensor in getattr(reference, kind).items():
                tensors[f"{reference.step}/{kind}/{name}"] = tensor
        for term, grads in reference.by_term.items():
            for name, tensor in grads.items():
                tensors[f"{reference.step}/term:{term}/{name}"] = tensor
    _write_tensors(numbers, tensors)
    write_json(plain, [{"step": r.step, **{k: getattr(r, k) for k in PLAIN}} for r in references])
    if any(r.partials for r in references):
        write_partials(directory, tier, {r.step: r.partials for r in references})
    if any(r.kinds for r in references):
        write_json(said, [{k: getattr(r, k) for k in SAID} for r in references])
        _write_tensors(
            buffers, {f"{r.step}/{n}": b for r in references for n, b in r.buffers.items()}
        )


def write_partials(directory: Path, tier: str, partials: Mapping[int, Partials]) -> None:
    """Write the partials of some steps, so that a failure can be explained without the workload."""
    tensors = {
        f"{step}/{term}/{producer}/{name}": tensor
        for step, held in partials.items()
        for (term, producer), grads in held.items()
        for name, tensor in grads.items()
    }
    _write_tensors(directory / files_of(tier)[2], tensors)


def read_references(
    directory: Path, tier: str, *, names: Sequence[str], terms: Sequence[str], said: bool
) -> list[Reference]:
    """Read one tier's reference. Raises FileNotFoundError or one of spec.DAMAGED.

    said: what is wrong with it was written beside it, and must be there.
    """
    plain_file, numbers_file, _, said_file, buffers_file = (directory / n for n in files_of(tier))
    plain = read_json(plain_file)
    held: dict[int, dict[str, Grads]] = {}
    for key, tensor in read_tensors(numbers_file):
        step, kind, name = key.split("/", 2)
        held.setdefault(int(step), {}).setdefault(kind, {})[name] = tensor

    def whole(grads: Grads) -> Grads:
        return {name: grads[name] for name in names}

    def by_term(table: dict[str, Any]) -> dict[str, dict[str, float]]:
        return {term: {name: float(table[term][name]) for name in names} for term in terms}

    found = [
        Reference(
            step=int(item["step"]),
            grads=whole(held[item["step"]]["grads"]),
            scale=whole(held[item["step"]]["scale"]),
            same_dtype=whole(held[item["step"]]["same_dtype"]),
            by_term={term: whole(held[item["step"]][f"term:{term}"]) for term in terms},
            floor={name: float(item["floor"][name]) for name in names},
            floor_by_term=by_term(item["floor_by_term"]),
            resolution=by_term(item["resolution"]),
            norm=float(item["norm"]),
            norm_floor=float(item["norm_floor"]),
            counts={term: int(item["counts"][term]) for term in terms},
            weights=str(item["weights"]),
        )
        for item in plain
    ]
    if not said:
        return found
    buffers: dict[int, Grads] = {}
    with contextlib.suppress(FileNotFoundError):  # runs stored before buffers were looked at
        for key, tensor in read_tensors(buffers_file):
            number, name = key.split("/", 1)
            buffers.setdefault(int(number), {})[name] = tensor
    return [
        replace(reference, buffers=buffers.get(reference.step, {}), **_said(item))
        for reference, item in zip(found, read_json(said_file), strict=True)
    ]


def _said(item: dict[str, Any]) -> dict[str, Any]:
    return {
        "kinds": item["kinds"],
        "intervals": tuple((a, b) for a, b in item["intervals"]),
        "row_counts": {term: tuple(counts) for term, counts in item["row_counts"].items()},
        **{k: tuple(item[k]) for k in ("reached", "problems", "warnings")},
        **{k: tuple(item.get(k, ())) for k in ("outside", "changed_buffers")},
    }


def read_partials(directory: Path, tier: str) -> dict[int, Partials]:
    """Step -> (term, producer) -> name -> partials; empty where none are stored."""
    path = directory / files_of(tier)[2]
    out: dict[int, Partials] = {}
    if path.exists():
        for key, tensor in read_tensors(path):
            step, term, producer, name = key.split("/", 3)
            out.setdefault(int(step), {}).setdefault((term, producer), {})[name] = tensor
    return out


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a file by its key. Raises FileNotFoundError or SafetensorError."""
    if not path.exists():
        raise FileNotFoundError(path)
    if not is_regular(path):
        raise ValueError(f"{path.name} is no regular file")
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            yield key, file.get_tensor(key)


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    write_bytes(path, save({k: t.detach().cpu().contiguous() for k, t in tensors.items()}))
