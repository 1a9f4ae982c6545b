"""One-edge faults of the plan: each predicts a whole gradient, and is asked whether it is this one.

Names come from the plan's edges first (which reduction, contribution or message gives this factor),
from sizes and their products second; the ledger and the digests may contradict a reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis, RecoveredCoefficient
from sumgrad.diagnose.case import (
    Case,
    Holder,
    column,
    deviation,
    fit_cells,
    flatten,
    ledger_against,
    recovered,
    whole_terms,
)
from sumgrad.diagnose.explainers.of_plans.hypotheses import Hypothesis, factor_names, hypotheses
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.plan.edges import Emission, Plan
from sumgrad.plan.predict import Prediction
from sumgrad.plan.proof import Coefficient
from torch import Tensor

MAX_INTERVALS = 48
MAX_ALSO = 4
MAX_LEFT = 0.01
AS_SIMPLE = 2  # a reading that is less simple by no more than this is said beside the chosen one


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A hypothesis that fits, and the failing holders it explains.

    contradictions: operations of its own edges that the ledger shows otherwise, and ranks that
    emitted what it says they did not.
    """

    hypothesis: Hypothesis
    explains: frozenset[int]
    contradictions: int


def edges_of_the_plan(case: Case, left: Left) -> Iterator[Explanation]:
    """Every one-edge fault that explains failing holders and is contradicted by no holder."""
    accepted = find_hypotheses(case) if case.has_plan else []
    for one in accepted:
        yield Explanation(
            diagnosis=_explain(case, one, accepted),
            explains=one.explains,
            contradictions=one.contradictions,
            complexity=one.hypothesis.rank,
            coefficients=partial(_coefficients, case, one.hypothesis.plan),
        )


def _coefficients(case: Case, plan: Plan, chosen: Left) -> list[RecoveredCoefficient]:
    return list(_measure(case, plan, [case.failing[i] for i in sorted(chosen)]))


def find_hypotheses(case: Case) -> list[Accepted]:
    """Every one-edge fault that explains failing holders and is contradicted by no holder."""
    accepted = []
    clean = Prediction(case.plan, case.sums, case.previous_sums)
    for hypothesis in hypotheses(case.plan, with_stale=case.previous_sums is not None):
        explains = _explained(case, hypothesis, clean)
        if explains:
            accepted.append(
                Accepted(
                    hypothesis=hypothesis,
                    explains=explains,
                    contradictions=_contradictions(case, hypothesis),
                )
            )
    return accepted


def _explained(case: Case, hypothesis: Hypothesis, clean: Prediction) -> frozenset[int]:
    """Failing holders whose whole gradient it predicts; none if it is wrong on any holder."""
    prediction = Prediction(hypothesis.plan, case.sums, case.previous_sums)
    stale = {edge for edge in hypothesis.edges if hypothesis.kind == "stale_buffer"}
    found: set[int] = set()
    failing = {id(holder): i for i, holder in enumerate(case.failing)}
    for holder in [*case.failing, *(h for h in case.holders if not h.failing)]:
        where = (holder.pool, holder.unit, holder.rank)
        coefficients = prediction.coefficients(*where)
        touched = f"reduce:{holder.unit}@{holder.pool}" in stale
        if not touched and _same(coefficients, clean.coefficients(*where)):
            continue
        gradient = prediction.gradient(*where)
        if gradient is None:
            return frozenset()
        largest = max((abs(float(c.weight)) for c in coefficients if c.weight), default=1.0)
        if not all(holder.passes(n, g, factor=largest) for n, g in gradient.items()):
            return frozenset()
        if id(holder) in failing and _reduces(holder, gradient):
            found.add(failing[id(holder)])
    return frozenset(found)


def _reduces(holder: Holder, gradient: dict[str, Tensor]) -> bool:
    """Whether the prediction leaves a hundredth of the deviation's energy at most.

    Just above the threshold nearly everything fits; what explains nothing is no cause.
    """
    left = flatten(holder, {n: holder.measured[n] - g for n, g in gradient.items()})
    return float(left.square().sum()) <= MAX_LEFT * float(deviation(holder).square().sum())


def _contradictions(case: Case, hypothesis: Hypothesis) -> int:
    """Where the ledger and the digests of its own edges say something else."""
    found = [
        m
        for m in ledger_against(case.record, hypothesis.plan, case.tier, case.step)
        if m.edge in hypothesis.edges
    ]
    wrong = 0
    for name in hypothesis.edges:
        edge = hypothesis.plan.edge(name)
        if isinstance(edge, Emission) and edge.placement != "rows" and edge.weight != 0:
            pool = case.plan.topology.pool(edge.pool)
            planned = set(pool.ranks) if edge.placement == "all" else {pool.ranks[0]}
            wrong += len(planned ^ set(_emitters(case, name)) & set(case.record.ranks))
    return len(found) + wrong


def _emitters(case: Case, edge: str) -> list[int]:
    """Ranks whose digests show that they emitted this contribution."""
    return [
        rank
        for rank, held in sorted(case.record.ranks.items())
        for info in [held.info.get((case.tier, case.step), {"digests": []})]
        if any(digest["edge"] == edge for digest in info["digests"])
    ]


def _same(a: Sequence[Coefficient], b: Sequence[Coefficient]) -> bool:
    def key(items: Sequence[Coefficient]) -> list[tuple[object, ...]]:
        return [(c.term, c.producer, c.rows, c.weight) for c in items]

    return key(a) == key(b)


def _explain(case: Case, best: Accepted, accepted: Sequence[Accepted]) -> Diagnosis:
    chosen = best.hypothesis
    equal = [
        a.hypothesis
        for a in accepted
        if a is not best
        and (a.explains, a.contradictions) == (best.explains, best.contradictions)
        and a.hypothesis.rank <= chosen.rank + AS_SIMPLE
    ]
    also = [h.cause for h in equal] + _other_names(case.plan, chosen)
    num_tensors = sum(len(case.failing[i].expected) for i in best.explains)
    because = [
        f"its predicted gradient equals the measured one on {num_tensors} failing tensors, and "
        f"contradicts no other, within the threshold of the {case.tier} tier",
        *_ledger_evidence(case, best),
        *_digest_evidence(case, chosen),
    ]
    however = []
    if best.contradictions:
        however.append(
            f"the ledger or the digests contradict this reading {best.contradictions} times"
        )
    if also:
        however.append("other readings fit as well; three_pool_primes.yaml separates them")
    return chosen.diagnosis(
        also=tuple(dict.fromkeys(also))[:MAX_ALSO],
        because=tuple(because),
        however=tuple(however),
        standing="likely" if also or best.contradictions else "proved",
    )


def _other_names(plan: Plan, best: Hypothesis) -> list[str]:
    if best.kind != "factor" or best.factor is None:
        return []
    return [n for n in factor_names(plan).get(best.factor, []) if n != best.symbol]


def _ledger_evidence(case: Case, best: Accepted) -> list[str]:
    own = [m for m in case.mismatches if m.edge in best.hypothesis.edges]
    if not own:
        return ["the ledger of its edges equals the plan: the fault is not in a collective"]
    return [f"the ledger shows it: {own[0]}"] if not best.contradictions else []


def _digest_evidence(case: Case, best: Hypothesis) -> list[str]:
    """Which ranks emitted a replicated term, from the digests taken before the reduction."""
    out = []
    for name in best.edges:
        edge = case.plan.edge(name)
        if isinstance(edge, Emission) and edge.placement == "leader":
            listed = spans(_emitters(case, name)) or "none"
            leader = case.plan.leader(edge.pool)
            out.append(
                f"ranks that emitted {edge.term} in {edge.pool}: {listed}; the plan names only "
                f"rank {leader}"
            )
    return out


def _measure(case: Case, plan: Plan, chosen: Sequence[Holder]) -> Iterator[RecoveredCoefficient]:
    """One measured factor for every cell of an accepted explanation, by joint least squares.

    What the explanation adds that is no coefficient (a stale buffer, a term at other sums) is
    taken off first; a term that has no coefficient gets none. Outside float64 there is one factor
    for each term, and none where something had to be taken off.
    """
    prediction = Prediction(plan, case.sums, case.previous_sums)
    exact = case.record.spec.tiers[case.tier] == "float64"
    for holder in chosen:
        where = (holder.pool, holder.unit, holder.rank)
        cells = prediction.coefficients(*where)
        cells = [c for c in cells if column(case, holder, c) is not None]
        known = [c for c in cells if c.weight is not None]
        if not exact and len(known) < len(cells):
            known = []
        if len(known) > MAX_INTERVALS or (known and not exact):
            known = [c for c in whole_terms(case, holder) if c.term in {k.term for k in known}]
            cells = known
        predicted = prediction.gradient(*where)
        assert predicted is not None, where
        fit = fit_cells(case, holder, known, foreign=_foreign(case, holder, predicted, cells))
        values = dict(zip(map(id, known), zip(fit.values, fit.sigmas, strict=True), strict=True))
        for cell in cells:
            value, sigma = values.get(id(cell), (None, None))
            yield recovered(case, holder, cell, value, sigma)


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
