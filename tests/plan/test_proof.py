"""The Plan and its Proof: lawful plans are proved, every mutation is seen, a slow oracle agrees."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import RUNNABLE, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sumgrad.base.errors import UserError
from sumgrad.faults.plan import plan_faults
from sumgrad.plan.edges import (
    Emission,
    Handoff,
    Plan,
    Reduction,
    Statistic,
    Transfer,
    build_plan,
    messages,
    row_owner,
)
from sumgrad.plan.proof import prove
from sumgrad.subjects.planned.workload import load_workload
from sumgrad.topology.pools import parse_topology
from sumgrad.topology.yaml_source import YamlSource


def make_plan(ci: int, blocks: list[int], ppgd: int, rows: int, **pools: dict) -> Plan:
    data = {
        "name": "t",
        "workload": "three_pool",
        "options": {"rows": rows, "length": 3},
        "pools": {
            "ci": {"axes": {"dp": ci}, **pools.get("ci", {})},
            **{
                f"b{i}": {"role": "block", "axes": {"dp": n}, **pools.get(f"b{i}", {})}
                for i, n in enumerate(blocks)
            },
            "ppgd": {"axes": {"dp": ppgd}, **pools.get("ppgd", {})},
        },
    }
    topology = parse_topology(YamlSource(path=Path("t"), data=data, lines={}))
    return build_plan(topology, load_workload("three_pool", topology, seed=0).declaration)


@pytest.mark.parametrize("name", [*RUNNABLE, "three_pool_planet"])
def test_shipped_plans_are_proved(name):
    proof = prove(plan_of(name))
    assert proof.holds
    assert proof.coefficients
    assert proof.num_messages > 0


def test_planet_size():
    plan = plan_of("three_pool_planet")
    assert plan.topology.world_size == 90112
    assert plan.declaration.num_rows == 1_000_003
    assert len(set(plan.declaration.row_lengths)) > 10


@pytest.mark.parametrize("name", RUNNABLE)
def test_every_weight_changes_the_proof(name):
    plan = plan_of(name)
    for edge in plan.edges:
        for weight in (Fraction(2), Fraction(1, 3), Fraction(0)):
            proof = prove(plan.with_edge(replace(edge, weight=weight)))
            assert not proof.holds, f"{edge.name} x {weight} was not seen"


@pytest.mark.parametrize("name", ["three_pool", "three_pool_ragged", "three_pool_empty"])
def test_every_message_changes_the_proof(name):
    plan = plan_of(name)
    for transfer in plan.select(Transfer):
        for m in messages(plan, transfer):
            lost = replace(transfer, overrides=(((m.src, m.dst), Fraction(0)),))
            assert not prove(plan.with_edge(lost)).holds


@pytest.mark.parametrize("fault", sorted(plan_faults()))
def test_every_plan_fault_is_refuted(fault):
    assert not prove(plan_faults()[fault].plant(plan_of("three_pool_ragged"))).holds


def test_coefficients_of_known_faults():
    plan = plan_of("three_pool")
    averaged = prove(plan_faults()["avg_on_ci"].plant(plan))
    of_ci = {c.weight for c in averaged.coefficients if c.unit == "ci_fn"}
    assert of_ci == {Fraction(1, 4)}
    doubled = prove(plan_faults()["faith_on_all_ranks"].plant(plan))
    assert {c.weight for c in doubled.coefficients if c.term == "faith"} == {Fraction(2)}
    assert {c.weight for c in doubled.coefficients if c.term != "faith"} == {Fraction(1)}
    pair = prove(plan_faults()["times_ci_then_avg"].plant(plan))
    assert {c.weight for c in pair.coefficients} == {Fraction(1)}
    assert not pair.holds


def test_symbolic_planet_fault_is_refuted():
    proof = prove(plan_faults()["drop_message"].plant(plan_of("three_pool_planet")))
    wrong = [c for c in proof.coefficients if c.weight != 1]
    assert len(wrong) == 1
    assert wrong[0].term == "stoch"


def oracle(plan: Plan, pool: str, unit: str, rank: int) -> Counter:
    """The same coefficients, one row and one rank at a time, with no interval and no array."""
    reduction = plan.edge(f"reduce:{unit}@{pool}")
    assert isinstance(reduction, Reduction)
    members = plan.topology.pool(pool).ranks if reduction.op != "none" else [rank]
    total: Counter = Counter()
    for member in members:
        a, b = plan.rows(member)
        for edge in plan.select(Emission, pool=pool):
            if edge.placement == "rows":
                weight = edge.weight
                for statistic in plan.select(Statistic, pool=pool):
                    if statistic.term == edge.term and statistic.mode == "differentiable":
                        weight *= plan.topology.pool(pool).size
                for row in range(a, b):
                    total[edge.term, pool, row] += weight
            elif edge.placement == "all" or member == plan.leader(pool):
                total[edge.term, pool, None] += edge.weight
        for edge in plan.select(Transfer):
            if edge.kind == "cotangent" and edge.dst == pool:
                emission = plan.edge(f"emit:{edge.term}@{edge.src}")
                for row in range(a, b):
                    sender = row_owner(plan, edge.src, row)
                    weight = dict(edge.overrides).get((sender, member), edge.weight)
                    total[edge.term, edge.src, row] += weight * emission.weight
        for edge in plan.select(Handoff):
            if edge.dst_rank == member and unit in edge.units:
                for key, weight in oracle(plan, edge.src, unit, edge.src_rank).items():
                    total[key] += weight * edge.weight
    factor = reduction.weight / (len(members) if reduction.op == "avg" else 1)
    return Counter({key: weight * factor for key, weight in total.items()})


def expand(plan: Plan, pool: str, unit: str, rank: int) -> Counter:
    out: Counter = Counter()
    for c in prove(plan).coefficients:
        if (c.pool, c.unit) == (pool, unit) and c.rank in (None, rank):
            assert c.weight is not None
            for row in range(*c.rows) if c.rows else [None]:
                out[c.term, c.producer, row] += c.weight
    return out


def agrees_with_oracle(plan: Plan) -> None:
    for pool in plan.topology.pools:
        for unit in plan.units[pool.name][:1]:
            for rank in {pool.ranks[0], pool.ranks[-1]}:
                assert +expand(plan, pool.name, unit, rank) == +oracle(plan, pool.name, unit, rank)


sizes = st.integers(1, 5)


@settings(max_examples=25, deadline=None)
@given(ci=sizes, blocks=st.lists(sizes, min_size=1, max_size=3), ppgd=sizes, rows=st.integers(1, 9))
def test_any_sizes_are_proved_and_agree_with_the_oracle(ci, blocks, ppgd, rows):
    plan = make_plan(ci, blocks, ppgd, rows)
    assert prove(plan).holds
    agrees_with_oracle(plan)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ci=sizes, blocks=st.lists(sizes, min_size=1, max_size=2), ppgd=sizes)
def test_mutated_plans_agree_with_the_oracle(data, ci, blocks, ppgd):
    plan = make_plan(ci, blocks, ppgd, 7)
    for _ in range(data.draw(st.integers(1, 3))):
        kinds = (Emission, Transfer, Handoff, Reduction)
        edge = data.draw(st.sampled_from([e for e in plan.edges if isinstance(e, kinds)]))
        weight = data.draw(st.fractions(0, 3, max_denominator=4))
        change: dict = {"weight": weight}
        if isinstance(edge, Reduction):
            change["op"] = data.draw(st.sampled_from(["sum", "avg", "none"]))
        if isinstance(edge, Transfer):
            m = data.draw(st.sampled_from(messages(plan, replace(edge, weight=Fraction(1)))))
            change["overrides"] = (((m.src, m.dst), Fraction(5)),)
        plan = plan.with_edge(replace(edge, **change))
    agrees_with_oracle(plan)


def test_slices_are_checked_against_the_batch():
    plan = make_plan(2, [3], 1, 5, b0={"rows_per_rank": [0, 5, 0]})
    assert plan.rows(plan.topology.pool("b0").ranks[1]) == (0, 5)
    assert prove(plan).holds
    with pytest.raises(UserError, match="got 4 rows in all, expected the batch's 5"):
        make_plan(2, [3], 1, 5, b0={"rows_per_rank": [0, 4, 0]})
