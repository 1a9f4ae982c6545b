"""The ranks' losses beside that of the single process, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of, line_and_code
from sumgrad.diagnose.modules.in_code.options import OtherOption, other_options

SAME_LOSS = 1e-9
MOST_OPTIONS = 3


def losses_beside(case: Case) -> list[str]:
    """The ranks' losses beside that of the single process, where both are known."""
    traces = case.traces
    if traces is None or len(traces.single.losses) != 1:
        return []
    wanted = traces.single.losses[0]
    losses, of = _each_once([trace.losses for trace in traces.ranks.values()])
    got = sum(losses)
    ratio = got / wanted if wanted else 0.0
    if not ratio:
        return []
    times = round(ratio) if ratio > 0.5 else 1 / round(1 / ratio) if ratio > 0 else 0.0
    if times and abs(ratio / times - 1) < SAME_LOSS:
        up_to = "" if times == 1 else f", {fraction_of(times)} times"
        return [f"the losses that the ranks' backwards start from{of} add up to that of the single "
                f"process{up_to}: its value may be right, and its gradient is not"]  # fmt: skip
    ranks = ddp_divides_by(case)
    after = f"; divided by {ranks}, as DDP does, {ratio / ranks:.6g} times" if ranks else ""
    return [f"the losses that the ranks' backwards start from{of} add up to {got:.9g}, {ratio:.6g} "
            f"times that of the single process ({wanted:.9g}){after}"]  # fmt: skip


def ddp_divides_by(case: Case) -> int:
    """The number that DDP divides by on every rank; 0 where it is not one number, or no DDP is."""
    numbers = {rank.ddp for rank in case.record.ranks.values()}
    return numbers.pop() if len(numbers) == 1 else 0


def _each_once(losses: Sequence[tuple[float, ...]]) -> tuple[list[float], str]:
    """The losses of all ranks; of as many that are the same, as ranks of an axis have, one."""
    often = Counter(losses)
    times = set(often.values())
    if len(times) == 1 and max(times) > 1 and all(losses):
        return [x for own in often for x in own], f", each {max(times)} that are the same once,"
    return [x for own in losses for x in own], ""


def options_of_losses(case: Case) -> Iterator[str]:
    """Losses that ranks call with other options than the single process."""
    traces, found = case.traces, dict[tuple[str, str, str, str], list[int]]()
    for rank, trace in traces.ranks.items() if traces is not None else ():
        assert traces is not None
        for one in other_options(trace.computed, traces.single.computed):
            ranks = found.setdefault(_key(one), [])
            ranks += [] if rank in ranks else [rank]
    for (function, line, now, was), ranks in list(found.items())[:MOST_OPTIONS]:
        yield (f"{function} at {line} has {now} on rank {spans(ranks)}, and in the single process "
               f"{was} where that gets the same numbers as its first argument")  # fmt: skip


def _key(one: OtherOption) -> tuple[str, str, str, str]:
    line = line_and_code(one.mine.line, one.mine.code)
    return one.mine.function, line, one.now, one.was
