"""From which of a user's lines a module is called where it is wrong, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sumgrad.base.files import is_librarys
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.line import Line
from sumgrad.record.trace import LOSS


@as_a_hint
def called_from(case: Case, look: Look, found: FirstWrong, *, back: bool) -> list[str]:
    """The line that all wrong calls come from and no right one does; else, of what a library calls,
    the line outside of it."""
    what = found.wrong or "the model"
    if line := line_of_wrong_calls(case, look, found, back=back):
        right = "where a gradient that is not zero is right" if back else "that is right"
        return [f"all calls of {what} that are seen to be wrong come from {line_and_code(*line)}, "
                f"and none {right} does"]  # fmt: skip
    always = _in_all(case, found)
    own = [line for line in always if not _is_librarys(line)]
    if own and _is_librarys(_lines(case, found.seen[0])[0]):
        return [f"{what} is called from {line_and_code(*own[0])}"]
    return []


def line_of_wrong_calls(case: Case, look: Look, found: FirstWrong, *, back: bool) -> Line | None:
    """The line that all wrong calls come from and no right one does, rather not a library's."""
    calls = [s for s in look.seen[found.wrong] if not s.call.recomputed]
    right = [s for s in calls if _is_right(case, s, back=back)]
    others = {line for s in right for line in _lines(case, s)}
    telling = [line for line in _in_all(case, found) if line not in others]
    if not right or not telling:
        return None
    return next((own for own in telling if not _is_librarys(own)), telling[0])


@as_a_hint
def odd_calls_come_from(case: Case, odd: Sequence[Seen], others: Sequence[Seen]) -> list[str]:
    """`come from LINE`: rather not a library's, and of the others of their module half at most
    do."""
    if not odd or not others:
        return []
    every = [_lines(case, s) for s in odd]
    rest = [_lines(case, s) for s in others]
    shared = [line for line in every[0] if all(line in lines for lines in every)]
    telling = [n for n in shared if 2 * sum(n in lines for lines in rest) <= len(rest)]
    if not telling:
        return []
    line = next((own for own in telling if not _is_librarys(own)), telling[0])
    num = sum(line in lines for lines in rest)
    more = f"so do{'es' * (num == 1)} {num} of the {len(rest)} others" if num else "no others do"
    return [f"come from {line_and_code(*line)}, and {more}"]


def _in_all(case: Case, found: FirstWrong) -> list[Line]:
    """The lines that ran in every wrong call, the innermost first."""
    wrong = [_lines(case, s) for s in found.seen]
    return [line for line in wrong[0] if all(line in lines for lines in wrong)]


def without_modules_not_entered(case: Case, found: FirstWrong) -> FirstWrong:
    """Without those of `beside` that what is wrong is a part of, where no wrong call is made in
    their forward: what it gives there does not go into them."""
    traces = case.traces
    if traces is None:
        return found
    entered = {m for s in found.seen for m in traces.ranks[s.rank].stack(s.call).inside}
    apart = {m for m in found.modules if is_in(found.wrong, m) and m not in entered}
    left = tuple(m for m in found.beside if m not in apart)
    return found if not apart else replace(found, beside=left or (LOSS,))


def _is_right(case: Case, s: Seen, *, back: bool) -> bool:
    """Not of a gradient of zeros, which is right on whatever way it came."""
    traces = case.traces
    if traces is None or not back:
        return s.forward == "right" and s.in_order
    trace = traces.ranks[s.rank]
    # What terms gave is one call in a look: it has the place of its first, and their gradients.
    gradients = (
        g
        for call, g in zip(trace.calls, trace.gradients, strict=True)
        if (call.module, call.number, call.part) == (s.call.module, s.call.number, s.call.part)
    )
    gradient = next(gradients, None)
    return s.backward == "right" and gradient is not None and bool(gradient.any())


def _lines(case: Case, s: Seen) -> Sequence[Line]:
    traces = case.traces
    return () if traces is None else traces.ranks[s.rank].stack(s.call).lines


def _is_librarys(line: Line) -> bool:
    return is_librarys(line[0])
