"""A single run in little room: of every gradient some projections, and what runs that differ in
roundings make of them. Enough to know whether tonight's single run is still that of last week.

A projection is the sum of all elements with random signs, the same signs for a name and a shape in
every run. Of a difference d it is as large as the norm of d, whatever its elements are.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from sumgrad.base.files import read_json, write_json
from sumgrad.base.outcome import some_of
from sumgrad.base.tolerances import FLOOR_FACTOR, noise_floor, zero_factor
from sumgrad.record.reference import Grads, read_tensors
from sumgrad.record.spec import Changed, Since
from sumgrad.subjects.script.asked import KEPT, START
from sumgrad.subjects.script.reference import Single
from torch import Tensor

FILE = "projections.json"
PROJECTIONS = 16
_BLOCK = 1 << 18  # elements whose signs are drawn at once
_START_ROUNDINGS = 64  # by which drawn weights may differ between two machines

Values = dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """start: projections of the weights before the first step. grads: of each step's gradients.
    noise: of each step, the largest difference that another run's projections had. rows: as in
    Single.steps. dtype: of most gradients."""

    dtype: str
    start: Values
    grads: tuple[Values, ...]
    noise: tuple[dict[str, float], ...]
    rows: tuple[dict[str, list[list[str]]], ...]


def project(name: str, tensor: Tensor) -> tuple[float, ...]:
    """PROJECTIONS sums of a tensor's elements in float64, each with signs of its own."""
    flat = tensor.detach().reshape(-1).double()
    seed = hashlib.blake2b(f"{name} {tuple(tensor.shape)}".encode(), digest_size=7)
    generator = torch.Generator().manual_seed(int.from_bytes(seed.digest()))
    total = torch.zeros(PROJECTIONS, dtype=torch.float64)
    for block in flat.split(_BLOCK):
        ones = torch.randint(2, (PROJECTIONS, len(block)), generator=generator, dtype=torch.int8)
        total += (2.0 * ones.double() - 1.0) @ block
    return tuple(total.tolist())


def sketch_of(single: Single, runs: Sequence[Single], directory: Path) -> Sketch:
    """directory: of the single run, for the weights that it started with. runs: others of it,
    whose weights are off by one rounding."""
    grads = _projected(single)
    others = [_projected(run) for run in runs]
    noise = tuple(
        {n: max((_apart(v, other[step][n]) for other in others if len(other) > step), default=0.0)
         for n, v in values.items()}
        for step, values in enumerate(grads)
    )  # fmt: skip
    return Sketch(
        dtype=single.dtype,
        start=_start(directory),
        grads=grads,
        noise=noise,
        rows=tuple(step["rows"] for step in single.steps),
    )


def compare(kept: Sketch, single: Single, directory: Path, *, name: str, made: str) -> Since | str:
    """A single run of now with one that was kept, up to the first step in which they differ; or
    why the two cannot be compared.

    (A run whose noise hides a factor is no reference either, and reference_of says so.)
    """
    if why := _not_comparable(kept, single, _start(directory)):
        return why
    changed: list[Changed] = []
    for step, now in enumerate(_projected(single)):
        floor = _floor(kept, step)
        for tensor, then in kept.grads[step].items():
            size, bound = max(map(abs, then)), FLOOR_FACTOR * floor[tensor]
            off = _apart(then, now[tensor])
            if not off <= bound:
                changed.append(Changed(step=step, name=tensor, off=off, bound=bound, size=size))
        if changed:
            break  # later ones start from other weights
    return Since(name=name, made=made, tensors=len(kept.start), changed=tuple(changed))


def write_sketch(folder: Path, sketch: Sketch) -> None:
    write_json(folder / FILE, asdict(sketch))


def read_sketch(folder: Path) -> Sketch:
    """Read it. Raises FileNotFoundError or one of spec.DAMAGED."""
    data = read_json(folder / FILE)
    return Sketch(
        dtype=str(data["dtype"]),
        start=_values(data["start"]),
        grads=tuple(_values(step) for step in data["grads"]),
        noise=tuple({n: float(v) for n, v in step.items()} for step in data["noise"]),
        rows=tuple(data["rows"]),
    )


def _not_comparable(kept: Sketch, single: Single, start: Values) -> str:
    """Why the two did not begin alike, or are of other models; "" where they are comparable."""
    if unlike := sorted(kept.start.keys() ^ start.keys()):
        return f"other parameters than it has: {some_of(unlike)}"
    if len(single.steps) > len(kept.grads):
        return f"{len(single.steps)} steps are asked for, and {len(kept.grads)} were kept"
    eps = torch.finfo(getattr(torch, kept.dtype)).eps
    moved = [
        n
        for n, then in kept.start.items()
        if not _apart(then, start[n]) <= _START_ROUNDINGS * eps * max(map(abs, then))
    ]
    if moved:
        return (
            f"it starts from other weights in {some_of(moved)}: seed what the script draws, or "
            f"keep the run whole (`--save-as whole`)"
        )
    for step, info in enumerate(single.steps):
        if kept.rows[step] != info["rows"]:
            return f"it reads other rows at step {step}"
    return ""


def _floor(kept: Sketch, step: int) -> dict[str, float]:
    """How far right projections may be apart: as noise was, and no tensor quieter than most. One
    that is zero by mathematics is the noise of the largest."""
    size = {n: max(map(abs, values)) for n, values in kept.grads[step].items()}
    noise = {n: noise_floor(v, size[n], kept.dtype) for n, v in kept.noise[step].items()}
    live = {n for n, v in size.items() if v > zero_factor(kept.dtype) * noise[n]}
    typical = statistics.median_low([noise[n] / size[n] for n in live] or [0.0])
    largest = max(size.values(), default=0.0)
    return {n: max(v, typical * (size[n] if n in live else largest)) for n, v in noise.items()}


def _projected(run: Single) -> tuple[Values, ...]:
    nothing = (0.0,) * PROJECTIONS
    return tuple(
        {n: project(n, g[n]) if n in g else nothing for n in run.params} for g in run.grads
    )


def _start(directory: Path) -> Values:
    found: Grads = {}
    for path in sorted(directory.glob(KEPT.format(f"{START}_*"))):
        if not path.stem.endswith("_buffers"):
            found |= dict(read_tensors(path))
    return {n: project(n, t) for n, t in found.items() if t.is_floating_point()}


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference of two tensors' projections; NaN where one is."""
    off = torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)
    return float(off.abs().max())


def _values(data: Mapping[str, Any]) -> Values:
    return {name: tuple(float(x) for x in values) for name, values in data.items()}
