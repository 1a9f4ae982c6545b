"""Products of features with another's weights, in words."""

from __future__ import annotations

from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import line_and_code
from sumgrad.diagnose.modules.weights.weights_beside import Misplaced, misplaced_weights
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.computed import MODULE


def misplaced_in_words(case: Case, found: FirstWrong) -> list[str]:
    """Of each wrong rank the first product, where it is the same line's."""
    traces = case.traces
    if traces is None:
        return []
    try:
        every = [
            next(misplaced_weights(rank, traces.ranks[rank].computed, traces.single.computed), None)
            for rank in found.ranks
        ]
    except (RuntimeError, ValueError, LookupError):
        return []  # as in looked(): a cause is not lost by a hint
    told = [one for one in every if one is not None]
    same = [one for one in told if _where(one) == _where(told[0])]
    if not same:
        return []
    how = "; ".join(
        f"on rank {one.rank} features {spans(sorted(one.features))} stand beside columns "
        f"{spans(sorted(one.columns))} of {one.width}"
        if sorted(one.features) != sorted(one.columns)
        else f"on rank {one.rank} the same features and columns in another order"
        for one in same
    )
    return [f"{_where(same[0])} multiplies numbers with the weights of others, as they are in the "
            f"single process: {how}"]  # fmt: skip


def _where(one: Misplaced) -> str:
    if one.mine.function.startswith(MODULE):
        return one.mine.function.removeprefix(MODULE)
    return line_and_code(one.mine.line, one.mine.code)
