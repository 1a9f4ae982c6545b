"""What a failing step is to be run again with, where its cause is not proved.

In: a judged record with the traces of the failing step. Out: the changes, and what must come out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from sumgrad.base.files import is_librarys
from sumgrad.base.verdict import Diagnosis, Verdict
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import known_lines
from sumgrad.diagnose.explainers.by_modules.rows.rows_used import ROWS_ARE_TOLD
from sumgrad.diagnose.modules.trying.changes import changes_of
from sumgrad.diagnose.modules.trying.edits.order import (
    edits_to_try,
    feeding_what_is_named,
    function_at,
    suspicion_of,
)
from sumgrad.diagnose.names import axis_groups
from sumgrad.judge.cells import expected
from sumgrad.ledger.operations import POINT_TO_POINT
from sumgrad.record.directory import Record
from sumgrad.record.trial import Asked, Change, Values

# Causes that say what became of a gradient, and not where in the code.
WITHOUT_A_PLACE = ("skipped_collective", "late_gradient", "other_parts", "too_few_ranks", "factor",
                   "row_factors", "param_factors", "rank_scale", "avg", "lost_rows",
                   "held_elsewhere", "double_reduction", "loss_weights",
                   "given_to_others", "run_to_run", "rows_read")  # fmt: skip
MOST_S = 8.0
MOST_ELEMENTS = 1 << 20  # of the parameters: of a larger model no step is run so often


def is_to_be_tried(verdict: Verdict) -> bool:
    """Whether the first cause is not proved, there is none, or it says no place in the code."""
    first = verdict.diagnoses[0] if verdict.diagnoses else None
    known = first is not None and first.standing == "proved" and _says_where(first)
    return verdict.status == "fail" and not known


def _says_where(cause: Diagnosis) -> bool:
    told = any(line.startswith(ROWS_ARE_TOLD) for line in cause.because)
    return told or cause.kind not in WITHOUT_A_PLACE


def are_only_edits(verdict: Verdict) -> bool:
    """Whether the first cause is proved, so that edits of the code alone say more."""
    return verdict.diagnoses[:1] != () and verdict.diagnoses[0].standing == "proved"


def said_of(verdict: Verdict) -> str:
    """The first cause, and what is said beside it."""
    return "\n".join(line for d in verdict.diagnoses[:1] for line in (d.cause, *d.because))


def changes_to_try(
    record: Record, tier: str, step: int, *, seconds: float, said: str = ""
) -> tuple[Asked, Values] | None:
    """The changes, and the gradients that there were and must be. None where there is nothing that
    can be tried, as over several pools, whose ranks run other code. seconds: for all of them. said:
    of the cause."""
    case = Case(record=record, tier=tier, step=step)
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None or not _can_be_tried(case):
        return None
    pool = record.spec.topology.pools[0]
    axes = {name if name in dict(pool.axes) else "": groups for name, groups in axis_groups(case)
            if name in (*dict(pool.axes), pool.name)}  # fmt: skip
    events = {rank: held.events.get((tier, step), ()) for rank, held in record.ranks.items()}
    changes = changes_of(
        lines, axes, _pairs(record, tier, step), traces.single.classes, events, said
    )
    return _asked(case, changes, min(seconds, MOST_S))


def edited_to_try(
    record: Record,
    tier: str,
    step: int,
    *,
    seconds: float,
    said: str = "",
    set_up: bool = False,
    alone: bool = False,
) -> tuple[Asked, Values] | None:
    """Small edits of the user's code, in the same way. set_up: of what runs while the Program is
    distributed, and not in its step, instead. alone: the cause is proved."""
    case = Case(record=record, tier=tier, step=step)
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None or not _can_be_tried(case):
        return None
    names: dict[str, dict[str, str]] = {}
    stepped = {f for trace in traces.ranks.values() for f in trace.computed.names}
    for trace in traces.ranks.values():
        held_there = trace.computed.set_up if set_up else trace.computed.names
        for function, held in held_there.items():
            if not (set_up and function in stepped):
                names.setdefault(function, {}).update(held)
    files = {function_at(function)[0] for function in names}
    texts = {}
    for file in files:
        if not is_librarys(file):
            with contextlib.suppress(OSError, ValueError):
                texts[file] = Path(file).read_text()
    axes = [name for name, _ in record.spec.topology.pools[0].axes]
    single = {*traces.single.computed.names}
    feeding = feeding_what_is_named(lines, said)
    # What the ranks of an axis have together is no part of how a model is set up, nor of what is
    # lost behind right gradients.
    edits = edits_to_try(
        texts,
        dict(reversed(names.items())) if set_up else names,  # the outermost first
        single,
        axes,
        said,
        suspicion_of(lines),
        feeding,
        taken=lambda edit: not edit.over or not (alone or (set_up and not edit.before)),
    )
    changes = [
        Change(site=f"{edit.file}:{edit.start[0]}", function="", way="edit", edit=edit, anew=set_up)
        for edit in edits
    ]
    return _asked(case, changes, seconds)


def asked_again(
    record: Record, tier: str, step: int, changes: Sequence[Change], *, seconds: float
) -> tuple[Asked, Values] | None:
    """Changes that made the same step right elsewhere, in the same way."""
    case = Case(record=record, tier=tier, step=step)
    return _asked(case, changes, seconds) if _can_be_tried(case) else None


def _can_be_tried(case: Case) -> bool:
    record, size = case.record, sum(grad.numel() for grad in case.reference.grads.values())
    return (
        len(record.spec.topology.pools) == 1
        and size <= MOST_ELEMENTS
        and record.spec.device == "cpu"
        and record.spec.fault is None  # it may count what the ranks issue
    )


def _asked(case: Case, changes: Sequence[Change], seconds: float) -> tuple[Asked, Values] | None:
    record, tier, step = case.record, case.tier, case.step
    before = {rank: held.grads.get((tier, step), {}) for rank, held in record.ranks.items()}
    if not changes or len(before) < record.spec.topology.world_size:
        return None
    pool = record.spec.topology.pools[0]
    wanted = {
        f"{at}/{name}": expected(record, record.references[tier][at], pool.name, name, tier)
        for at in range(step + 1)
        for name in case.reference.grads
    }
    asked = Asked(
        tier=tier,
        step=step,
        changes=tuple(changes),
        bounds={name: one.threshold for name, one in wanted.items()},
        seconds=seconds,
        lift=any(
            info.get("lifted") or info.get("drawn")
            for held in record.ranks.values()
            for (one, _), info in held.info.items()
            if one == tier
        ),
    )
    values = {name: one.value for name, one in wanted.items()}
    return asked, Values(wanted=values, before=before)


def _pairs(record: Record, tier: str, step: int) -> set[frozenset[int]]:
    """Ranks that send each other something in a step."""
    return {
        frozenset((rank, int(event["peer"])))
        for rank, held in record.ranks.items()
        for event in held.events.get((tier, step), ())
        if event["op"] in POINT_TO_POINT and event.get("peer") is not None
    }
