"""What the bitwise tier holds against each other: tensors by name, on ranks and in one process.

Names are KIND/..., the kinds in the order in which a step makes them; those of ROWS hold a row of
the batch in each of their first dimension's elements, a rank its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sumgrad.base.files import read_json, write_json
from sumgrad.record.reference import Grads, read_tensors, write_tensors

BITS = "bitwise"  # the tier's name; on ranks, in place of one, what they hold
KINDS = ("quantity", "statistic", "cotangent", "root", "gradient", "norm", "clip")
ROWS = ("quantity", "cotangent")


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleBits:
    """What one process has at one step. problems: why it cannot be relied on."""

    tensors: Grads
    problems: tuple[str, ...]


def kind_of(name: str) -> str:
    """What sort of number a name is of."""
    return name.partition("/")[0]


def bits_files(step: int) -> tuple[str, str]:
    """Names of the files of one step."""
    return f"reference_{BITS}_{step}.json", f"reference_{BITS}_{step}.safetensors"


def write_bits(directory: Path, step: int, tensors: Grads, problems: Sequence[str]) -> None:
    """Write what one process has at one step."""
    said, held = bits_files(step)
    write_tensors(directory / held, tensors)
    write_json(directory / said, {"problems": list(problems)})


def read_bits(directory: Path, step: int) -> SingleBits:
    """Read it. FileNotFoundError, or one of spec.DAMAGED."""
    said, held = bits_files(step)
    problems: Mapping[str, list[str]] = read_json(directory / said)
    return SingleBits(
        tensors=dict(read_tensors(directory / held)),
        problems=tuple(str(text) for text in problems["problems"]),
    )
