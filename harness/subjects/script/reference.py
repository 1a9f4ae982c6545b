"""The single run, and runs with other roundings, as the reference of every optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sumgrad.base.outcome import some_of
from sumgrad.base.tolerances import zero_factor
from sumgrad.record.endings import read_end_record
from sumgrad.record.ranks import AFTER, BUFFER_NAMED
from sumgrad.record.reference import ALL, Grads, Parts, Reference, read_tensors
from sumgrad.subjects.noise_floor import error, norm
from sumgrad.subjects.program.reference.noise import at_least_typical
from sumgrad.subjects.program.reference.terms import COUPLED_SHARE
from sumgrad.subjects.script.asked import KEPT, START, buffers_of

LOSS = "loss"  # the one term of a script: nothing tells its parts
# Of the scale: what roundings of weights and sums may do to a gradient in each dtype. A step that
# is moved by more has no reference to be compared with. Of 12 scripts the largest was 1e-14.
LOUD = {"float64": 1e-9, "float32": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """A run of a script that holds every parameter whole, as it was stored.

    params: name -> shape. dtype: of most gradients. grads, after: of each step what the optimizer
    found, and left. buffers: of each what it left in all of them, and the names of those that it
    changed. steps: what it said of each. unowned: parameters with a gradient that none of its
    optimizers has.
    """

    params: dict[str, tuple[int, ...]]
    dtype: str
    grads: tuple[Grads, ...]
    after: tuple[Grads, ...]
    buffers: tuple[tuple[Grads, tuple[str, ...]], ...]
    steps: tuple[dict[str, Any], ...]
    unknown: tuple[str, ...]
    unowned: tuple[str, ...] = ()


def read_single(directory: Path, tier: str, *, rank: int = 0) -> Single:
    """Read it. Raises FileNotFoundError or one of spec.DAMAGED."""
    result = (read_end_record(directory, rank) or {}).get("result")
    if result is None:
        raise FileNotFoundError(directory)
    files = result["grads"]

    def stored(key: str) -> Grads:
        return dict(read_tensors(directory / "ranks" / files[key]))

    count = range(len([key for key in files if key.startswith(f"{AFTER}/")]))
    grads = tuple(stored(f"{tier}/{i}") for i in count)
    dtypes = Counter(str(g.dtype).removeprefix("torch.") for own in grads for g in own.values())
    return Single(
        params={name: tuple(shape) for name, shape in result["shapes"].items()},
        dtype=dtypes.most_common(1)[0][0] if dtypes else "float32",
        grads=grads,
        after=tuple(stored(f"{AFTER}/{i}") for i in count),
        buffers=_buffers(directory, count),
        steps=tuple(result["steps"][: len(count)]),
        unknown=tuple(result["unknown"]),
        unowned=tuple(result.get("unowned", ())),
    )


def twins_of(single: Single) -> tuple[tuple[str, ...], ...]:
    """Groups of parameters of one shape that began with the same values, as norms do and biases."""
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, told in single.steps[0].get("started_with", {}).items() if single.steps else ():
        if name in single.params:
            alike.setdefault((told, single.params[name]), []).append(name)
    return tuple(tuple(names) for names in alike.values() if len(names) > 1)


def _buffers(directory: Path, count: range) -> tuple[tuple[Grads, tuple[str, ...]], ...]:
    """From those before the first forward, what each step changed in them."""
    now: Grads = {}
    for path in directory.glob(KEPT.format(f"{START}_*_buffers")):
        now |= {n.removeprefix(BUFFER_NAMED): t for n, t in read_tensors(path)}
    out = []
    for call in count:
        path = directory / KEPT.format(buffers_of(call))
        changed = dict(read_tensors(path)) if path.exists() else {}
        now = {**now, **changed}
        out.append((now, tuple(changed)))
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far runs are apart that differ in roundings, at one step, absolute: each gradient, each
    weight after it, and the norm of all gradients."""

    grads: dict[str, float]
    after: dict[str, float]
    norm: float


def noise_of(single: Single, runs: Sequence[Single], step: int) -> Noise:
    """Of runs whose weights are off by one rounding, each at least as long."""
    grads, after = _whole(single, step), single.after[step]
    others = [_whole(run, step) for run in runs]
    noise = {n: max(error(run[n], g) for run in others) for n, g in grads.items()}

    def apart(run: Single, name: str, value: torch.Tensor) -> float:
        """Where the gradient tells the step, as it is compared: of noise a step is anything."""
        grad = grads.get(name)
        off = (run.after[step][name].double() - value.double()).abs()
        if grad is not None and grad.shape == off.shape:
            off = off[(grad.abs() > zero_factor(run.dtype) * noise[name]) | (grad == 0)]
        return float(off.max()) if off.numel() else 0.0

    return Noise(
        grads=noise,
        after={n: max(apart(run, n, v) for run in runs) for n, v in after.items()},
        norm=max(abs(norm(run) - norm(grads)) for run in others),
    )  # fmt: skip


def louder(a: Noise, b: Noise) -> Noise:
    """Of the runs of both."""
    return Noise(
        grads={n: max(value, b.grads[n]) for n, value in a.grads.items()},
        after={n: max(value, b.after[n]) for n, value in a.after.items()},
        norm=max(a.norm, b.norm),
    )


def _whole(run: Single, step: int) -> Grads:
    """Every gradient of a step in float64, zero where there is none."""
    grads = run.grads[step]
    return {
        n: grads[n].double() if n in grads else torch.zeros(s, dtype=torch.float64)
        for n, s in run.params.items()
    }


def reference_of(single: Single, noise: Noise, step: int) -> Reference:
    """What every gradient of a step must be, and how far off one may be."""
    grads = _whole(single, step)
    largest = max((float(g.abs().max()) for g in grads.values() if g.numel()), default=0.0)
    scale = {
        n: float(g.abs().max()) + COUPLED_SHARE * largest if g.count_nonzero() else 0.0
        for n, g in grads.items()
    }
    floor = noise.grads
    zeros = zero_factor(single.dtype)
    nothing = {n for n, g in grads.items() if not bool((g.abs() > zeros * floor[n]).any())}
    after = {n: t.double() for n, t in single.after[step].items()}
    most = LOUD.get(single.dtype, 0.3)
    loud = [n for n, size in scale.items() if size and floor[n] > most * size]
    problems = [f"the single run: {text}" for text in single.unknown]
    broken = [n for n, g in grads.items() if not bool(torch.isfinite(g).all())]
    problems += [f"the single run's gradient of {some_of(broken)} is not finite"] if broken else []
    problems += [
        f"runs of the script on one process, whose weights are off by one rounding, differ by "
        f"{floor[n] / scale[n]:.1e} of the gradient of {n}: it draws unseeded, decides by its "
        f"last digits (a router, an argmax), or computes in fewer digits somewhere"
        for n in loud[:1]
    ]
    return Reference(
        step=step,
        grads=grads,
        by_term={LOSS: grads},
        resolution={LOSS: floor},
        scale=scale,
        floor=at_least_typical(floor, scale, nothing) if any(scale.values()) else floor,
        floor_by_term={LOSS: floor},
        same_dtype={},
        norm=norm(grads),
        norm_floor=noise.norm,
        counts={LOSS: 1},
        weights="",
        kinds={LOSS: "coupled"},
        reached=tuple(n for n, size in scale.items() if size > 0 or n in single.grads[step]),
        problems=tuple(problems),
        buffers={n: t for n, t in single.buffers[step][0].items() if not t.is_complex()},
        changed_buffers=single.buffers[step][1],
        after=after,
        after_floor=noise.after,
    )


def parts_of(reference: Reference) -> Parts:
    """The gradient as one part: a script's rows are not told apart."""
    whole = {name: grad[None] for name, grad in reference.grads.items()}
    return Parts(partials={(LOSS, ALL): whole}, intervals=((0, 1),), row_counts={LOSS: (1.0,)})
