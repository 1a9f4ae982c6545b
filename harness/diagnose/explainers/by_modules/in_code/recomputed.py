"""What a checkpoint, torch's or one by hand, computes again in the backward."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.run_again import how_it_ran_otherwise
from sumgrad.diagnose.explainers.by_modules.looked import gone_into, looked, named, traces_looked_at
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.how_wrong.elsewhere import numbers_elsewhere
from sumgrad.diagnose.modules.in_code.run_again import close
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong, first_wrong_recomputed
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import Call, Trace


def recomputed_otherwise(case: Case, left: Left) -> Iterator[Explanation]:
    """An output that is right in the forward, and another when a checkpoint computes it again."""
    look = looked(case)
    found = None if look is None else first_wrong_recomputed(look)
    if look is None or found is None:
        return
    by_hand = [s for s in found.seen if not s.call.recomputed]
    if not by_hand and (instead := in_place_of_others(look, found)):
        yield explained(case, instead)
        return
    text = f"{named(look, found.wrong)} gives something else when it is computed again"
    text += "" if by_hand else " in the backward"
    first = "in the forward its output is the single process's"
    if by_hand:
        rank = by_hand[0].rank
        numbers = sorted({s.call.number for s in by_hand if s.rank == rank})
        which = f"call{'s'[: len(numbers) > 1]} {spans(numbers)}"
        first += f", without a gradient; with one, in {which} on rank {rank}, it is another"
    how = how_it_ran_otherwise(case, look, found.wrong, found.ranks)
    yield explained(
        case,
        Diagnosis(
            cause=f"{text}, on rank {spans(found.ranks)}: what a checkpoint recomputes is not what "
            f"the forward was",
            kind="recomputed",
            ranks=found.ranks,
            because=(first, *(how or _goes_in_again(case, found))),
        ),
    )


def in_place_of_others(look: Look, found: FirstWrong) -> Diagnosis | None:
    """Where it runs again as much too often as the same of other layers does not, that ran in the
    forward, on every wrong rank: the function that a checkpoint runs again refers to another module
    by then."""
    every = {rank: _lacks(look, found.wrong, rank) for rank in found.ranks}
    rank, others = found.ranks[0], every[found.ranks[0]]
    if not others or any(own != others for own in every.values()):
        return None
    first, again = _runs(look, found.wrong, rank)
    return Diagnosis(
        cause=f"{named(look, found.wrong)} is computed again in the backward in place of "
        f"{some_of(others)}, on rank {spans(found.ranks)}",
        kind="recomputed",
        ranks=found.ranks,
        because=(
            f"on rank {rank} it runs {again} times in the backward, and in the forward {first}; "
            f"{some_of(others)} ran there and {'are' if others[1:] else 'is'} not computed again",
            "look at what the checkpointed function refers to when it runs again, as the variable "
            "of a loop that has gone on",
        ),
    )


def _lacks(look: Look, module: str, rank: int) -> list[str]:
    """Those of other layers in place of which it runs again on a rank; none where it does not."""
    often = {m: _runs(look, m, rank) for m in look.modules}
    first, again = often[module]
    others = [m for m in look.modules if m != module and _alike(m, module)
              and often[m][0] and not often[m][1] and _is_reached(look, m, rank)]  # fmt: skip
    return others if again > first and again - first == sum(often[m][0] for m in others) else []


def _alike(one: str, other: str) -> bool:
    """Whether two modules have the same name but for numbers, as those of two layers."""
    return re.sub(r"\d+", "0", one) == re.sub(r"\d+", "0", other)


def _runs(look: Look, module: str, rank: int) -> tuple[int, int]:
    """How often it ran on a rank: in the forward, and again."""
    calls = {(s.call.number, s.call.recomputed) for s in look.seen[module] if s.rank == rank}
    again = sum(recomputed for _, recomputed in calls)
    return len(calls) - again, again


def _is_reached(look: Look, module: str, rank: int) -> bool:
    return any(s.call.operation_back is not None for s in look.seen[module] if s.rank == rank)


def _goes_in_again(case: Case, found: FirstWrong) -> list[str]:
    """Whether what goes into it the second time is another already."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    calls = {(s.rank, s.call.number) for s in found.seen}
    into = [s for s in gone_into(case, found.wrong) if (s.rank, s.call.number) in calls]
    if traces is None or not into:
        return []
    wrong = [s for s in into if s.forward == "wrong"]
    if wrong:
        text = f"what goes into {found.wrong} then is another already"
        if numbers_elsewhere(traces, wrong, dtype):
            text += ", its numbers in other places: look at what is kept and how it is put together"
        return [text]
    if any(s.forward != "right" for s in into):
        return []
    other = [s for s in into if not _went_in_before(traces.ranks[s.rank], s.rank, s.call, calls)]
    if not other:
        return ["what goes into it then is the same"]
    return [f"all that goes into it then is found in what goes into it in the single process, and "
            f"on rank {spans(sorted({s.rank for s in other}))} it is not what went into it before: "
            f"look at what is kept, or gathered, for the second time"]  # fmt: skip


def _went_in_before(trace: Trace, rank: int, again: Call, calls: set[tuple[int, int]]) -> bool:
    """Whether the same went into another call of it, that is none of `calls`: (rank, number)."""
    mine = trace.outputs[trace.calls.index(again)]
    return any(
        call.module == again.module
        and call.part == again.part
        and (rank, call.number) not in calls
        and close(mine, output)
        for call, output in zip(trace.calls, trace.outputs, strict=True)
    )


def is_computed_again(look: Look, found: FirstWrong) -> bool:
    """Whether a wrong rank computes it once more in the backward."""
    return any(s.call.recomputed for s in look.seen[found.wrong] if s.rank in found.ranks)


def without_a_first_graph(look: Look, found: FirstWrong) -> list[str]:
    """Where the first pass of what is computed again gets no gradient at all, as none does that a
    reentrant checkpoint runs: what is taken out of it beside the checkpoint's result is lost."""
    rank = found.ranks[0]
    mine = [s for s in look.seen[found.wrong] if s.rank == rank]
    again = sorted({s.call.number for s in mine if s.call.recomputed})
    first = [s for s in mine if not s.call.recomputed]
    if not again or not first or any(s.call.operation_back is not None for s in first):
        return []
    return [f"on rank {rank} it is computed again in the backward (call {spans(again)}), and no "
            f"gradient reaches what it gave before that: a reentrant checkpoint has no graph of "
            f"its first pass, so what is taken from there other than by what the checkpoint gives, "
            f"as through a cache or a list, is cut off"]  # fmt: skip
