"""What a failing step is to be run again with, where its cause is not proved.

In: a judged record with the traces of the failing step. Out: the changes, and what must come out.
"""

from __future__ import annotations

from sumgrad.base.tensors import hash_weights
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.leading import PLACES
from sumgrad.diagnose.explainers.by_modules.lines import known_lines
from sumgrad.diagnose.modules.changes import changes_of
from sumgrad.diagnose.names import axis_groups
from sumgrad.judge.cells import expected
from sumgrad.ledger.operations import POINT_TO_POINT
from sumgrad.record.directory import Record
from sumgrad.record.reference import Grads
from sumgrad.record.trial import Asked

MOST_S = 8.0
MOST_ELEMENTS = 1 << 20  # of the parameters: of a larger model no step is run so often


def is_to_be_tried(verdict: Verdict) -> bool:
    """Whether the first cause says no more than where it goes wrong, or is none."""
    first = verdict.diagnoses[0] if verdict.diagnoses else None
    return verdict.status == "fail" and (
        first is None or (first.kind in PLACES and first.standing != "proved")
    )


def changes_to_try(
    record: Record, tier: str, step: int, *, seconds: float
) -> tuple[Asked, Grads] | None:
    """The changes, and whole gradients by name. None where there is nothing that can be tried, as
    over several pools, whose ranks run other code. seconds: for all of them."""
    case = Case(record=record, tier=tier, step=step)
    pools, reference = record.spec.topology.pools, case.reference
    lines = known_lines(case)
    size = sum(grad.numel() for grad in reference.grads.values())
    if lines is None or len(pools) > 1 or size > MOST_ELEMENTS or record.spec.device != "cpu":
        return None
    if record.spec.fault is not None:
        return None  # it may count what the ranks issue
    pool = pools[0]
    axes = {name if name in dict(pool.axes) else "": groups for name, groups in axis_groups(case)
            if name in (*dict(pool.axes), pool.name)}  # fmt: skip
    changes = changes_of(lines, axes, _pairs(record, tier, step))
    before = {rank: hash_weights(held.grads.get((tier, step), {}))
              for rank, held in record.ranks.items()}  # fmt: skip
    if not changes or len(before) < record.spec.topology.world_size:
        return None
    wanted = {
        f"{at}/{name}": expected(record, record.references[tier][at], pool.name, name, tier)
        for at in range(step + 1)
        for name in reference.grads
    }
    asked = Asked(
        tier=tier,
        step=step,
        changes=tuple(changes),
        bounds={name: one.threshold for name, one in wanted.items()},
        before=before,
        seconds=min(seconds, MOST_S),
        lift=any(
            info.get("lifted")
            for held in record.ranks.values()
            for (one, _), info in held.info.items()
            if one == tier
        ),
    )
    return asked, {name: one.value for name, one in wanted.items()}


def _pairs(record: Record, tier: str, step: int) -> set[frozenset[int]]:
    """Ranks that send each other something in a step."""
    return {
        frozenset((rank, int(event["peer"])))
        for rank, held in record.ranks.items()
        for event in held.events.get((tier, step), ())
        if event["op"] in POINT_TO_POINT and event.get("peer") is not None
    }
