"""How the ranks' own gradients were put together, where ranks wrote down what each backward gave.

Where both what a rank has and what it must have are sums of those, the difference of the weights is
the mistake, and it is proved; see `diagnose.own_gradients`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.weighing.losses import ddp_divides_by
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explainers.of_factors.tables import (
    alone,
    early_passes_alone,
    even,
    foreign_passes,
    is_zero,
    late_passes_alone,
    left_out,
    scaled,
)
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.own_gradients import (
    ALIKE,
    Columns,
    Given,
    Mixed,
    Source,
    Weighed,
    are_of_rows,
    columns_of,
    given_by_ranks,
    has_few_numbers,
    mixed,
    near,
    with_few_numbers,
)
from sumgrad.ledger.call_site import DDP
from torch import Tensor

SAME_NORM = 1e-5  # torch's clip adds 1e-6 to a norm
UNLIKE = 1e-3  # of weights
LEFT_IN = "left_in"  # kind of a cause: a backward that belongs in no gradient
DDP_REDUCES = (
    "DistributedDataParallel reduces in a backward whose forward ran through it, and not through "
    "its module, and outside of no_sync(): look which ones of the step did"
)
SHOWN = 4  # ranks whose weights are written out


def put_together_by_rank(case: Case, left: Left) -> Iterator[Explanation]:
    """What the ranks' own gradients were weighed by, beside what they had to be weighed by."""
    parts = mixed(case)
    found = with_few_numbers(case, [w for m in parts if (w := m.weighed()) is not None])
    unlike = any(m.wanted is None for m in parts)
    script = case.record.spec.script is not None
    right = "the single run's" if script else "the right one"
    every = {n for m in found for n in m.names} == set(case.record.spec.params)
    said = _in_words(found, right, every=every) if found and not unlike else None
    told = {(m.rank, n) for m in found for n in m.names}
    wrong = {(c.rank, c.name) for c in case.failing_cells}
    if said is None or 2 * len(told) < len(wrong):
        return
    kind, cause = said
    names = list(dict.fromkeys(n for m in found for n in m.names))
    others = list(dict.fromkeys(n for r, n in wrong if (r, n) not in told))
    yield explained(
        case,
        Diagnosis(
            cause=f"{'every gradient' if every else some_of(names)}: {cause}",
            kind=kind,
            standing="likely" if others else "proved",
            ranks=tuple(sorted({m.rank for m in found})),
            because=(
                "what every rank's own backwards gave was kept before its reduction; with these "
                f"weights it gives the measured gradient, and with those {right}, both under the "
                f"threshold",
                *([DDP_REDUCES] if kind == "not_reduced" and ddp_divides_by(case) else []),
                *_idle_ddp(case, kind),
                *_as_a_clip(case, found),
                *_tables(found),
            ),
        ),
        others,
    )


def a_backward_is_left_in(case: Case, left: Left) -> Iterator[Explanation]:
    """The same where whole backwards of every rank do not belong in any gradient: what is seen of
    them in modules, and of the rows that they read, follows."""
    for one in put_together_by_rank(case, left):
        told = one.diagnosis
        if told.kind == LEFT_IN and told.standing == "proved" and not _repeats_rows(case):
            yield one


def _repeats_rows(case: Case) -> bool:
    """Whether what is left in it is made up of rows of the batch, which are read once more."""
    weighed = next((w for m in mixed(case) if (w := m.weighed()) is not None), None)
    given = given_by_ranks(case)
    if weighed is None or given is None:
        return False
    passes, found = foreign_passes(weighed), list[tuple[Columns, Tensor]]()
    for cell in case.failing_cells:
        columns = columns_of(cell, given)
        if columns is not None and columns.passes == weighed.got.shape[1]:
            own = columns.own.reshape(len(columns.sources), columns.passes, -1)
            found.append((columns, own[:, passes].sum((0, 1))))
    return are_of_rows(case, found)


def wrong_before_it_is_reduced(case: Case) -> bool:
    """Whether every wrong gradient is a sum of the ranks' own ones, and no sum of them is right;
    those of too few numbers aside, of which any sum may be."""
    found = mixed(case)
    return _covers(case, found, few=True) and all(m.wanted is None for m in found)


def _covers(case: Case, found: Sequence[Mixed], *, few: bool = False) -> bool:
    told = {(m.rank, n) for m in found for n in m.names}
    given = given_by_ranks(case)
    left = [c for c in case.failing_cells if (c.rank, c.name) not in told]
    if not few or not told or given is None:
        return not left
    return all(has_few_numbers(c, given) for c in left)


def on_which_side_of_the_reduction(case: Case) -> str | None:
    """Where the mistake is, as far as the sums of the ranks' own gradients say it."""
    found = mixed(case)
    names = list(dict.fromkeys(n for m in found for n in m.names))
    if not _covers(case, found, few=True):
        return None
    if wrong_before_it_is_reduced(case):
        shown = {_weights(m, m.got) for m in found}
        only = len(shown) == 1 and all(m.only for m in found)
        with_weights = f", with the weights {shown.pop()}" if only else ""
        return (
            f"{_own(names)} is put together from what the ranks' own backwards gave"
            f"{with_weights}, and no weights of them give all that is right: what some backward "
            f"itself gives is wrong already"
        )
    if all(m.got is None for m in found):
        shown = {_weights(m, m.wanted) for m in found}
        only = len(shown) == 1 and all(m.only for m in found)
        with_weights = f"with the weights {shown.pop()} " if only else ""
        return (
            f"what the ranks' own backwards gave {_own(names)} is right: {with_weights}"
            f"it adds up to the right gradient; what the ranks hold is no such sum: it was changed "
            f"after that, where gradients are reduced, copied or rescaled, or by a hook"
        )
    return None


def _own(names: Sequence[str]) -> str:
    return "each" if len(names) > 3 else some_of(list(names))


def _in_words(found: Sequence[Weighed], right: str, *, every: bool) -> tuple[str, str] | None:
    """Kind and cause, of the patterns that people make; None where one factor says it shorter.

    right: the gradient that it is compared with, in words. every: all parameters are among them.
    """
    if all(scaled(m) is not None for m in found):
        return None
    if all(alone(m) for m in found):
        several = len({m.rank for m in found}) > 1
        keeps = "each keep what their" if several else "keeps what its"
        return (
            "not_reduced",
            f"it is not reduced, no gradient of another rank is in it: rank {_ranks(found)} "
            f"{keeps} own backward{_called(found, range(found[0].got.shape[1]))} "
            f"gave{_times(found)}; {right} has other ranks' in it",
        )
    lost = [left_out(m) for m in found]
    if all(lost):
        ranks = sorted({r for out in lost for r in out})
        if any(sorted(out) != ranks for out in lost):
            return "too_few_ranks", _too_few(found)
        return (
            "not_reduced",
            f"gradients of rank {spans(ranks)} are not in it, on rank {_ranks(found)}",
        )
    foreign = {tuple(foreign_passes(m)) for m in found}
    if len(foreign) == 1 and (passes := next(iter(foreign))):
        return _of_foreign(found, passes, every=every)
    if all(early_passes_alone(m) for m in found):
        return (
            "not_reduced",
            f"only the last of {found[0].got.shape[1]} backwards is reduced; what the others gave "
            f"stays on the rank that made it",
        )
    if all(late_passes_alone(m) for m in found):
        return (
            "late_gradient",
            "it is reduced too early: what the last backwards gave is added after the reduction "
            "and stays on the rank that made it",
        )
    if all(even(m) for m in found):
        return (
            "weights_of_ranks",
            f"every rank counts alike, as when each divides its loss by its own number of rows or "
            f"tokens, or scales it by its own factor: every rank's own gradient is weighed alike "
            f"({_share(found[0].got[0, 0])}), where {right} weighs them by "
            f"{_weights(found[0], found[0].wanted)}",
        )
    alike = [m for m in found if _same(m, found[0])]
    named = list(dict.fromkeys(n for m in alike for n in m.names))
    others = {n for m in found if m not in alike for n in m.names}
    of = f"in {some_of(named)} " if others - {*named} else ""
    on = "" if len(alike) == len(found) else f"{of}on rank {_ranks(alike)}, "
    return (
        "weights_of_ranks",
        f"{on}the ranks' own gradients are weighed by {_weights(found[0], found[0].got)}, where "
        f"{right} weighs them by {_weights(found[0], found[0].wanted)}{_changed_between(found)}",
    )


def _of_foreign(found: Sequence[Weighed], passes: Sequence[int], *, every: bool) -> tuple[str, str]:
    """Kind and cause where whole backwards are no part of the right gradient. every: of all
    parameters."""
    number, total = spans([p + 1 for p in passes]), found[0].got.shape[1]
    which = f"backward {number} of the {total} that"
    if every:
        return (
            LEFT_IN,
            f"what {which} each rank runs{_called(found, passes)} gave is left in it, and is "
            f"no part of the right gradient; the others add up to that: look at what should "
            f"clear the gradients after it (a zero_grad without effect, say), whether it "
            f"should run, or, where its right gradient is zero, at what it computes",
        )
    return (
        "foreign_backward",
        f"{which} reach it on each rank{_called(found, passes)} is in it, and is no part of "
        f"its right gradient: it runs through this parameter for another's sake",
    )


def _same(a: Weighed, b: Weighed) -> bool:
    """Whether two ranks have the same weights, and should."""
    same = a.sources == b.sources and a.got.shape == b.got.shape
    return same and near(a.got, b.got) and near(a.wanted, b.wanted)


def _changed_between(found: Sequence[Weighed]) -> str:
    """Where later backwards of a rank count otherwise than earlier ones, what may have been done
    to their sum in between; the last ones are right."""
    mix, told = found[0], []
    if any(not near(m.got, mix.got) or not near(m.wanted, mix.wanted) for m in found):
        return ""
    for source, got, wanted in zip(mix.sources, mix.got, mix.wanted, strict=True):
        if not bool(got.all()) or not bool(wanted.all()) or len(got) < 2:
            return ""
        often = (got / wanted).tolist()
        if abs(often[-1] - 1) > ALIKE:
            return ""
        if max(often) - min(often) > ALIKE:
            told.append(f"by {multiplied_between(often, 'backward')} on rank {spans(list(source))}")
    if not told:
        return ""
    more = f" and on {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return (
        f"; as if what a rank had added up was multiplied {'; '.join(told[:SHOWN])}{more}: look "
        f"for a clip, a division or a reduction of .grad there"
    )


def _as_a_clip(case: Case, found: Sequence[Weighed]) -> list[str]:
    """Where every rank's sum of backwards had the same norm each time after it was multiplied."""
    given, mix = given_by_ranks(case), found[0]
    script = case.record.spec.script
    if given is None or any(not near(m.got, mix.got) for m in found):
        return []
    if script is not None and any(script.rescaled[case.step : case.step + 1]):
        return _of_one_norm(case, mix, given)  # what is compared may be before a clip of both runs
    norms: list[float] = []
    for source, got, wanted in zip(mix.sources, mix.got, mix.wanted, strict=True):
        numel = {c.name: c.measured.numel() for c in case.cells if c.rank == source[0]}
        own, at = given[source[0]]
        whole = all(n in own and len(at[n]) == numel[n] for n in numel)
        if not whole or not bool(got.all()) or not bool(wanted.all()):
            return []
        total = torch.zeros(sum(numel.values()), dtype=torch.float64)
        factors = dict(_factors_between((got / wanted).tolist()))
        for k in range(len(got)):
            total = total + torch.cat([own[n][k].double() for n in numel])
            total = total * factors.get(k, 1.0)
            norms += [float(total.norm())] if k in factors else []
    if len(norms) < 2 or max(norms) - min(norms) > SAME_NORM * max(norms):
        return []
    return [f"each time that what a rank had added up was multiplied, its norm is {norms[0]:.4g} "
            f"afterwards: that is what clipping to {norms[0]:.4g} does, before anything is "
            f"reduced"]  # fmt: skip


def _of_one_norm(case: Case, mix: Weighed, given: Given) -> list[str]:
    """Where what each rank gave has the same norm in what comes of it, though not weighed alike."""
    norms = list[float]()
    for source, got in zip(mix.sources, mix.got, strict=True):
        numel = {c.name: c.measured.numel() for c in case.cells if c.rank == source[0]}
        own, at = given[source[0]]
        if not all(n in own and len(at[n]) == numel[n] for n in numel):
            return []  # some of its numbers were kept
        parts = [(own[n].double() * got[:, None]).sum(0) for n in numel]
        norms.append(float(torch.cat(parts).norm()))
    weights, size = mix.got.sum(1), len(case.record.ranks)
    is_one_weight = bool((weights - weights[0]).abs().max() <= UNLIKE * weights[0].abs())
    if len(norms) < 2 or is_one_weight or max(norms) - min(norms) > SAME_NORM * max(norms):
        return []
    return [f"what each rank gave has the norm {norms[0]:.4g} in what comes of it, with a weight "
            f"of its own for each: that is what clipping by each rank's own norm does, before they "
            f"are added up (to {norms[0] * size:.4g}, if they are averaged then)"]  # fmt: skip


def _idle_ddp(case: Case, kind: str) -> list[str]:
    """Of a script that wraps a model and calls what is in it."""
    record = case.record
    if kind != "not_reduced" or record.spec.script is None:
        return []
    made = {e["site"] for own in record.started.values() for e in own if e.get("by") == DDP}
    at = (case.tier, case.step)
    issued = [e for held in record.ranks.values() for e in held.events.get(at, ())]
    if not made or any(e.get("by") == DDP for e in issued):
        return []
    return [f"DistributedDataParallel, made at {some_of(sorted(made))}, issues nothing in that "
            f"step: it reduces where it is called itself, and not what it wraps, and outside of "
            f"no_sync()"]  # fmt: skip


def _factors_between(often: Sequence[float]) -> list[tuple[int, float]]:
    """After which parts a sum must have been multiplied to count them so often, and by what."""
    factors = [a / b for a, b in pairwise(often) if b] + [often[-1]]
    return [(i, f) for i, f in enumerate(factors) if abs(f - 1) > ALIKE]


def multiplied_between(often: Sequence[float], which: str) -> str:
    """By what a sum must have been multiplied after each of its parts to count them so often."""
    told = _factors_between(often)
    return ", ".join(
        f"{_share(torch.tensor(f, dtype=torch.float64))} after {which} {i}" for i, f in told
    )


def _too_few(found: Sequence[Weighed]) -> str:
    """Which ranks hold whose gradients, where not all hold the same."""
    there: dict[tuple[int, ...], list[int]] = {}
    for mix in found:
        inside = [r for source, got in zip(mix.sources, mix.got, strict=True)
                  if not is_zero(got, mix) for r in source]  # fmt: skip
        there.setdefault(tuple(sorted(inside)), []).append(mix.rank)
    shown = "; ".join(
        f"rank {spans(ranks)} holds " + (f"what rank {spans(list(inside))} gave" if inside else "0")
        for inside, ranks in list(there.items())[:SHOWN]
    )
    return f"it is reduced over too few ranks: {shown}"


def _ranks(found: Sequence[Weighed]) -> str:
    return spans(sorted({m.rank for m in found}))


def _times(found: Sequence[Weighed]) -> str:
    """By which factor a rank that keeps its own keeps it; empty for once."""
    values = torch.cat([m.got[m.mine].reshape(-1) for m in found])
    if not near(values, values[0].expand_as(values)):
        return ""
    once = abs(float(values[0]) - 1) <= ALIKE
    return "" if once else f" (times {_share(values[0])})"


def _called(found: Sequence[Weighed], passes: Sequence[int]) -> str:
    """The lines that called these backwards, where they are known."""
    lines = {m.lines[k] for m in found for k in passes if k < len(m.lines)}
    return f" (called at {some_of(sorted(lines))})" if lines else ""


def _tables(found: Sequence[Weighed]) -> list[str]:
    alike: dict[str, list[int]] = {}
    for mix in found:
        shown = f"{some_of(list(mix.names))}: {_weights(mix, mix.got)}; to be "
        alike.setdefault(shown + _weights(mix, mix.wanted), []).append(mix.rank)
    return [f"rank {spans(ranks)}, {shown}" for shown, ranks in list(alike.items())[:SHOWN]]


def _weights(mix: Mixed | Weighed, table: Tensor | None) -> str:
    """`1/3 of rank 0-1 and 1/4 of rank 2`, ranks with equal weights together."""
    assert table is not None
    return in_weights(mix.sources, table)


def in_weights(sources: Sequence[Source], table: Tensor, runs: Sequence[int] = ()) -> str:
    """The same of any (sources, passes) weights. runs: how many backwards each source ran. Of ranks
    that gave the same the first is told: all of them would be several times that."""
    groups: dict[str, list[Source]] = {}
    for source, row, run in zip(sources, table, runs or [len(t) for t in table], strict=True):
        groups.setdefault(_row(row[:run]), []).append(source)
    return ", ".join(f"{row} of {_of_each(several)}" for row, several in groups.items())


def _of_each(sources: Sequence[Source]) -> str:
    firsts = f"rank {spans(sorted(source[0] for source in sources))}"
    alike = " and ".join(f"rank {spans(sorted(source))}" for source in sources if len(source) > 1)
    each = " each" if " and " in alike else ""
    return f"{firsts} ({alike}{each} gave the same)" if alike else firsts


def _row(row: Tensor) -> str:
    if near(row, row[:1].expand_as(row)):
        return _share(row[0])
    return "(" + ", ".join(_share(value) for value in row) + " by backward)"


def _share(value: Tensor) -> str:
    number = float(value)
    fraction = as_fraction(number, ALIKE * abs(number) / 10)
    return str(fraction) if fraction is not None else f"{number:.6g}"
