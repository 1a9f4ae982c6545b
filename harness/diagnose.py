"""Recover the coefficients of a failed run and name the cause they prove.

The seven steps of docs/diagnosis.md: float64 first; bit-identical replicas once; fit the
deviation from one; hypotheses of the plan, then one free factor, then two, then least squares;
accepted only when the whole residual is under the tier's threshold; names from the plan's edges,
then from the sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sumgrad.case import (
    Case,
    Holder,
    column,
    count_mismatches,
    covers_all,
    fit_cells,
    flatten,
    holders,
    whole_terms,
)
from sumgrad.compare import TensorDiff
from sumgrad.fit import as_fraction
from sumgrad.free_factors import fit_factors
from sumgrad.hypotheses import Hypothesis, factor_names, hypotheses
from sumgrad.plan import Emission, Plan
from sumgrad.predict import PartialSums, Prediction
from sumgrad.proof import Coefficient
from sumgrad.record import RunRecord
from sumgrad.schedule import Mismatch
from sumgrad.verdict import Diagnosis, RecoveredCoefficient
from torch import Tensor

MAX_INTERVALS = 48
MAX_ALSO = 4


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
    failed = [d for d in diffs if d.status == "fail" and d.comparable]
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
        holders=tuple(holders(record, tier, step)),
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
    return fit_factors(case, mismatches)


def find_hypotheses(case: Case) -> list[Accepted]:
    """Every one-edge fault whose whole predicted gradient fits, the best supported first."""
    accepted = []
    clean = Prediction(case.plan, case.sums, case.previous)
    for hypothesis in hypotheses(case.plan):
        if _fits(case, hypothesis, clean):
            found = count_mismatches(case.record, hypothesis.plan, case.tier, case.step)
            accepted.append(Accepted(hypothesis=hypothesis, mismatches=found))
    return sorted(accepted, key=lambda a: (a.mismatches, a.hypothesis.rank))


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
    """One measured factor for every cell of an accepted explanation, by joint least squares.

    What the explanation adds that is no coefficient (a stale buffer, a term at other sums) is
    taken off first; a term that has no coefficient gets none.
    """
    prediction = Prediction(plan, case.sums, case.previous)
    for holder in case.failing:
        where = (holder.pool, holder.unit, holder.rank)
        cells = prediction.coefficients(*where)
        cells = [c for c in cells if column(case, holder, c) is not None]
        known = [c for c in cells if c.weight is not None]
        if len(known) > MAX_INTERVALS:
            known = [c for c in whole_terms(case, holder) if c.term in {k.term for k in known}]
            cells = known
        predicted = prediction.gradient(*where)
        assert predicted is not None, where
        fit = fit_cells(case, holder, known, foreign=_foreign(case, holder, predicted, cells))
        values = dict(zip(map(id, known), zip(fit.values, fit.sigmas, strict=True), strict=True))
        for cell in cells:
            value, sigma = values.get(id(cell), (None, None))
            fraction = as_fraction(value, sigma)
            yield RecoveredCoefficient(
                params=holder.unit,
                ranks=holder.ranks,
                term=cell.term,
                producer=cell.producer,
                rows=None if covers_all(case, cell) else cell.rows,
                expected="1",
                recovered=value,
                sigma=sigma,
                fraction=str(fraction) if fraction is not None else None,
                identifiable=value is not None,
            )


def _foreign(
    case: Case, holder: Holder, predicted: dict[str, Tensor], cells: Sequence[Coefficient]
) -> Tensor:
    """The part of a predicted gradient that is no multiple of a partial, as a column."""
    total = flatten(holder, predicted)
    for cell in cells:
        part = column(case, holder, cell)
        if cell.weight is not None and part is not None:
            total = total - float(cell.weight) * part
    # A term without a coefficient stays in the measured gradient in place of its right partial.
    for cell in cells:
        part = column(case, holder, cell)
        if cell.weight is None and part is not None:
            total = total - part
    return total


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
    bad = [d for d in diffs if d.status == "fail" and not d.comparable]
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
