"""A single run kept under a name, so that tonight's ranks are compared with last week's.

Whole, ranks are compared with it itself. As projections it has room for large models: tonight's
single run is made again, ranks are compared with that one, and that one with what was kept.
"""

from __future__ import annotations

import math
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sumgrad.base.errors import UserError
from sumgrad.base.files import read_json, write_json
from sumgrad.record.spec import DAMAGED
from sumgrad.subjects.script.reference import Noise, Single
from sumgrad.subjects.script.sketch import Sketch, write_sketch

FOLDER = Path(".sumgrad") / "baselines"
FILE, NOISE = "baseline.json", "noise.json"
SMALL_BYTES = 256 << 20
_LEFT_BEHIND = ("boot", "package", "files", "*.log", "*.stack", "*.claim")


def _today() -> str:
    return time.strftime("%Y-%m-%d %H:%M")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a kept run was: its tier, whether it was lifted, how it was started, and when; whether
    it is there whole, or as projections."""

    tier: str
    lift: bool
    command: str
    whole: bool = True
    made: str = field(default_factory=_today)


def check_name(name: str) -> None:
    """UserError if it is no name, or one that is taken."""
    if not re.fullmatch(r"[A-Za-z][\w.-]{0,60}", name):
        raise UserError(f"--save {name}: expected a letter, then letters, digits, `.`, `_`, `-`")
    if (FOLDER / name).exists():
        raise UserError(f"--save {name}: {FOLDER / name} is there already; remove it first")


def is_small(single: Single) -> bool:
    """Whether a run is kept whole where nobody said: its weights and gradients have room."""
    numel = sum(math.prod(shape) for shape in single.params.values())
    return numel * 8 * 2 * (len(single.steps) + 1) <= SMALL_BYTES


def keep_baseline(name: str, run: Path, what: Baseline, sketch: Sketch | None) -> None:
    """Keep the single run of a run directory, whole or as a sketch of it, and how loud its noise
    runs were."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    if sketch is not None:
        write_sketch(folder, sketch)
    else:
        shutil.copytree(
            run / "single", folder / "single", ignore=shutil.ignore_patterns(*_LEFT_BEHIND),
            symlinks=True, dirs_exist_ok=True,
        )  # fmt: skip
    shutil.copy2(run / NOISE, folder / NOISE)
    write_json(folder / FILE, asdict(what))


def keep_noise(folder: Path, noise: Sequence[Noise]) -> None:
    """Of each step how loud noise runs were, beside the single run."""
    write_json(folder / NOISE, [asdict(step) for step in noise])


def kept_noise(folder: Path) -> list[Noise]:
    """Of each step, as it was kept. Raises one of spec.DAMAGED, or FileNotFoundError."""

    def floats(values: dict[str, Any]) -> dict[str, float]:
        return {name: float(value) for name, value in values.items()}  # one may be "nan"

    return [
        Noise(grads=floats(s["grads"]), after=floats(s["after"]), norm=float(s["norm"]))
        for s in read_json(folder / NOISE)
    ]


def find_baseline(name: str) -> tuple[Path, Baseline]:
    """Where it is kept, and what it was. UserError if there is none."""
    folder = FOLDER / name
    try:
        return folder, Baseline(**read_json(folder / FILE))
    except FileNotFoundError:
        known = sorted(path.name for path in FOLDER.glob("*")) if FOLDER.exists() else []
        there = f"there are {', '.join(known)}" if known else "none is kept here"
        raise UserError(f"--against {name}: no number and no stored run; {there}") from None
    except DAMAGED as error:
        raise UserError(f"{folder / FILE}: damaged: {error}") from None
