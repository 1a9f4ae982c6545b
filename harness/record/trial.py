"""A failing step run again with one thing in it done otherwise, and whether that makes it right.

trials/asked.json           the step, what is to be tried, by how much a gradient may be off
trials/values.safetensors   what every parameter's whole gradient must be, what each rank's own was
trials/found.jsonl          what came of it, in order, as far as it got
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sumgrad.base.files import read_json, write_json
from sumgrad.record.reference import Grads, read_tensors, write_tensors
from sumgrad.record.spec import DAMAGED

TRIALS = "trials"  # the folder of a run's
ASKED, VALUES, MADE, FOUND = "asked.json", "values.safetensors", "made.jsonl", "found.jsonl"
WANTED = "wanted"  # in front of what must come out, among the values; a rank, of what it had
# Over the ranks of an axis: in the forward alone, in both, in the backward alone; the largest; of
# what they have together, with the own gradient of it, or the sum of theirs; what the first of them
# has. Added where it is put. The last are of what a line reduces over ranks: not at all, or over
# the ranks of an axis.
Way = Literal[
    "sum",
    "sum_both",
    "sum_back",
    "largest",
    "smallest",
    "whole",
    "whole_both",
    "first",
    "once",
    "added",
    "detach",
    "attach",
    "skip",
    "number",
    "unsummed",
    "averaged",
    "over",
    "edit",
]
OF_COLLECTIVES: tuple[Way, ...] = ("unsummed", "averaged", "over")
# Functions in edited code, of a value and an axis: over all its ranks, or those before this one.
SUMMED, BEFORE = "__summed__", "__before__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Other code in place of a piece of a user's. start, end: its line and column, as of ast, whose
    columns are bytes. old: what stands there; new: what is to, of as many lines. was, becomes: the
    statement, to be shown. sure: whether it can hardly make good what is wrong elsewhere. over: the
    axis over whose ranks the old is summed, and nothing else; or, of what stands in before, over
    those before this one."""

    file: str
    start: tuple[int, int]
    end: tuple[int, int]
    old: str
    new: str
    was: str = ""
    becomes: str = ""
    sure: bool = True
    over: str = ""
    before: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is done otherwise wherever a place in the code calls a torch function.

    site, function: as of a Computation; of a module's call the function alone; of a collective as
    of the ledger; also: of others, at which the same is done. way: how; what is over ranks is over
    those of an axis, of all where it is empty. ats: which of what it takes is so changed, counted
    as a Computation's; none for what it gives. dim: along which the ranks have parts of a whole,
    and ats those parts. by: with what a number is multiplied, or a tensor on each rank so that a
    sum over the axis counts it once. edit: other code, and nothing else; anew: with which the
    model is distributed, too.
    """

    site: str
    function: str
    way: Way
    axis: str = ""
    ats: tuple[int, ...] = ()
    dim: int = 0
    by: float = 1.0
    also: tuple[tuple[str, str], ...] = ()
    edit: Edit | None = None
    anew: bool = False

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        return (self.site, self.function), *self.also

    @property
    def several(self) -> bool:
        """Whether it is at several lines: modules of all layers are called by one."""
        return any(site for site, _ in self.also)

    @property
    def sure(self) -> bool:
        """Whether it can hardly make good what another line does wrong; of collectives several are
        changed where they have one group."""
        edited = self.edit is None or self.edit.sure
        one = not self.several or self.way in OF_COLLECTIVES
        return edited and one and self.way not in ("skip", "detach")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """tier, step: that failed. bounds: by how much each parameter's gradient may be off, by
    STEP/NAME, of that step and those before it. seconds: for all changes together. lift: whether
    the step had casts that were lifted, or drew numbers, as it would not without."""

    tier: str
    step: int
    changes: tuple[Change, ...]
    bounds: Mapping[str, float]
    seconds: float
    lift: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Values:
    """wanted: whole gradients by STEP/NAME, as they must come out. before: rank -> name -> what it
    had when the step failed; a step that gives another now tells nothing."""

    wanted: Grads
    before: Mapping[int, Grads]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """right: whether every gradient of every rank was. avoids: functions of the user's, `PATH:10
    NAME`, that the step runs as it is on some rank, and so changed on no such rank any more."""

    change: Change
    right: bool
    avoids: tuple[str, ...] = ()


def edited_source(source: str, edit: Edit) -> str:
    """ValueError where what is to be replaced does not stand there."""
    lines = source.encode().splitlines(keepends=True)
    (first, column), (last, end) = edit.start, edit.end
    before = b"".join(lines[: first - 1]) + lines[first - 1][:column]
    after = lines[last - 1][end:] + b"".join(lines[last:])
    piece = b"".join(lines)[len(before) : len(b"".join(lines)) - len(after)]
    if piece.decode() != edit.old:
        raise ValueError(f"line {first} of {edit.file} does not have {edit.old!r}")
    return before.decode() + edit.new + after.decode()


def write_asked(folder: Path, asked: Asked, values: Values) -> None:
    """What the ranks are to try, and what must come out."""
    parts = {WANTED: values.wanted, **{str(r): held for r, held in values.before.items()}}
    write_tensors(
        folder / VALUES, {f"{of}/{n}": g for of, grads in parts.items() for n, g in grads.items()}
    )
    write_json(folder / ASKED, asdict(asked))


def read_asked(folder: Path) -> tuple[Asked, Values]:
    said = read_json(folder / ASKED)
    asked = Asked(
        tier=said["tier"],
        step=int(said["step"]),
        changes=tuple(map(_change_from, said["changes"])),
        bounds=said["bounds"],
        seconds=float(said["seconds"]),
        lift=bool(said["lift"]),
    )
    parts: dict[str, Grads] = {}
    for key, grad in read_tensors(folder / VALUES):
        of, _, name = key.partition("/")
        parts.setdefault(of, {})[name] = grad
    wanted = parts.pop(WANTED, {})
    return asked, Values(wanted=wanted, before={int(rank): held for rank, held in parts.items()})


def add_trial(folder: Path, made: Trial) -> None:
    """Write one that was made, behind those before it."""
    with (folder / MADE).open("a") as file:
        file.write(json.dumps(asdict(made)) + "\n")


def finish_trials(folder: Path) -> None:
    """What was written so far is all of these ranks; of ranks before them there may be more."""
    with contextlib.suppress(FileNotFoundError):
        made = (folder / MADE).read_text().splitlines(keepends=True)
        with (folder / FOUND).open("a") as file:
            file.writelines(line for line in made if line.endswith("\n"))  # as whoever is killed
        (folder / MADE).unlink()


def read_trials(directory: Path) -> tuple[Trial, ...]:
    """Of a run; nothing where none were made, or they are damaged."""
    try:
        lines = (directory / TRIALS / FOUND).read_text().splitlines()
        return tuple(_trial_from(json.loads(line)) for line in lines)
    except DAMAGED:
        return ()


def _trial_from(said: Mapping[str, Any]) -> Trial:
    avoids = tuple(map(str, said.get("avoids", ())))
    return Trial(change=_change_from(said["change"]), right=bool(said["right"]), avoids=avoids)


def _change_from(said: Mapping[str, Any]) -> Change:
    also = tuple((site, function) for site, function in said["also"])
    edit = said.get("edit")
    if edit is not None:
        edit = Edit(**{**edit, "start": tuple(edit["start"]), "end": tuple(edit["end"])})
    return Change(**{**said, "ats": tuple(said["ats"]), "also": also, "edit": edit})
