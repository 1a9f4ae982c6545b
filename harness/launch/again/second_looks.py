"""What is run once more after a check of a user's own step, to say more about its verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sumgrad.base.errors import UserError
from sumgrad.base.verdict import Verdict
from sumgrad.launch.again.one_rank import Again, OnOneRank
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.guard import LOST_ANOTHER
from sumgrad.launch.judging import with_second_look, written
from sumgrad.record.spec import read_spec

DISTRIBUTION = "on one rank the step agrees with loss_sum: the fault is in the distribution"


def with_second_looks(
    options: CheckOptions, verdict: Verdict, directory: Path, *, alone: OnOneRank, again: Again
) -> Verdict:
    """The verdict of an opaque run, and what other runs of it show, as warnings. alone: the same
    on one rank. again: a check."""
    spec = read_spec(directory)
    texts = []
    if verdict.status == "fail":
        texts.append(_on_one_rank(alone))
        if texts[-1] == DISTRIBUTION and any("non-additive" in w for w in verdict.warnings):
            texts[-1] = (
                "on one rank the step agrees with loss_sum, whose rows do not add up: the fault is "
                "in the distribution, or loss_sum does not return a SUM"
            )
    raised = any(
        o["status"] == "raised" and o["detail"] != LOST_ANOTHER for o in verdict.data["outcomes"]
    )
    if spec.lift and (raised or (spec.facts and spec.facts.float64)):
        texts.append(_without_lift(options, verdict, directory, again))
    found = [text for text in texts if text]
    if not found:
        return verdict
    return written(directory, with_second_look(directory, verdict, found))


def _on_one_rank(alone: OnOneRank) -> str | None:
    """Whether the same step already fails where there is nothing to distribute."""
    ended = alone.ended
    if ended is None:
        return None
    if ended.agrees:
        return DISTRIBUTION
    if ended.fails:
        causes = ended.verdict.diagnoses
        cause = causes[0].cause if causes else "see one_rank/run"
        return f"step and loss_sum disagree even on one rank, with nothing distributed: {cause}"
    raised = [o["detail"] for o in ended.verdict.data["outcomes"] if o["status"] == "raised"]
    if raised:
        return f"whether it is right on one rank is not known: there it raises {raised[0]}"
    return None


def _without_lift(
    options: CheckOptions, verdict: Verdict, directory: Path, again: Again
) -> str | None:
    """Whether a step that raises where its casts are lifted runs as it is."""
    place = directory / "no_lift"
    try:
        plain, _ = again(replace(options, lift=False, out=place), "the same without lifting casts")
    except UserError:
        return None
    skipped = read_spec(directory).skipped.keys() - read_spec(place).skipped.keys()
    ended = {o["rank"] for o in plain.data["outcomes"] if o["status"] == "ok"}
    raised = {o["rank"] for o in verdict.data["outcomes"] if o["status"] == "raised"}
    if not skipped and not (raised and ended >= raised):
        return None
    return (
        f"this raises only where its casts are lifted to float64; as it is written it runs, and "
        f"the verdict is {plain.status.upper()}: see {place}, or use --no-lift"
    )
