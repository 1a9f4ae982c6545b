"""What the backward of a Function that communicates gave, beside its forward's derivative.

A collective forward is one function of what all its ranks hold, so it has one adjoint: what a
rank's argument is to get depends on what every rank's result was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sumgrad.base.files import read_json, write_json
from sumgrad.record.endings import rank_file
from sumgrad.record.line import Line
from sumgrad.record.spec import DAMAGED

FILE = "_adjoints.json"  # of a rank, in `trace/`


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjoint:
    """One call of a Function on some ranks, and one of its arguments.

    function, written: as of a Computation. line: that calls it; call: which of this line, from 0.
    argument: its name in the forward; leaf: whether it is one, as a parameter is. ranks: those that
    take part. holders: those of them that hold the same numbers as that argument, and are moved
    together along one direction after the other. slopes: (directions, ranks), by finite
    differences: what each rank's results were given, times their change. given: (directions,
    holders), what the backward gave each for the argument, times the direction. place: of the call
    among what the first holder computed, and at: which of its tensors it is; -1 where it is told of
    several.
    """

    function: str
    written: str
    line: Line
    call: int
    argument: str
    leaf: bool
    ranks: tuple[int, ...]
    holders: tuple[int, ...]
    slopes: tuple[tuple[float, ...], ...]
    given: tuple[tuple[float, ...], ...]
    place: int = -1
    at: int = -1


def write_adjoints(folder: Path, rank: int, found: Sequence[Adjoint]) -> None:
    """Write those that are a rank's to tell, as far as it got."""
    write_json(rank_file(folder, rank, FILE), [asdict(one) for one in found])


def read_adjoints(folder: Path, ranks: Iterable[int]) -> tuple[Adjoint, ...]:
    """Those of all ranks; nothing of one that has none, or damaged ones."""
    return tuple(one for rank in ranks for one in _of_rank(rank_file(folder, rank, FILE)))


def _of_rank(path: Path) -> tuple[Adjoint, ...]:
    try:
        return tuple(map(_adjoint_from, read_json(path)))
    except DAMAGED:
        return ()


def _adjoint_from(said: Mapping[str, Any]) -> Adjoint:
    line, code = said["line"]
    return Adjoint(
        **{
            **said,
            "line": (line, code),
            "ranks": tuple(said["ranks"]),
            "holders": tuple(said["holders"]),
            "slopes": tuple(map(tuple, said["slopes"])),
            "given": tuple(map(tuple, said["given"])),
        }
    )
