"""Recover the coefficients of a failed run and name the cause they prove.

The seven steps of docs/diagnosis.md: float64 first; bit-identical replicas once; fit the
deviation from one; hypotheses of the plan, then one free factor, then two, then least squares;
accepted only when the whole residual is under the tier's threshold; names from the plan's edges,
then from the sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, pairwise

import torch
from sumgrad.compare import Expected, TensorDiff, expect, same_bits
from sumgrad.fit import Fit, as_fraction, fit_deviation
from sumgrad.hypotheses import Hypothesis, factor_names, hypotheses
from sumgrad.plan import Emission, Plan
from sumgrad.predict import PartialSums, Prediction
from sumgrad.proof import Coefficient, expected_terms
from sumgrad.record import RunRecord
from sumgrad.schedule import Mismatch, compare_ledger
from sumgrad.verdict import Diagnosis, RecoveredCoefficient
from torch import Tensor

MAX_INTERVALS = 48
MAX_ALSO = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One unit's gradient as some ranks hold it, bit for bit the same on all of them."""

    pool: str
    unit: str
    ranks: tuple[int, ...]
    measured: dict[str, Tensor]
    expected: dict[str, Expected]

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def failing(self) -> bool:
        return any(not self.passes(name, e.value) for name, e in self.expected.items())

    def passes(self, name: str, value: Tensor, *, factor: float = 1.0) -> bool:
        """Whether the measured gradient is this value, within the tier's threshold."""
        error = float((self.measured[name] - value).abs().max())
        return error <= self.expected[name].threshold * max(1.0, factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failing step of one tier, with everything that explaining it needs."""

    record: RunRecord
    tier: str
    step: int
    holders: tuple[Holder, ...]
    sums: PartialSums
    previous: PartialSums | None

    @property
    def plan(self) -> Plan:
        return self.record.plan

    @property
    def failing(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.failing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A hypothesis whose whole prediction fits, and how far the ledger contradicts it."""

    hypothesis: Hypothesis
    mismatches: int


def diagnose(
    record: RunRecord, diffs: Sequence[TensorDiff], mismatches: Sequence[Mismatch]
) -> tuple[tuple[Diagnosis, ...], tuple[RecoveredCoefficient, ...]]:
    """Causes and coefficients of a run; empty for a clean one."""
    broken = _not_finite(record, diffs)
    if broken:
        return broken, ()
    failed = [d for d in diffs if d.status == "fail" and d.max_abs == d.max_abs]
    if not failed:
        return (_law_only(record, mismatches),) if mismatches else (), ()
    tier = next(t for t in record.spec.tiers if any(d.tier == t for d in failed))
    step = min(d.step for d in failed if d.tier == tier)
    partials = record.partials.get(tier, {})
    if step not in partials:
        cause = f"no partials of tier {tier}, step {step} were stored, so no cause can be named"
        return (Diagnosis(cause=cause, kind="unexplained"),), ()
    case = Case(
        record=record,
        tier=tier,
        step=step,
        holders=tuple(_holders(record, tier, step)),
        sums=PartialSums(partials[step]),
        previous=PartialSums(partials[step - 1]) if step - 1 in partials else None,
    )
    accepted = find_hypotheses(case)
    if accepted:
        best = accepted[0]
        return (
            (_explain(case, accepted, mismatches),),
            tuple(_measure(case, best.hypothesis.plan)),
        )
    return _fit_factors(case, mismatches)


def find_hypotheses(case: Case) -> list[Accepted]:
    """Every one-edge fault whose whole predicted gradient fits, the best supported first."""
    accepted = []
    clean = Prediction(case.plan, case.sums, case.previous)
    for hypothesis in hypotheses(case.plan):
        if _fits(case, hypothesis, clean):
            found = count_mismatches(case.record, hypothesis.plan, case.tier, case.step)
            accepted.append(Accepted(hypothesis=hypothesis, mismatches=found))
    return sorted(accepted, key=lambda a: (a.mismatches, a.hypothesis.rank))


def count_mismatches(record: RunRecord, plan: Plan, tier: str, step: int) -> int:
    """In how many operations the ledgers differ from what this plan would have issued."""
    dtype = record.spec.tiers[tier]
    label = f"{tier}, step {step}"
    return sum(
        len(compare_ledger(plan, rank, dtype, label, held.events.get((tier, step), [])))
        for rank, held in record.ranks.items()
    )


def _holders(record: RunRecord, tier: str, step: int) -> Iterator[Holder]:
    plan = record.plan
    reference = record.references[tier][step]
    dtype = record.spec.tiers[tier]
    for pool in plan.topology.pools:
        for unit in plan.units[pool.name]:
            names = [p.name for p in plan.declaration.params_of(unit)]
            wanted = {
                n: expect(plan, reference, pool.name, n, tier=tier, dtype=dtype) for n in names
            }
            classes: list[tuple[list[int], dict[str, Tensor]]] = []
            for rank in pool.ranks:
                held = record.ranks[rank].grads.get((tier, step)) if rank in record.ranks else None
                if held is None or any(
                    n not in held or held[n].shape != wanted[n].value.shape for n in names
                ):
                    continue
                mine = {n: held[n] for n in names}
                for ranks, other in classes:
                    if all(same_bits(mine[n], other[n]) for n in names):
                        ranks.append(rank)
                        break
                else:
                    classes.append(([rank], mine))
            for ranks, grads in classes:
                yield Holder(
                    pool=pool.name,
                    unit=unit,
                    ranks=tuple(ranks),
                    measured={n: g.double() for n, g in grads.items()},
                    expected=wanted,
                )


def _fits(case: Case, hypothesis: Hypothesis, clean: Prediction) -> bool:
    """Whether a hypothesis predicts every tensor of every holder, failing ones first."""
    prediction = Prediction(hypothesis.plan, case.sums, case.previous)
    stale = hypothesis.kind == "stale_buffer"
    for holder in sorted(case.holders, key=lambda h: not h.failing):
        where = (holder.pool, holder.unit, holder.rank)
        coefficients = prediction.coefficients(*where)
        if not stale and _same(coefficients, clean.coefficients(*where)):
            if holder.failing:
                return False
            continue
        gradient = prediction.gradient(*where)
        if gradient is None:
            return False
        largest = max((abs(float(c.weight)) for c in coefficients if c.weight), default=1.0)
        if not all(holder.passes(n, g, factor=largest) for n, g in gradient.items()):
            return False
    return True


def _same(a: Sequence[Coefficient], b: Sequence[Coefficient]) -> bool:
    def key(items: Sequence[Coefficient]) -> list[tuple[object, ...]]:
        return [(c.term, c.producer, c.rows, c.weight) for c in items]

    return key(a) == key(b)


def _explain(case: Case, accepted: Sequence[Accepted], mismatches: Sequence[Mismatch]) -> Diagnosis:
    best = accepted[0].hypothesis
    equal = [a.hypothesis for a in accepted[1:] if a.mismatches == accepted[0].mismatches]
    also = [h.cause for h in equal if h.rank <= best.rank + 2]
    also += _other_names(case.plan, best)
    failing = [name for h in case.failing for name in h.expected]
    because = [
        f"its predicted gradient equals the measured one on all {len(failing)} failing tensors, "
        f"and changes none of the others, within the threshold of the {case.tier} tier",
    ]
    because += _ledger_evidence(accepted[0], mismatches)
    because += _digest_evidence(case, best)
    however = []
    if accepted[0].mismatches:
        however.append(
            f"the ledger differs from this reading in {accepted[0].mismatches} operations"
        )
    if also:
        however.append("other readings fit as well; three_pool_primes.yaml separates them")
    return Diagnosis(
        cause=best.cause,
        kind=best.kind,
        term=best.term,
        ranks=best.ranks,
        factor=str(best.factor) if best.factor is not None else None,
        symbol=best.symbol,
        also=tuple(dict.fromkeys(also))[:MAX_ALSO],
        because=tuple(because),
        however=tuple(however),
    )


def _other_names(plan: Plan, best: Hypothesis) -> list[str]:
    if best.kind != "factor" or best.factor is None:
        return []
    return [n for n in factor_names(plan).get(best.factor, []) if n != best.symbol]


def _ledger_evidence(best: Accepted, mismatches: Sequence[Mismatch]) -> list[str]:
    if not mismatches:
        return ["the ledger of every rank equals the plan: the fault is not in a collective"]
    if best.mismatches == 0:
        return [f"the ledger shows it: {mismatches[0]}"]
    return []


def _digest_evidence(case: Case, best: Hypothesis) -> list[str]:
    """Which ranks emitted a replicated term, from the digests taken before the reduction."""
    out = []
    for name in best.edges:
        edge = case.plan.edge(name)
        if isinstance(edge, Emission) and edge.placement == "leader":
            ranks = [
                rank
                for rank, held in sorted(case.record.ranks.items())
                if any(
                    d["edge"] == name
                    for d in held.steps.get((case.tier, case.step), {}).get("digests", [])
                )
            ]
            listed = ", ".join(str(r) for r in ranks) or "none"
            out.append(
                f"ranks that emitted {edge.term} in {edge.pool}: {listed}; the plan names only "
                f"rank {case.plan.leader(edge.pool)}"
            )
    return out


# ---- coefficients ------------------------------------------------------------------------------


def _measure(case: Case, plan: Plan) -> Iterator[RecoveredCoefficient]:
    """One measured factor for every cell of an accepted explanation, by joint least squares."""
    prediction = Prediction(plan, case.sums, case.previous)
    for holder in case.failing:
        cells = prediction.coefficients(holder.pool, holder.unit, holder.rank)
        cells = [c for c in cells if _column(case, holder, c) is not None]
        if any(c.weight is None for c in cells) or len(cells) > MAX_INTERVALS:
            cells = _whole_terms(case, holder)
            unknown = {
                c.term
                for c in prediction.coefficients(holder.pool, holder.unit, holder.rank)
                if c.weight is None
            }
        else:
            unknown = set()
        fit = _fit(case, holder, cells)
        for i, cell in enumerate(cells):
            known = cell.term not in unknown and not unknown
            value, sigma = (fit.values[i], fit.sigmas[i]) if known else (None, None)
            fraction = as_fraction(value, sigma)
            yield RecoveredCoefficient(
                params=holder.unit,
                ranks=holder.ranks,
                term=cell.term,
                producer=cell.producer,
                rows=None if _covers_all(case, cell) else cell.rows,
                expected="1",
                recovered=value,
                sigma=sigma,
                fraction=str(fraction) if fraction is not None else None,
                identifiable=value is not None,
            )


def _covers_all(case: Case, cell: Coefficient) -> bool:
    return cell.rows is None or cell.rows == (0, case.plan.declaration.num_rows)


def _whole_terms(case: Case, holder: Holder) -> list[Coefficient]:
    everything = (0, case.plan.declaration.num_rows)
    out = []
    for term, producer in expected_terms(case.plan, holder.pool, holder.unit):
        replicated = case.plan.declaration.term(term).kind == "replicated"
        cell = Coefficient(
            pool=holder.pool,
            rank=None,
            unit=holder.unit,
            term=term,
            producer=producer,
            rows=None if replicated else everything,
            weight=Fraction(1),
        )
        if _column(case, holder, cell) is not None:
            out.append(cell)
    return out


def _column(case: Case, holder: Holder, cell: Coefficient) -> Tensor | None:
    """The cell's partial over all of the holder's tensors, each scaled by 1 / |ref|."""
    parts = []
    for name, wanted in holder.expected.items():
        part = case.sums.over(cell.term, cell.producer, name, cell.rows)
        if part is None:
            return None
        parts.append(part.reshape(-1) / _size(wanted))
    return torch.cat(parts)


def _deviation(holder: Holder) -> Tensor:
    return torch.cat(
        [
            (holder.measured[name] - wanted.value).reshape(-1) / _size(wanted)
            for name, wanted in holder.expected.items()
        ]
    )


def _size(wanted: Expected) -> float:
    return float(wanted.value.norm()) or wanted.scale or 1.0


def _fit(case: Case, holder: Holder, cells: Sequence[Coefficient]) -> Fit:
    columns = [c for c in (_column(case, holder, cell) for cell in cells) if c is not None]
    return fit_deviation(columns, _deviation(holder))


# ---- nothing in the plan explains it -------------------------------------------------------------


def _fit_factors(
    case: Case, mismatches: Sequence[Mismatch]
) -> tuple[tuple[Diagnosis, ...], tuple[RecoveredCoefficient, ...]]:
    """One free factor, two, then least squares over row intervals, holder by holder."""
    diagnoses: list[Diagnosis] = []
    coefficients: list[RecoveredCoefficient] = []
    for holder in case.failing:
        diagnosis, found = _fit_holder(case, holder)
        diagnoses.append(diagnosis)
        coefficients += found
    evidence = tuple(f"the ledger differs from the plan: {m}" for m in mismatches[:2])
    merged = _merge_equal(diagnoses)
    return tuple(replace(d, because=d.because + evidence) for d in merged), tuple(coefficients)


def _fit_holder(case: Case, holder: Holder) -> tuple[Diagnosis, list[RecoveredCoefficient]]:
    best: tuple[float, str, Fit] | None = None
    for label, groups in _groupings(case, holder):
        columns = [_sum_columns(case, holder, group) for group in groups]
        fit = fit_deviation(columns, _deviation(holder))
        if best is None or fit.explained > best[0]:
            best = (fit.explained, label, fit)
        if _residual_passes(holder, fit):
            return _free_factor(case, holder, label, groups, fit)
    share, nearest, _ = best if best else (0.0, "nothing", None)
    ranks = ", ".join(map(str, holder.ranks))
    return Diagnosis(
        cause=f"not a weighting bug: no factors on the terms' partials explain {holder.unit} on "
        f"rank {ranks}",
        kind="not_weighting",
        ranks=holder.ranks,
        because=("the residual of every fit is above the threshold",),
        however=(f"{nearest} explains {share:.4%} of the deviation",),
    ), []


def _groupings(case: Case, holder: Holder) -> Iterator[tuple[str, list[list[Coefficient]]]]:
    """Sets of cells that get one free factor each, fewest factors first."""
    terms = _whole_terms(case, holder)
    yield "one factor on everything", [terms]
    named = {t.term for t in terms}
    single: list[tuple[str, list[Coefficient]]] = [
        (f"a factor on {name}", [t for t in terms if t.term == name]) for name in sorted(named)
    ]
    single += [(f"a factor on {t.term} of {t.producer}", [t]) for t in terms]
    for cells in _by_rank_rows(case, terms):
        single.append(cells)
    for label, alone in single:
        yield label, [alone]
    for (label_a, a), (label_b, b) in combinations(single[: 3 * len(terms)], 2):
        yield f"{label_a} and {label_b}", [a, b]
    yield "a factor on each term", [[t] for t in terms]
    intervals = [cell for t in terms for cell in _intervals(case, t)]
    if len(intervals) <= MAX_INTERVALS:
        yield "a factor on each term and row interval", [[cell] for cell in intervals]


def _by_rank_rows(
    case: Case, terms: Sequence[Coefficient]
) -> Iterator[tuple[str, list[Coefficient]]]:
    for pool in case.plan.topology.pools:
        for rank in pool.ranks:
            rows = case.plan.rows(rank)
            cells = [replace(t, rows=rows) for t in terms if t.rows is not None]
            if rows[0] < rows[1] and cells:
                yield f"a factor on the rows of {case.plan.topology.place(rank)}", cells
                for cell in cells:
                    label = f"{cell.term} of {cell.producer} on the rows of "
                    yield f"a factor on {label}{case.plan.topology.place(rank)}", [cell]


def _intervals(case: Case, cell: Coefficient) -> list[Coefficient]:
    """A term's rows, cut wherever its producer or the quantity's producer cuts them."""
    if cell.rows is None:
        return [cell]
    cuts = set(case.plan.offsets[cell.producer])
    if case.plan.producer_pool and case.plan.declaration.term(cell.term).reads_quantity:
        cuts |= set(case.plan.offsets[case.plan.producer_pool])
    ordered = sorted(cuts)
    return [replace(cell, rows=(a, b)) for a, b in pairwise(ordered)]


def _sum_columns(case: Case, holder: Holder, cells: Sequence[Coefficient]) -> Tensor:
    columns = [c for c in (_column(case, holder, cell) for cell in cells) if c is not None]
    return torch.stack(columns).sum(0) if columns else torch.zeros_like(_deviation(holder))


def _residual_passes(holder: Holder, fit: Fit) -> bool:
    factor = max([1.0, *(abs(v) for v in fit.values if v is not None)])
    start = 0
    for wanted in holder.expected.values():
        part = fit.residual[start : start + wanted.value.numel()]
        start += wanted.value.numel()
        if float(part.abs().max()) * _size(wanted) > wanted.threshold * factor:
            return False
    return True


def _free_factor(
    case: Case,
    holder: Holder,
    label: str,
    groups: Sequence[Sequence[Coefficient]],
    fit: Fit,
) -> tuple[Diagnosis, list[RecoveredCoefficient]]:
    names = factor_names(case.plan)
    found, readings = [], []
    for group, value, sigma in zip(groups, fit.values, fit.sigmas, strict=True):
        fraction = as_fraction(value, sigma)
        symbols = names.get(fraction, []) if fraction is not None else []
        readings.append((fraction, value, symbols))
        for cell in group:
            found.append(
                RecoveredCoefficient(
                    params=holder.unit,
                    ranks=holder.ranks,
                    term=cell.term,
                    producer=cell.producer,
                    rows=None if _covers_all(case, cell) else cell.rows,
                    expected="1",
                    recovered=value,
                    sigma=sigma,
                    fraction=str(fraction) if fraction is not None else None,
                    identifiable=value is not None,
                )
            )
    odd = [r for r in readings if r[1] is not None and abs(r[1] - 1) > 1e-6] or readings
    fraction, value, symbols = odd[0]
    shown = str(fraction) if fraction is not None else f"{value:.9g}" if value else "?"
    several = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    terms = {cell.term for group in groups for cell in group}
    return Diagnosis(
        cause=f"{label}: {shown}{' = ' + symbols[0] if symbols else ''}{several}, "
        f"on no single edge of the plan",
        kind="free_factor",
        term=terms.pop() if len(terms) == 1 else None,
        ranks=holder.ranks,
        factor=str(fraction) if fraction is not None else None,
        symbol=symbols[0] if symbols else None,
        also=tuple(symbols[1:MAX_ALSO]),
        because=(f"with it the residual of {holder.unit} is under the threshold",),
    ), found


def _merge_equal(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    merged: dict[tuple[str, str | None], Diagnosis] = {}
    for d in diagnoses:
        key = (d.kind if d.kind == "not_weighting" else d.cause, d.factor)
        if key in merged:
            ranks = tuple(sorted({*merged[key].ranks, *d.ranks}))
            merged[key] = replace(merged[key], ranks=ranks)
        else:
            merged[key] = d
    return list(merged.values())


# ---- no deviation to explain ---------------------------------------------------------------------


def _law_only(record: RunRecord, mismatches: Sequence[Mismatch]) -> Diagnosis:
    """The values are right but the ledger is not the plan's: find the plan that it is."""
    first = mismatches[0]
    tier = next(iter(record.spec.tiers))
    for hypothesis in hypotheses(record.plan):
        if hypothesis.kind == "compensated" and not any(
            count_mismatches(record, hypothesis.plan, tier, step)
            for step in range(record.spec.steps)
        ):
            return Diagnosis(
                cause=hypothesis.cause,
                kind=hypothesis.kind,
                ranks=hypothesis.ranks,
                factor=str(hypothesis.factor),
                symbol=hypothesis.symbol,
                because=(
                    f"the ledger shows {first}",
                    "every gradient is right all the same, so something multiplies by "
                    f"{hypothesis.symbol.split('/')[0] if hypothesis.symbol else 'the size'} first",
                ),
                however=("the comparison with the reference passes on this topology",),
            )
    return Diagnosis(
        cause=f"the step does not execute its plan: {first}",
        kind="ledger",
        ranks=tuple(sorted({m.rank for m in mismatches})),
        because=tuple(str(m) for m in mismatches[:3]),
        however=("every gradient that was compared is right",),
    )


def _not_finite(record: RunRecord, diffs: Sequence[TensorDiff]) -> tuple[Diagnosis, ...]:
    bad = [d for d in diffs if d.status == "fail" and d.max_abs != d.max_abs]
    if not bad:
        return ()
    first = bad[0]
    sources = []
    for rank, held in sorted(record.ranks.items()):
        for digest in held.steps.get((first.tier, first.step), {}).get("digests", []):
            if float(digest["norm"]) != float(digest["norm"]) or digest["norm"] in ("inf", "nan"):
                sources.append(f"{digest['edge']} on rank {rank} (unit {digest['unit']})")
    cause = f"{first.name} on rank {first.rank} is not comparable: {first.reason}"
    because = tuple(f"the contribution {s} is not finite before its reduction" for s in sources[:3])
    return (
        Diagnosis(
            cause=cause,
            kind="not_finite",
            ranks=tuple(sorted({d.rank for d in bad})),
            because=because,
        ),
    )
