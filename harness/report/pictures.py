"""What a page draws of a verdict, as data: cells with their colour and what they say. No markup.

The heat map has a tensor in each row and ranks in the columns; ranks with the same column stand
together. The pools are drawn with every rank in the colour of how it ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sumgrad.base.outcome import spans
from sumgrad.report.terminal import axes_text, number, shows_factors

Data = Mapping[str, Any]
MOST_ROWS, MOST_COLUMNS = 60, 48
# Error over threshold -> level: a colour. Below 1 a tensor passes.
STEPS = (0.1, 0.5, 1.0, 10.0, 1e3, 1e6)
LEGEND = ("under 0.1", "to 0.5", "to 1", "to 10", "to 1,000", "to a million", "more")
UNKNOWN, NOTHING = "unknown", "nothing"
STATES = {
    "open": "begun, never done",
    "unlike": "its peers issue something else here",
    "unplanned": "the plan has something else here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """One square. level: `l0` to `l6` as in LEGEND, UNKNOWN or NOTHING."""

    level: str
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """One tier. columns: ranks in words; rows: a tensor with a square for each column.

    left_out: tensors that are not drawn, none of which is worse than those that are.
    """

    tier: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Square, ...]], ...]
    left_out: int

    @property
    def left(self) -> int:
        """Pixels that the names take."""
        return room_for([name[-38:] for name, _ in self.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPicture:
    """A pool: its name, its axes in words, and (rank, level, what it says) of each rank."""

    name: str
    axes: str
    ranks: tuple[tuple[int, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePicture:
    """Operations of ranks side by side. rows: rank, and (column, letter, level, what it says) of
    each; level: `step-` and its state. letters: what each stands for."""

    columns: int
    rows: tuple[tuple[str, tuple[tuple[int, str, str, str], ...]], ...]
    letters: tuple[tuple[str, str], ...]
    columns_left_out: int
    ranks_left_out: int


LETTERS = {
    "allreduce": "R", "reduce_scatter": "S", "all_gather": "G", "all_to_all": "A", "barrier": "B",
    "broadcast": "C", "reduce": "r", "gather": "g", "scatter": "s", "send": ">", "recv": "<",
}  # fmt: skip


def timeline_picture(data: Data) -> TimelinePicture | None:
    """What each rank issued last, where the verdict has it."""
    line = data.get("timeline")
    if not line or not line["columns"]:
        return None
    rows = tuple(
        (
            f"rank {rank}",
            tuple(
                (column, LETTERS.get(family, "?"), f"step-{state}",
                 line["texts"][text] + ("" if state == "done" else f" ({STATES[state]})"))
                for column, family, state, text in row
            ),
        )
        for rank, row in line["rows"].items()
    )  # fmt: skip
    seen = dict.fromkeys(cell[1] for row in line["rows"].values() for cell in row)
    return TimelinePicture(
        columns=line["columns"],
        rows=rows,
        letters=tuple((LETTERS.get(family, "?"), family.replace("_", "-")) for family in seen),
        columns_left_out=line["columns_left_out"],
        ranks_left_out=line["ranks_left_out"],
    )


def room_for(names: Iterable[str]) -> int:
    """Pixels that some names take beside a picture."""
    return 14 + 7 * max(map(len, names), default=0)


def heat_maps(data: Data) -> list[HeatMap]:
    """One for each tier with tensors."""
    out = []
    for tier in data["tiers"]:
        worst = _worst(data, tier)
        if not worst:
            continue
        names = list(dict.fromkeys(name for name, _ in worst))
        ranks = sorted({rank for _, rank in worst})
        by_rank = {rank: tuple(worst.get((name, rank)) for name in names) for rank in ranks}
        columns: dict[tuple[str, ...], list[int]] = {}
        for rank in ranks:
            key = tuple(_level(t) for t in by_rank[rank])
            columns.setdefault(key, []).append(rank)
        groups = list(columns.values())[:MOST_COLUMNS]
        shown = sorted(range(len(names)), key=lambda i: -_height(worst, names[i], ranks))[
            :MOST_ROWS
        ]
        rows = tuple(
            (names[i], tuple(_square(names[i], group, by_rank, i) for group in groups))
            for i in sorted(shown)
        )
        out.append(
            HeatMap(
                tier=tier,
                columns=tuple(spans(group) for group in groups),
                rows=rows,
                left_out=len(names) - len(shown),
            )
        )
    return out


def pool_pictures(data: Data) -> list[PoolPicture]:
    """Every pool, in the order of the topology."""
    ended = {o["rank"]: o for o in data["outcomes"]}
    failing = {t["rank"]: t["status"] for t in sorted(data["tensors"], key=_order)
               if t["status"] != "pass"}  # fmt: skip
    out = []
    for name, pool in data["topology"]["pools"].items():
        ranks = []
        for rank in pool["ranks"]:
            status = ended.get(rank, {}).get("status", "missing")
            if status != "ok":
                ranks.append((rank, "fail", f"rank {rank}: {status}"))
            elif rank in failing:
                ranks.append((rank, failing[rank], f"rank {rank}: {failing[rank].upper()}"))
            else:
                ranks.append((rank, "pass", f"rank {rank}: every gradient is right"))
        out.append(PoolPicture(name=name, axes=axes_text(pool["axes"]), ranks=tuple(ranks)))
    return out


def answer(data: Data) -> list[str]:
    """The verdict in two sentences: what is so, and how much was seen."""
    tensors = data["tensors"]
    wrong = [t for t in tensors if t["status"] == "fail"]
    compared = (
        f"{len(tensors):,} gradients of {data['topology']['world_size']} ranks were compared with "
        f"one process"
    )
    if data["status"] == "pass":
        power = [t["smallest_scale_error_caught"] for t in tensors if shows_factors(t)]
        seen = f"; a factor that is off by {max(power):.1e} would have been seen" if power else ""
        return [f"Every gradient is right: {compared}, tensor by tensor{seen}."]
    if data["status"] == "unknown":
        reasons = [
            *data["not_compared"],
            *(r for t in data["tiers"].values() for r in t["reasons"]),
        ]
        if not reasons:
            return ["Not everything could be compared."]
        return [f"Not known: {reasons[0].rstrip('.')}."]
    first = data["diagnoses"][0]["cause"] if data["diagnoses"] else next(iter(data["findings"]), "")
    begin = first.split()[0].rstrip(",") if first else ""
    is_name = begin in {t["name"] for t in tensors} or not begin.isalpha()  # or of a file
    if not is_name:
        first = f"{first[:1].upper()}{first[1:]}"
    text = f"{first.rstrip('.')}." if first else "Some gradients are wrong."
    if not wrong:
        return [text]
    ranks = sorted({t["rank"] for t in wrong})
    steps = min(t["step"] for t in wrong)
    return [
        text,
        f"{len(wrong):,} of {len(tensors):,} gradients are wrong, from step {steps} on, on rank "
        f"{spans(ranks)}.",
    ]


def _order(tensor: Data) -> bool:
    return bool(tensor["status"] == "fail")


def _worst(data: Data, tier: str) -> dict[tuple[str, int], Data]:
    """Of each tensor and rank the step with the largest error."""
    out: dict[tuple[str, int], Data] = {}
    for t in data["tensors"]:
        at = (t["name"], t["rank"])
        if t["tier"] == tier and (at not in out or _times(t) > _times(out[at])):
            out[at] = t
    return out


def _times(tensor: Data) -> float:
    """Error over threshold; what cannot be compared is the worst."""
    error, threshold = tensor["max_abs"], tensor["threshold"]
    if tensor["status"] == "unknown":
        return 1.0
    if not isinstance(error, int | float) or not isinstance(threshold, int | float):
        return math.inf if tensor["status"] == "fail" else 0.0
    return float(error) / float(threshold) if threshold else (math.inf if error else 0.0)


def _level(tensor: Data | None) -> str:
    if tensor is None:
        return NOTHING
    if tensor["status"] == "unknown":
        return UNKNOWN
    times = _times(tensor)
    level = sum(times > step for step in STEPS)
    if tensor["status"] == "fail":
        level = max(level, 3)
    return f"l{level}"


def _height(worst: Mapping[tuple[str, int], Data], name: str, ranks: Sequence[int]) -> float:
    return max((_times(worst[name, r]) for r in ranks if (name, r) in worst), default=0.0)


def _square(
    name: str, ranks: Sequence[int], by_rank: Mapping[int, Sequence[Data | None]], i: int
) -> Square:
    held = [t for rank in ranks if (t := by_rank[rank][i]) is not None]
    if not held:
        return Square(level=NOTHING, says=f"{name}: not on rank {spans(list(ranks))}")
    worst = max(held, key=_times)
    times = _times(worst)
    far = f"{number(times)} of the threshold" if math.isfinite(times) else "not comparable"
    return Square(
        level=_level(worst),
        says=f"{name} on rank {spans(list(ranks))}: {worst['status'].upper()}, {far}, step "
        f"{worst['step']}",
    )
