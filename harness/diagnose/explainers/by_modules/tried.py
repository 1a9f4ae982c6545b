"""What was changed in the failing step, and made every gradient of every rank right, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis, Standing
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.left_undone import without_what_is_left_undone
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.leading import PLACES
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    line_and_code,
    line_from_here,
    ordinal,
    unless_it_fails,
)
from sumgrad.diagnose.explanation import NOT_PROVED
from sumgrad.record.computed import MODULE, Computation
from sumgrad.record.trial import BEFORE, OF_COLLECTIVES, Change, Edit

# Those that tell most first: a sum in the forward is no mere factor.
WAYS = ("edit", "sum", "sum_both", "largest", "smallest", "whole_both", "whole", "first", "added",
        "once", "attach", *OF_COLLECTIVES, "sum_back", "detach", "skip", "number")  # fmt: skip
OF_THE_BACKWARD = ("attach", "sum_back", "detach", *OF_COLLECTIVES)
SAYS_WHERE = ("forward", "backward", "own_backward")  # kinds that what was tried may have, too
SAYS_HOW = ("loss_weights", "loss_at_tokens", "row_factors")  # which rows or tokens, and by what
AS_A_FACTOR = ("number", "averaged", "skip")
LACKS_A_SUM = ("avg", "unused_result")  # kinds that a sum of what is there makes good
SAYS_BY_WHAT = ("wrong_count",)  # of one factor on all gradients, which other things may make good
SUM_BEFORE = "sum_before"
MOST_OTHERS = 2
MOST_PLACES = 3


def with_what_was_tried(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that is not proved, behind what makes the step right. One that says by what leads
    where that is a factor, something less or an edit, and where it says the same."""
    found = _said(case)
    if found is None:
        return diagnosis
    first, said = found.change, found.lines
    if first.edit is not None and first.sure:
        diagnosis = replace(diagnosis, because=without_what_is_left_undone(diagnosis.because))
    if found.avoided and not diagnosis.cause.startswith("open: "):
        return replace(diagnosis, because=(*said, *diagnosis.because))
    if diagnosis.standing == "proved":  # it says what became of gradients; an edit, where
        is_edit = first.edit is not None
        return replace(diagnosis, because=(*said, *diagnosis.because)) if is_edit else diagnosis
    if diagnosis.kind in SAYS_BY_WHAT:
        return replace(diagnosis, because=(*diagnosis.because, *said))
    # An edit may go round what is wrong, as where all ranks do alike what one does otherwise, or
    # each takes other parts of the batch, which no ranks need to put together.
    may_go_round = first.way in AS_A_FACTOR or first.edit is not None
    is_unsure = first.edit is not None and not first.sure
    if (diagnosis.kind not in PLACES and may_go_round) or (
        diagnosis.kind in SAYS_HOW and is_unsure
    ):
        return replace(diagnosis, because=(*said, *diagnosis.because))
    if diagnosis.kind in LACKS_A_SUM and first.way in ("sum", "sum_both") and not first.several:
        return replace(diagnosis, because=(*diagnosis.because, *said), standing="proved")
    standing: Standing = "proved" if first.sure else "likely"
    cause = diagnosis.cause.removeprefix("open: ").replace(NOT_PROVED, "")
    because = (*said[1:], cause, *diagnosis.because)
    if diagnosis.kind in SAYS_WHERE:
        return replace(diagnosis, cause=said[0], because=because, standing=standing)
    kind = "backward" if first.way in OF_THE_BACKWARD else "forward"
    kind = "code" if first.edit is not None else kind
    return Diagnosis(cause=said[0], kind=kind, ranks=diagnosis.ranks, because=because,
                     however=diagnosis.however, standing=standing)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Right:
    """What made the step right. avoided: functions of the ranks' own that do not run then, in which
    what is wrong may be; lines: all of it in words."""

    change: Change
    avoided: Sequence[str]
    lines: Sequence[str]


@unless_it_fails
def _said(case: Case) -> _Right | None:
    trials, traces = case.record.trials, case.traces
    if traces is None:
        return None
    known: dict[Change, list[Found]] = {
        one.change: [at for at in found if at]
        for one in trials
        if one.right
        and (
            all(found := [_at(case, *place) for place in one.change.places])
            or one.change.way in OF_COLLECTIVES
            or one.change.edit is not None
        )
    }
    if not known:
        return None
    avoided = {one.change: _own_of_ranks(case, one.avoids) for one in trials if one.right}
    # One line before several, of which one may make good what another does wrong; of equals the
    # last: what is linear may stand before a sum, or after it.
    first, *others = sorted(
        known,
        key=lambda one: (
            bool(avoided[one]),
            one.edit is not None and not one.sure,
            one.several,
            WAYS.index(one.way),
            len(one.also),
            *(-at for at, _ in known[one][:1]),
        ),
    )
    line = _where(first, known[first][:1])
    more = [o for o in others if _where(o, known[o]) != line and not o.also]
    lines = [
        f"{_in_words(first, known[first])}, every gradient of every rank would be right: the step "
        f"was {'distributed and run' if first.anew else 'run'} so",
        *_not_run(avoided[first]),
        *(f"{_in_words(one, known[one])}, they would be, too" for one in more[:MOST_OTHERS]),
        f"of {len(trials)} such changes that were tried {sum(one.right for one in trials)} made "
        f"it right",
    ]
    return _Right(change=first, avoided=avoided[first], lines=lines)


def _own_of_ranks(case: Case, functions: Sequence[str]) -> list[str]:
    """Those that compute something, and that the single process does not run."""
    if not functions:
        return []
    assert case.traces is not None
    single = case.traces.single.computed.names
    computing = {name for trace in case.traces.ranks.values() for name in trace.computed.names}
    return [name for name in functions if name in computing and name not in single]


def _not_run(functions: Sequence[str]) -> list[str]:
    if not functions:
        return []
    words = [f"{name.rpartition('<locals>.')[2]} at {line_from_here(at)}"
             for at, _, name in (one.rpartition(" ") for one in functions)]  # fmt: skip
    verb = "is" if len(words) == 1 else "are"
    return [f"{some_of(words)} {verb} not run then, and what is wrong may be in there"]


Found = tuple[int, Computation]


def _at(case: Case, site: str, function: str) -> Found | None:
    """Where a rank's step has it last."""
    assert case.traces is not None
    for trace in case.traces.ranks.values():
        for place, c in reversed([*enumerate(trace.computed.computations)]):
            if (c.site, c.function) == (site, function):
                return place, c
    return None


def _in_words(change: Change, found: Sequence[Found]) -> str:
    where = _where(change, found)
    if change.edit is not None:
        return f"{where}: {_as_edited(change.edit)}"
    what = " and ".join(f"its {ordinal(at)} argument" for at in change.ats) or "what it gives"
    of = f"the gradient of {what}"
    over = f"over the ranks of {change.axis}" if change.axis else "over all ranks"
    ranks = over.removeprefix("over ")
    whole = (
        f"were it given not the own part of {what} but what {ranks} have together, gathered along "
        f"dimension {change.dim}, sizes with it, and the own part of the result taken"
    )
    told = {
        "sum": f"were {what} summed {over} in the forward",
        "sum_both": f"were {what} summed {over}, and its gradient, too",
        "largest": f"were {what} the largest {over}",
        "smallest": f"were {what} the smallest {over}",
        "whole": f"{whole}, each with the gradient of its own part alone",
        "whole_both": whole,
        "first": f"were {what} on each what the first of {ranks} has there",
        "added": "were it added to what is there, and not put in its place",
        "once": f"were {what}, which all ranks add, a part of it on each, so that a sum {over} "
        f"counts it once",
        "attach": "were it not detached",
        "sum_back": f"were {of} summed {over}",
        "detach": f"were {what} detached",
        "skip": "were it left out, and what it takes first handed on",
        "unsummed": "were it left out, and did each rank go on with its own",
        "averaged": "were it an average, not a sum",
        "over": f"were it {over}" if not change.also else f"were they {over}",
        "number": f"were {what} {fraction_of(change.by)} times what it is",
    }
    each = change.also and change.way not in OF_COLLECTIVES
    return f"{where}: {'at each of these, ' if each else ''}{told[change.way]}"


def _as_edited(edit: Edit) -> str:
    if edit.before:
        became = edit.becomes.replace(BEFORE, SUM_BEFORE)
        return (f"were it `{became}`, where {SUM_BEFORE} adds up "
                f"`{' '.join(edit.before.split())}` over the ranks of {edit.over} before this one"
               )  # fmt: skip
    if edit.over:
        return f"were `{' '.join(edit.old.split())}` summed over the ranks of {edit.over}"
    if edit.new.strip() == "pass":
        return "were it left out"
    return f"were it `{edit.becomes}`"


def _where(change: Change, found: Sequence[Found]) -> str:
    if change.edit is not None:
        return line_and_code(change.site, change.edit.was)
    if change.way in OF_COLLECTIVES:
        return " and ".join(f"the {function} at {site}" for site, function in change.places)
    places = [_place(c) for _, c in found]
    return ", and ".join(dict.fromkeys([*places[:MOST_PLACES], *places[-1:]]))


def _place(c: Computation) -> str:
    if not c.function.startswith(MODULE):
        return expression(c)
    name = c.function.removeprefix(MODULE)
    return f"the module {name}" if name else "the model itself"
