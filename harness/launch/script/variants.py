"""One script started in several ways, each on one process and on many: a matrix of verdicts.

    matrix = run_matrix(options, variants)

Every cell is compared with the same single run, that of the script as it is given, and has a run
directory of its own that `sumgrad judge` and `report` read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sumgrad.base.errors import UserError
from sumgrad.base.verdict import Status, Verdict, merge
from sumgrad.judge.bits import Bits, bits_of
from sumgrad.launch.ask import new_directory
from sumgrad.launch.script.baseline import Baseline
from sumgrad.launch.script.diff import OnSignal, run_diff
from sumgrad.launch.script.options import (
    AS_GIVEN,
    DiffOptions,
    Variant,
    check_options,
    script_of,
    single_command,
)
from sumgrad.launch.script.running import Progress
from sumgrad.record.directory import Record, load_record

SCHEMA = "sumgrad.variants/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantCell:
    """One way to start the script, on so many ranks, against the single run as it is given.

    bits: None where nothing was compared. worst: error over threshold, of the worst tensor.
    raised: whether a rank ended in an exception.
    """

    variant: Variant
    ranks: int
    status: Status
    worst: float | None
    bits: Bits | None
    text: str
    raised: bool
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All cells. dtype: what everything was computed in. bitwise: whether bits decide as well."""

    script: str
    steps: int
    dtype: str
    bitwise: bool
    said: tuple[str, ...]
    cells: tuple[VariantCell, ...]

    @property
    def status(self) -> Status:
        return merge([cell.status for cell in self.cells])

    def to_json(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            "schema": SCHEMA,
            "status": self.status,
            "script": self.script,
            "steps": self.steps,
            "dtype": self.dtype,
            "bitwise": self.bitwise,
            "said": list(self.said),
            "cells": [
                {
                    "variant": cell.variant.name,
                    "asked": cell.variant.text if cell.variant != AS_GIVEN else "",
                    "ranks": cell.ranks,
                    "status": cell.status,
                    "worst_of_threshold": cell.worst,
                    "tensors": cell.bits.tensors if cell.bits else 0,
                    "differing_tensors": cell.bits.differing if cell.bits else None,
                    "differing_elements": cell.bits.elements if cell.bits else None,
                    "text": cell.text,
                    "run": str(cell.directory),
                }
                for cell in self.cells
            ],
        }


def run_matrix(
    options: DiffOptions,
    variants: Sequence[Variant],
    *,
    bitwise: bool = False,
    progress: Progress = lambda _: None,
    on_signal: OnSignal = nullcontext,
) -> Matrix:
    """Run every variant on one process and on all ranks. Raises UserError where it cannot begin.

    bitwise: a cell whose bits are not the single run's fails; in the script's own dtype.
    """
    check_options(options)
    _check(options, variants)
    place = new_directory(options.out, re.sub(r"[^\w-]", "_", Path(script_of(options)).stem))
    found = _cells(replace(options, lift=options.lift and not bitwise), variants, place, bitwise,
                   progress, on_signal)  # fmt: skip
    why = next((cell for cell in found.cells[1:] if cell.raised), None)
    if found.dtype == "float64" and why is not None:
        own = _cells(replace(options, lift=False), variants, place / "own dtype", bitwise, progress,
                     on_signal)  # fmt: skip
        if not any(cell.raised for cell in own.cells):
            text = f"compared in the script's own dtype; in float64, {why.variant.name} {why.text}"
            return replace(own, said=(*own.said, text))
    return found


def _check(options: DiffOptions, variants: Sequence[Variant]) -> None:
    if options.a or options.baseline or options.save or options.against != 1:
        raise UserError("--variant: every cell is compared with one process of the same script; "
                        "--a, --b, --save and --against have no place beside it")  # fmt: skip
    names = [_folder(v) for v in (AS_GIVEN, *variants)]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise UserError(f"--variant: two are named {twice!r}")


def _cells(
    options: DiffOptions,
    variants: Sequence[Variant],
    place: Path,
    bitwise: bool,
    progress: Progress,
    on_signal: OnSignal,
) -> Matrix:
    """Everything in one dtype; only the first cell where it has nothing to compare with."""
    first = replace(options, out=place / f"as given, {options.ranks} ranks")
    verdict, folder = run_diff(first, progress=progress, on_signal=on_signal)
    record = load_record(folder)
    done = [_cell(AS_GIVEN, options.ranks, verdict, record, bitwise)]
    spec = record.spec
    if spec.tiers:
        tier, dtype = next(iter(spec.tiers.items()))
        kept = (folder, Baseline(tier=tier, lift=spec.lift, command=single_command(options)))
        for variant, ranks in _asked(options, variants):
            own = replace(
                options,
                variant=variant,
                ranks=ranks,
                out=place / f"{_folder(variant)}, {ranks} ranks",
            )

            def say(text: str, name: str = f"{variant.name}, {ranks} ranks") -> None:
                progress(f"{name}: {text}")

            verdict, at = run_diff(own, progress=say, on_signal=on_signal, known=kept)
            done.append(_cell(variant, ranks, verdict, load_record(at), bitwise))
    return Matrix(
        script=script_of(options),
        steps=spec.steps,
        dtype=dtype if spec.tiers else "",
        bitwise=bitwise,
        said=spec.script.said if spec.script else (),
        cells=tuple(done),
    )


def _folder(variant: Variant) -> str:
    """Its name as that of a folder."""
    return re.sub(r"[^\w .-]", "_", variant.name).strip(". ") or "variant"


def _asked(options: DiffOptions, variants: Sequence[Variant]) -> Iterator[tuple[Variant, int]]:
    for variant in variants:
        yield from ((variant, ranks) for ranks in sorted({1, options.ranks}))


def _cell(
    variant: Variant, ranks: int, verdict: Verdict, record: Record, bitwise: bool
) -> VariantCell:
    bits = bits_of(record)
    worst = [t.worst_of_threshold for t in verdict.tiers if t.worst_of_threshold is not None]
    status, text = verdict.status, _text(verdict)
    if bitwise and status == "pass" and bits is not None and bits.differing:
        status, text = "fail", "its bits are not the single run's"
    return VariantCell(
        variant=variant,
        ranks=ranks,
        status=status,
        worst=max(worst, default=None),
        bits=bits,
        text=text,
        raised=any(o.status == "raised" for o in record.outcomes),
        directory=record.directory,
    )


def _text(verdict: Verdict) -> str:
    """Why it did not pass, in a sentence; empty where it did."""
    if verdict.status == "pass":
        return ""
    bad = next((o for o in verdict.data["outcomes"] if o["status"] != "ok"), None)
    if bad is not None:
        return f"{bad['status']}: {bad.get('detail') or ''}".strip()
    if verdict.diagnoses:
        return verdict.diagnoses[0].cause
    reasons = [r for t in verdict.tiers for r in t.reasons]
    return next(iter([*verdict.findings, *verdict.reasons, *reasons]), "")
