"""verdict.json as types: what a reader of it can rely on.

    verdict = read_verdict(Path(".sumgrad/runs/latest/verdict.json"))

Within one number of `schema` nothing is renamed or removed and no type changes; names are added, so
a reader leaves those alone that it does not know. verdict.schema.json beside this file is made from
it by `python -m sumgrad.report.schema`, for readers in other languages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sumgrad.base.errors import UserError

Status = Literal["pass", "fail", "unknown"]
Number = Annotated[float, Field(allow_inf_nan=False)] | Literal["nan", "inf", "-inf"]
FILE = Path(__file__).with_name("verdict.schema.json")


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class PoolPart(_Part):
    """A pool of the topology: its axes by name, and its global ranks."""

    role: str
    axes: dict[str, int]
    ranks: list[int]


class TopologyPart(_Part):
    """What ran: every pool."""

    name: str
    world_size: int
    pools: dict[str, PoolPart]


class TierPart(_Part):
    """One tier. worst_of_threshold: the worst error over threshold; above 1 it fails. reasons: why
    it is unknown. The bitwise tier has `elements` and `differing` in place of errors."""

    status: Status
    dtype: str | None = None
    worst_rel: Number | None = None
    worst_rel_same_dtype: Number | None = None
    worst_tensor: str | None = None
    worst_of_threshold: Number | None = None
    reasons: list[str] = []


class TensorPart(_Part):
    """One gradient on one rank at one step. max_rel: over the largest element of the reference;
    ratio: <got, reference> over <reference, reference>."""

    name: str
    rank: int
    pool: str
    tier: str
    step: int
    status: Status
    max_abs: Number | None
    max_rel: Number | None
    ratio: Number | None
    threshold: Number | None
    noise_floor: Number | None
    smallest_scale_error_caught: Number | None
    index: list[int] | None
    reason: str | None = None


class CoefficientPart(_Part):
    """How often a term was counted in some gradients of some ranks. rows: [first, end) or all."""

    params: str
    ranks: list[int]
    term: str
    producer: str
    rows: list[int] | None
    expected: str
    recovered: Number | None
    sigma: Number | None
    fraction: str | None
    identifiable: bool


class DiagnosisPart(_Part):
    """A cause. standing: proved, likely or open; older verdicts say none."""

    cause: str
    kind: str
    ranks: list[int]
    factor: str | None
    symbol: str | None
    because: list[str]
    also: list[str]
    however: list[str] = []
    standing: Literal["proved", "likely", "open"] | None = None


class OutcomePart(_Part):
    """How a rank ended."""

    rank: int
    pool: str
    status: str
    exit_code: int | None
    seconds: float | None
    detail: str | None


class TimelinePart(_Part):
    """What each rank issued last: rank -> [column, family, state, number of its text], where a
    verdict is no PASS. states: done, open, unlike its peers', unplanned."""

    columns: int
    columns_left_out: int
    ranks_left_out: int
    texts: list[str]
    rows: dict[str, list[list[int | str]]]


class VerdictFile(_Part):
    """All of it. findings: what fails besides tensors; warnings: what does not fail."""

    schema_: Literal[1] = Field(alias="schema")
    status: Status
    topology: TopologyPart
    workload: str
    fault: str | None
    seed: int
    steps: int
    tiers: dict[str, TierPart]
    tensors: list[TensorPart]
    coefficients: list[CoefficientPart]
    diagnoses: list[DiagnosisPart]
    findings: list[str]
    warnings: list[str]
    not_compared: list[str]
    outcomes: list[OutcomePart]
    reproduce: str
    versions: dict[str, str]
    timeline: TimelinePart | None = None


def read_verdict(path: Path) -> VerdictFile:
    """A verdict.json. Raises UserError where it is none, or of a later schema than this."""
    try:
        return VerdictFile.model_validate(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        where = ".".join(map(str, first["loc"])) + ": " + first["msg"] if first else str(error)
        raise UserError(f"{path}: no verdict.json that this version reads: {where}") from error


def json_schema() -> dict[str, Any]:
    """The same for other languages, as JSON Schema."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "verdict.json of sumgrad",
        **VerdictFile.model_json_schema(by_alias=True),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(json_schema(), indent=1) + "\n")
