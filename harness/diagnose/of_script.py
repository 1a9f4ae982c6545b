"""Causes that a script's own record names: other rows, another start, a wrong optimizer's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import case_of
from sumgrad.diagnose.fit import as_fraction
from sumgrad.judge.checks.rescaled import hidden_factors
from sumgrad.judge.checks.script import (
    OtherRows,
    changed_between,
    left_behind,
    other_rows,
    ranks_that_step_less,
    unowned,
)
from sumgrad.judge.checks.script_starts import (
    are_made_equal,
    left_by_all,
    unlike_shards,
    unlike_starts,
)
from sumgrad.judge.checks.updates import wrong_updates
from sumgrad.judge.finding import Compared
from sumgrad.record.directory import Record


def other_than_the_single_run(compared: Compared) -> Iterator[Diagnosis]:
    """What makes everything that comes after it unlike the single run; the first alone."""
    if compared.record.spec.script is None:
        return
    for cause in IN_ORDER:
        found = cause(compared)
        if found is not None:
            yield found
            return


def _other_rows(compared: Compared) -> Diagnosis | None:
    record = compared.record
    rows = [other for tier in record.spec.tiers for other in other_rows(record, tier)]
    if not rows or all(d.status != "fail" for d in compared.diffs):
        return None
    first = min(rows, key=lambda other: other.step)
    late = ranks_that_step_less(record)
    told = which_rows(first)
    if first.foreign and first.foreign.keys() <= {r for ranks in late.values() for r in ranks}:
        # What it reads before its own step are rows of several of the single run's.
        told = f"rank {spans(list(first.foreign))} leaves out optimizer steps: {told}"
    return Diagnosis(
        cause=told,
        kind="other_rows",
        standing="likely",
        ranks=tuple(sorted(first.by_rank)),
        because=(first.text, *_apart(record)),
    )


def _apart(record: Record) -> list[str]:
    """Ranks that never spoke to each other, in words."""
    if len(record.started) < len(record.ranks) or any(record.started.values()):
        return []
    return [
        f"no rank issued a collective: these are {len(record.ranks)} runs of one process each, as "
        f"when no process group is made (accelerate on CPUs wants ACCELERATE_USE_CPU=1)"
    ]


def _unlike_start(compared: Compared) -> Diagnosis | None:
    start, what = unlike_starts(compared.record), "replicas"
    if start is None:
        start, what = unlike_shards(compared.record), "shards"
    if start is None or (what == "replicas" and are_made_equal(compared.record, start)):
        return None
    return Diagnosis(
        cause=f"the {what} do not start equal: {start.text}",
        kind="unlike_start",
        standing="proved",
        ranks=(start.rank,),
        because=(
            "the weights before the first forward, by digest; the comparison itself gives "
            "every rank the single run's, so gradients are right or wrong apart from it",
        ),
    )


def _other_buffers(compared: Compared) -> Diagnosis | None:
    """What is not trained, and unlike the single run's on every rank: of one alone it may be so by
    design, as where its part begins."""
    failing = {d.step for d in compared.diffs if d.status == "fail"}
    names = left_by_all(compared.record) if 0 in failing else []  # it was there in all steps
    if not names:
        return None
    return Diagnosis(
        cause=f"every rank computes with another {some_of(names)} than the single run",
        kind="other_buffers",
        standing="likely",
        ranks=tuple(compared.record.ranks),
        because=("buffers and frozen weights, as they are before the first forward, by digest",),
    )


def _unowned(compared: Compared) -> Diagnosis | None:
    found = next(unowned(compared.record), None)
    if found is None:
        return None
    names, step = found
    return Diagnosis(
        cause=f"no rank's optimizer has {some_of(names)} at step {step}; the single run's does",
        kind="unowned",
        standing="proved",
        ranks=tuple(compared.record.ranks),
        because=("the parameters of every optimizer that steps, by rank",),
    )


def _left_behind(compared: Compared) -> Diagnosis | None:
    left = next(left_behind(compared.record), None)
    if left is None:
        return None
    return Diagnosis(
        cause=left.text,
        kind="left_behind",
        standing="proved",
        ranks=(left.rank,),
        because=("the weights that it computes with, held against the single run's",),
    )


def _other_weights(compared: Compared) -> Diagnosis | None:
    moved = changed_between(compared.record)
    if moved is None:
        return None
    return Diagnosis(
        cause=f"the script changes weights between two steps, on rank {moved.rank} otherwise "
        f"than in the single run: {moved.text}",
        kind="other_weights",
        standing="proved",
        ranks=(moved.rank,),
        because=("weights are set to the single run's after every optimizer's step, and were "
                 "others before the next",),
    )  # fmt: skip


def _carried_over(compared: Compared) -> Diagnosis | None:
    """Gradients that still hold those of the step before: nothing made them zero in between."""
    failed = [d for d in compared.diffs if d.status == "fail"]
    first = min((d.step for d in failed), default=0)
    wrong = [d for d in failed if d.step == first]
    if first == 0 or any(not d.comparable for d in wrong):
        return None
    record, times = compared.record, set()
    for d in wrong:
        held = record.ranks[d.rank]
        before = held.grads.get((d.tier, d.step - 1), {}).get(d.name)
        got, whole = held.grads[d.tier, d.step][d.name], record.references[d.tier][d.step].grads
        index = held.index_of(d.tier, d.name)
        right = whole[d.name] if index is None else whole[d.name].reshape(-1)[index]
        if before is None or before.shape != got.shape:
            return None
        if not bool(before.any()) or not bool(before.isfinite().all()):
            return None
        old, more = before.double(), got.double() - right.reshape(got.shape)
        factor = round(float((old * more).sum()) / float(old.square().sum()))
        rest = float((more - factor * old).abs().max())
        if not factor or rest > (1 + abs(factor)) * d.threshold:
            return None
        times.add(factor)
    if len(times) != 1:
        return None
    often = "" if times == {1} else f", {times.pop()} times"
    names = list(dict.fromkeys(d.name for d in wrong))
    return Diagnosis(
        cause=f"{some_of(names)} at step {first} still holds the gradient of step {first - 1}"
        f"{often}: nothing made it zero (zero_grad) before this step's backward",
        kind="carried_over",
        standing="proved",
        ranks=tuple(sorted({d.rank for d in wrong})),
        because=("less what the optimizer found one step before, every wrong gradient is the "
                 "single run's",),
    )  # fmt: skip


def _hidden_by_a_clip(compared: Compared) -> Diagnosis | None:
    for tier in compared.record.spec.tiers:
        for one in hidden_factors(compared, tier):
            if one.by_clip and one.times is not None:
                return _before_the_clip(compared.record, one.times, one.step)
    return None


def _clipped_otherwise(compared: Compared) -> Diagnosis | None:
    """Gradients that are right before the clip, and not behind it."""
    case = case_of(compared)
    if case is None or case.record is compared.record or case.failing_cells:
        return None  # no clip, or what is wrong is so before it
    if any(not d.comparable for d in compared.diffs):
        return None
    script, at = compared.record.spec.script, (case.tier, case.step)
    assert script is not None
    single = _factors(script.rescaled[case.step])
    own = {r: _factors(h.info[at].get("rescaled", {})) for r, h in compared.record.ranks.items()}
    shown = "; ".join(
        f"by {', '.join(f'{f:.9g}' for f in factors) or '1'} on rank {spans(ranks)}"
        for factors, ranks in _alike(own)
    )
    return Diagnosis(
        cause=f"the clip: gradients are right before it, and it multiplies them {shown}, where the "
        f"single run's does by {', '.join(f'{f:.9g}' for f in single) or '1'}",
        kind="clipping",
        standing="proved",
        ranks=tuple(sorted({d.rank for d in compared.diffs if d.status == "fail"})),
        because=(
            f"step {case.step}: every gradient as torch's clip found it is the single run's",
            "a norm of the own shards or of some parameters only, or one in which replicas count "
            "several times, gives another factor",
        ),
    )


def _factors(told: Mapping[str, tuple[float | None, bool]]) -> tuple[float, ...]:
    """The different factors of a step's clips; roundings are no difference."""
    return tuple(sorted({round(f, 9) for f, by_clip in told.values() if by_clip and f}))


def _alike(own: Mapping[int, tuple[float, ...]]) -> list[tuple[tuple[float, ...], list[int]]]:
    found: dict[tuple[float, ...], list[int]] = {}
    for rank, factors in own.items():
        found.setdefault(factors, []).append(rank)
    return list(found.items())


def _before_the_clip(record: Record, times: float, step: int) -> Diagnosis:
    fraction = as_fraction(times, 1e-5 * abs(times))
    shown = str(fraction) if fraction is not None else f"{times:.9g}"
    ranks = len(record.ranks)
    by_ranks = fraction is not None and fraction in (Fraction(1, ranks), Fraction(ranks))
    symbol = ("1/ranks" if times < 1 else "ranks") if by_ranks else None
    return Diagnosis(
        cause=f"every gradient is multiplied by {shown} before the script clips it"
        f"{f', which equals {symbol}' if symbol else ''}: the clip hides it from the optimizer",
        kind="factor",
        standing="proved",
        ranks=tuple(record.ranks),
        factor=shown,
        symbol=symbol,
        because=(
            f"step {step}: of what torch's clip was given the single run keeps one part and the "
            f"ranks another, and both end with the same",
        ),
    )


def _wrong_update(compared: Compared) -> Diagnosis | None:
    """Where all gradients are right: a wrong one makes wrong weights."""
    if not all(d.is_within for d in compared.diffs):
        return None
    every = list(wrong_updates(compared.record))
    if not every:
        return None
    wrong = every[0]
    times = next((one.times for one in every if one.times is not None), None)
    infos = [i for rank in wrong.ranks for i in compared.record.ranks[rank].info.values()]
    unseen = any(info.get("changed_without") for info in infos)
    what = "the optimizer's own step: its gradients are right"
    if unseen:
        what = "the optimizer's step, or a gradient that it finds elsewhere than in .grad"
    return Diagnosis(
        cause=f"{what}; after it {wrong.text}",
        kind="update",
        standing="likely" if unseen else "proved",
        ranks=wrong.ranks,
        because=(
            "weights after each step are held against the single run's, from equal weights before "
            "it",
            *_as_a_rate(times),
        ),
    )


def _as_a_rate(times: float | None) -> tuple[str, ...]:
    """What a step that goes so many times as far looks like."""
    if times is None:
        return ()
    return (
        f"each of these weights goes {times:.6g} times as far as in the single run's step, as with "
        f"a learning rate of so many times its: one that goes by the number of processes, or a "
        f"scheduler that steps once for each of them",
    )


IN_ORDER: tuple[Callable[[Compared], Diagnosis | None], ...] = (
    _other_rows,
    _unlike_start,
    _unowned,
    _left_behind,
    _other_weights,
    _carried_over,
    _hidden_by_a_clip,
    _clipped_otherwise,
    _wrong_update,
    _other_buffers,
)


def which_rows(other: OtherRows) -> str:
    """In words, how the rows differ."""
    head = f"the runs do not train on the same rows (step {other.step}): "
    shares = {rank: set(numbers) for rank, numbers in other.by_rank.items() if numbers}
    each = {len(numbers) for numbers in other.by_rank.values()}
    as_many = {len(numbers) + other.foreign.get(r, 0) for r, numbers in other.by_rank.items()}
    if as_many == {other.single} and len(other.by_rank) > 1 and other.foreign:
        return (
            f"{head}every rank reads as many rows as the single run does, so the batch of all "
            f"ranks is {len(other.by_rank)} times as large; write {{N/ranks}} where the script "
            f"takes its rows per rank"
        )
    if len(shares) > 1 and len({frozenset(s) for s in shares.values()}) == 1 and len(each) == 1:
        rows = spans(sorted(next(iter(shares.values()))))
        return (
            f"{head}rank {spans(list(shares))} all read rows {rows}; nothing divides them by rank"
        )
    if other.ranks == other.single and sum(other.foreign.values()) > other.single / 2:
        return (
            f"{head}as many, but others: as when they are shuffled in another order (give the "
            f"sampler a seed of its own), or drawn or changed at random"
        )
    if other.foreign and not shares:
        return f"{head}no rank reads a row of the single run"
    if other.foreign:
        return f"{head}rank {spans(list(other.foreign))} reads rows that the single run does not"
    return f"{head}some are lost or read twice"
