"""The Proof of one small plan, edge by edge: the coefficient of each fault, and what is found."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from records_in_memory import NUM_ROWS, planned_declaration, topology_of
from sumgrad.plan.edges import ONE, Plan, Transfer, build_plan, messages
from sumgrad.plan.proof import Cover, Sweep, expected_terms, prove

HALF = Fraction(1, 2)
CI = [("stoch", "b0"), ("stoch", "b1"), ("imp", "ci"), ("ppgd", "ppgd")]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The pool declared last cuts the rows where no other pool does."""
    blocks = {f"b{i}": {"role": "block", "axes": {"dp": 2}} for i in (0, 1)}
    ends = {"ci": {"axes": {"dp": 3}}, **blocks, "ppgd": {"axes": {"dp": 4}}}
    return build_plan(topology_of("mine", **ends), planned_declaration())


def changed(plan: Plan, edge: str, **change) -> Plan:
    return plan.with_edge(replace(plan.edge(edge), **change))


def wrong(plan: Plan) -> dict[tuple, Fraction | None]:
    """(pool, rank, unit, term, producer, rows) -> every weight that is not 1."""
    return {
        (c.pool, c.rank, c.unit, c.term, c.producer, c.rows): c.weight
        for c in prove(plan).coefficients
        if c.weight != 1
    }


def found(plan: Plan) -> list[tuple[str, str]]:
    return [(f.edge, f.text) for f in prove(plan).findings]


def test_the_lawful_plan_holds_everything_once(plan):
    proof = prove(plan)
    assert proof.holds
    assert proof.findings == ()
    whole = (0, NUM_ROWS)
    held = [(c.pool, c.rank, c.unit, c.term, c.producer, c.rows) for c in proof.coefficients]
    assert len(held) == len(set(held))
    assert set(held) == {
        *(("ci", None, "ci_fn", t, p, whole) for t, p in
          [("imp", "ci"), ("stoch", "b0"), ("stoch", "b1"), ("ppgd", "ppgd")]),
        *(("b0", None, "v", t, p, None if t == "faith" else whole) for t, p in
          [("stoch", "b0"), ("faith", "b0"), ("ppgd", "ppgd")]),
        *(("b1", None, "o", t, p, None if t == "faith" else whole) for t, p in
          [("stoch", "b1"), ("faith", "b1"), ("ppgd", "ppgd")]),
        *(("ppgd", None, unit, "ppgd", "ppgd", whole) for unit in ("v", "o")),
    }  # fmt: skip
    num = sum(len(list(messages(plan, t))) for t in plan.select(Transfer))
    assert proof.num_messages == num + 2
    assert not replace(proof, coefficients=(replace(proof.coefficients[0], weight=None),)).holds


def test_expected_terms_of_homes_and_replicas(plan):
    assert expected_terms(plan, "b1", "o") == [
        ("stoch", "b1"), ("faith", "b1"), ("ppgd", "ppgd")
    ]  # fmt: skip
    assert expected_terms(plan, "ppgd", "o") == [("ppgd", "ppgd")]
    assert sorted(expected_terms(plan, "ci", "ci_fn")) == sorted(CI)


@pytest.mark.parametrize(
    ("edge", "change", "holders", "weight"),
    [
        ("reduce:ci_fn@ci", {"weight": HALF}, [("ci", t, p) for t, p in CI], HALF),
        ("reduce:ci_fn@ci", {"op": "avg"}, [("ci", t, p) for t, p in CI], Fraction(1, 3)),
        ("reduce:v@b0", {"op": "avg"},
         [("b0", "stoch", "b0"), ("b0", "faith", "b0"), ("b0", "ppgd", "ppgd")], HALF),
        ("emit:imp@ci", {"weight": HALF}, [("ci", "imp", "ci")], HALF),
        ("emit:faith@b0", {"placement": "all"}, [("b0", "faith", "b0")], Fraction(2)),
        ("emit:faith@b0", {"weight": HALF}, [("b0", "faith", "b0")], HALF),
        ("emit:stoch@b1", {"weight": Fraction(3)},
         [("b1", "stoch", "b1"), ("ci", "stoch", "b1")], Fraction(3)),
        ("statistic:imp@ci", {"mode": "differentiable"}, [("ci", "imp", "ci")], Fraction(3)),
        ("statistic:imp@ci", {"mode": "local"}, [("ci", "imp", "ci")], None),
        ("statistic:imp@ci", {"weight": HALF}, [("ci", "imp", "ci")], None),
    ],
)  # fmt: skip
def test_the_coefficient_of_one_wrong_edge(plan, edge, change, holders, weight):
    bad = wrong(changed(plan, edge, **change))
    assert {(pool, term, producer) for pool, _, _, term, producer, _ in bad} == set(holders)
    assert set(bad.values()) == {weight}
    assert {f for f, _ in found(changed(plan, edge, **change))} == {edge}
    assert not prove(changed(plan, edge, **change)).holds


def test_a_handoff_carries_what_the_replicas_hold(plan):
    edge = next(e.name for e in plan.edges if e.name.startswith("handoff") and "b0" in e.name)
    bad = wrong(changed(plan, edge, weight=Fraction(0)))
    assert bad == {("b0", None, "v", "ppgd", "ppgd", (0, NUM_ROWS)): 0}
    assert found(changed(plan, edge, weight=HALF)) == [
        (edge, "carries the weight 1/2; the law allows only 1")
    ]
    replica = wrong(changed(plan, "reduce:o@ppgd", weight=HALF))
    assert {(pool, unit): w for (pool, _, unit, *_), w in replica.items()} == {
        ("ppgd", "o"): HALF, ("b1", "o"): HALF
    }  # fmt: skip


def test_a_skipped_reduction_leaves_each_rank_its_own_rows(plan):
    skipped = changed(plan, "reduce:ci_fn@ci", op="none")
    held = {(c.rank, c.term, c.producer, c.rows): c.weight for c in prove(skipped).coefficients}
    for rank in range(3):
        a, b = plan.rows(rank)
        for term, producer in CI:
            rows = {r: w for (k, t, p, r), w in held.items() if (k, t, p) == (rank, term, producer)}
            assert rows[a, b] == 1
            assert sum(stop - start for (start, stop), w in rows.items() if w == 1) == b - a
            assert sum(stop - start for start, stop in rows) == NUM_ROWS
            assert set(rows.values()) <= {0, 1}
    halved = changed(skipped, "reduce:ci_fn@ci", op="none", weight=HALF)
    assert {c.weight for c in prove(halved).coefficients if c.pool == "ci"} == {0, HALF}
    assert found(skipped) == [("reduce:ci_fn@ci", "is skipped: partial sums stay on their ranks")]


def test_one_lost_message_loses_its_rows_only(plan):
    for edge in (t for t in plan.select(Transfer) if t.kind == "cotangent"):
        for m in messages(plan, edge):
            lost = replace(edge, overrides=(((m.src, m.dst), Fraction(0)),))
            assert wrong(plan.with_edge(lost)) == {
                ("ci", None, "ci_fn", edge.term, edge.src, (m.a, m.b)): 0
            }
            assert (edge.name, f"rank {m.src} -> rank {m.dst}: is not sent") in found(
                plan.with_edge(lost)
            )
            twice = replace(edge, overrides=(((m.src, m.dst), Fraction(2)),))
            assert set(wrong(plan.with_edge(twice)).values()) == {2}
            same = replace(edge, overrides=(((m.src, m.dst), ONE),))
            assert prove(plan.with_edge(same)).holds


def test_what_is_found_of_an_edge(plan):
    assert found(changed(plan, "reduce:v@b0", op="avg")) == [
        ("reduce:v@b0", "reduces with AVG; the law says SUM")
    ]
    assert found(changed(plan, "reduce:v@b0", stale_rank=3)) == [
        ("reduce:v@b0", "rank 3 adds what it contributed in the previous step")
    ]
    assert found(changed(plan, "emit:faith@b1", placement="all")) == [
        ("emit:faith@b1", "a contribution from replicated inputs is emitted by every rank, not by "
         "one")
    ]  # fmt: skip
    for name in ("statistic:imp@ci", *(e.name for e in plan.edges
                                      if e.name.startswith(("count", "norm")))):  # fmt: skip
        assert (name, "does not hold every row once: weight 1/2") in found(
            changed(plan, name, weight=HALF)
        )
    for cuts in ((1, 3, 6, 8), (0, 3, 6, 7), (0, 6, 3, 8)):
        bad = replace(plan, offsets={**plan.offsets, "ci": cuts}, _by_name={})
        assert ("slices@ci", "rows of ci are not [0, 8) once") in [
            (f.edge, f.text) for f in _findings_of(bad)
        ]


def _findings_of(plan: Plan):
    from sumgrad.plan.proof import _findings

    return list(_findings(plan))


def test_what_one_rank_puts_into_a_reduction(plan):
    reduction = plan.edge("reduce:v@b0")
    sweep = Sweep(plan)
    for rank, once in ((3, 1), (4, 0)):
        parts = list(sweep.contribution(reduction, rank))
        assert {c.rank for c in parts} == {rank}
        by = {(c.term, c.rows): c.weight for c in parts}
        assert by["faith", None] == once
        assert by["stoch", plan.rows(rank)] == 1
        handed = {w for (t, _), w in by.items() if t == "ppgd"}
        assert handed == ({1} if rank == 3 else set())


def test_covers_count_rows_by_weight():
    cuts = np.array([0, 2, 5, 9])

    def rows(cover):
        return list(cover.intervals())

    cover = Cover(cuts)
    assert rows(cover) == [((0, 9), 0)]
    cover.add_rows(np.array([0, 2]), np.array([5, 5]), ONE)
    assert rows(cover) == [((0, 2), 1), ((2, 5), 2), ((5, 9), 0)]
    cover.add_rows(np.array([0, 5]), np.array([2, 9]), HALF)
    assert rows(cover) == [((0, 2), Fraction(3, 2)), ((2, 5), 2), ((5, 9), HALF)]
    cover.add_rows(np.array([0]), np.array([9]), Fraction(0))
    cover.once = Fraction(3)
    other = Cover(cuts)
    other.add(cover, HALF)
    assert rows(other) == [((0, 2), Fraction(3, 4)), ((2, 5), 1), ((5, 9), Fraction(1, 4))]
    assert other.once == Fraction(3, 2)
    other.add(cover, Fraction(0))
    assert rows(other)[1] == ((2, 5), 1)
    cover.exists = False
    other.add(cover, Fraction(0))
    assert other.exists
    other.add(cover, ONE)
    assert not other.exists
    # Two weights that add up to one are one interval, however they came about.
    flat = Cover(cuts)
    flat.add_rows(np.array([0]), np.array([2]), ONE)
    flat.add_rows(np.array([2, 2]), np.array([9, 9]), HALF)
    assert rows(flat) == [((0, 9), 1)]
    assert list(Cover(np.array([0])).intervals()) == []
