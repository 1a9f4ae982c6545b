"""Records made by hand, for tests of what judges them: no process, no model, known thresholds.

Every gradient is a small integer, so that sums are exact; the scale is SCALE everywhere and the
floors are chosen, so that a test knows each threshold without asking the code that it tests.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sumgrad.base.outcome import RankOutcome
from sumgrad.judge.cells import compare
from sumgrad.judge.checks.ledgers import ledger_mismatches
from sumgrad.judge.finding import Check, Compared, Finding
from sumgrad.plan.edges import Count, Norm, Plan, build_plan
from sumgrad.plan.proof import expected_terms
from sumgrad.plan.schedule import schedule
from sumgrad.record.directory import Record
from sumgrad.record.ranks import RankRecord
from sumgrad.record.reference import Reference
from sumgrad.record.spec import Facts, RunSpec
from sumgrad.topology.declaration import Declaration, Param, Quantity, Role, Term
from sumgrad.topology.pools import Topology, parse_topology
from sumgrad.topology.yaml_source import YamlSource

SCALE = 1.0
FLOOR = 1e-13  # of the structure tier; 4 times it is the threshold
FLOORS = {"structure": FLOOR, "precision": 1e-6}
TIERS = {"structure": "float64", "precision": "float32"}
NUM_ROWS = 8


def topology_of(workload: str = "mine", **pools: dict[str, Any]) -> Topology:
    data = {"name": "t", "workload": workload, "pools": pools}
    return parse_topology(YamlSource(path=Path("t"), data=data, lines={}))


def planned_topology() -> Topology:
    """Nine ranks, more than five: two blocks, a pool whose quantity they read, and replicas."""
    return topology_of(
        "mine",
        ci={"axes": {"dp": 3}},
        b0={"role": "block", "axes": {"dp": 2}},
        b1={"role": "block", "axes": {"dp": 2}},
        ppgd={"axes": {"dp": 2}},
    )


def planned_declaration() -> Declaration:
    """Every kind of term; a parameter more in each unit than one, and a bias."""
    shapes = {
        "v.V": (2, 3),
        "v.U": (3, 2),
        "o.V": (2, 3),
        "o.U": (3,),
        "ci.w": (4, 3),
        "ci.b": (4,),
    }
    units = {"v": "v", "o": "o", "ci": "ci_fn"}
    return Declaration(
        workload="mine",
        row_lengths=(2, 3, 1, 3, 2, 1, 3, 2),
        params=tuple(
            Param(name=n, unit=units[n.partition(".")[0]], shape=s) for n, s in shapes.items()
        ),
        roles=(
            Role(name="ci", units=("ci_fn",), home=True),
            Role(name="block", units=("v", "o"), home=True, shared_by_pools=True),
            Role(name="ppgd", units=("v", "o"), home=False),
        ),
        quantity=Quantity(name="g", role="ci", shapes={"v": (2,), "o": (3,)}),
        terms=(
            Term(name="stoch", role="block", kind="rows", reads_quantity=True),
            Term(name="faith", role="block", kind="replicated"),
            Term(name="imp", role="ci", kind="statistic", statistic_numel=5),
            Term(name="ppgd", role="ppgd", kind="rows", reads_quantity=True),
        ),
    )


def integers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """1, 2 or 3 with either sign, float64."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(1, 4, shape, generator=generator).double()
    return size * (2 * torch.randint(0, 2, shape, generator=generator) - 1)


def spread(value: torch.Tensor, *, shift: int) -> torch.Tensor:
    """(NUM_ROWS, *shape) that sums to `value` exactly; no two rows have one direction."""
    shares = torch.tensor([2.0 ** -min(i + 1, NUM_ROWS - 1) for i in range(NUM_ROWS)]).double()
    row, place = torch.arange(NUM_ROWS)[:, None], torch.arange(value.numel())[None]
    share = shares[(row + place + shift) % NUM_ROWS]
    return (share * value.reshape(1, -1)).view(NUM_ROWS, *value.shape)


def planned_partials(plan: Plan, step: int) -> dict[tuple[str, str], dict[str, torch.Tensor]]:
    """(term, producer) -> name -> its partials by rows; one whole for a replicated term."""
    out: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    for i, param in enumerate(plan.declaration.params):
        for j, (term, producer) in enumerate(
            expected_terms(plan, plan.home(param.unit), param.unit)
        ):
            value = integers(param.shape, 100 * i + 10 * j + step)
            whole = plan.declaration.term(term).kind == "replicated"
            out.setdefault((term, producer), {})[param.name] = (
                value[None].clone() if whole else spread(value, shift=j)
            )
    return out


def planned_reference(plan: Plan, tier: str, step: int) -> Reference:
    """Exact sums of the partials; every floor and the scale as chosen above."""
    partials = planned_partials(plan, step)
    names = [p.name for p in plan.declaration.params]
    terms = [t.name for t in plan.declaration.terms]
    by_term = {
        t: {p.name: torch.zeros(p.shape).double() for p in plan.declaration.params} for t in terms
    }
    for (term, _), grads in partials.items():
        for name, rows in grads.items():
            by_term[term][name] += rows.sum(0)
    grads = {n: torch.stack([by_term[t][n] for t in terms]).sum(0) for n in names}
    norm = float(torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt())
    floor = FLOORS[tier]
    return Reference(
        step=step,
        grads=grads,
        by_term=by_term,
        resolution={t: dict.fromkeys(names, 1e-20) for t in terms},
        scale={p.name: SCALE for p in plan.declaration.params},
        floor=dict.fromkeys(names, floor),
        floor_by_term={t: dict.fromkeys(names, floor / 4) for t in terms},
        same_dtype={n: g.clone() for n, g in grads.items()},
        norm=norm,
        norm_floor=floor * norm,
        counts={t: 10 + i for i, t in enumerate(terms)},
        weights="1234",
        partials=partials,
    )


def planned_record(*, steps: int = 2, tiers: dict[str, str] | None = None) -> Record:
    """A run in which every rank did right."""
    topology, tiers = planned_topology(), TIERS if tiers is None else tiers
    declaration = planned_declaration()
    plan = build_plan(topology, declaration)
    references = {t: [planned_reference(plan, t, s) for s in range(steps)] for t in tiers}
    spec = RunSpec(
        topology=topology, declaration=declaration, workload="mine", seed=0, steps=steps,
        tiers=tiers, fault=None, law="enforce", kernels="torch", timeout_s=1.0, reproduce="again",
        versions={},
    )  # fmt: skip
    ranks = {r: _planned_rank(plan, r, references, tiers) for r in range(topology.world_size)}
    return Record(
        directory=Path("nowhere"), spec=spec, outcomes=outcomes(topology), ranks=ranks,
        references=references,
    )  # fmt: skip


def outcomes(topology: Topology) -> tuple[RankOutcome, ...]:
    return tuple(
        RankOutcome(rank=r, pool=topology.pool_of(r).name, status="ok", exit_code=0)
        for r in range(topology.world_size)
    )


def _planned_rank(
    plan: Plan, rank: int, references: dict[str, list[Reference]], tiers: dict[str, str]
) -> RankRecord:
    pool = plan.topology.pool_of(rank).name
    (edge,) = plan.select(Norm)
    terms = [t for count in plan.select(Count, pool=pool) for t in count.terms]
    grads, info, events = {}, {}, {}
    for tier, dtype in tiers.items():
        for ref in references[tier]:
            key = (tier, ref.step)
            grads[key] = {}
            for unit in plan.units[pool]:
                wanted = dict.fromkeys(t for t, _ in expected_terms(plan, pool, unit))
                for p in plan.declaration.params_of(unit):
                    parts = torch.stack([ref.by_term[t][p.name] for t in wanted])
                    grads[key][p.name] = parts.sum(0).to(getattr(torch, dtype))
            info[key] = {
                "counts": {t: ref.counts[t] for t in terms},
                "norm": ref.norm,
                "clipped_norm": min(1.0, edge.max_norm / (ref.norm + 1e-6)) * ref.norm,
                "weights": ref.weights,
                "digests": [],
            }
            events[key] = planned_events(plan, rank, dtype, tier, ref.step)
    return RankRecord(rank=rank, grads=grads, info=info, events=events, stray=(), ledger_whole=True)


def planned_events(plan: Plan, rank: int, dtype: str, tier: str, step: int) -> list[dict[str, Any]]:
    return [
        {
            "n": n, "label": f"{tier}/{step}/{o.edge}", "op": o.op, "reduce": o.reduce,
            "group": list(o.group), "dtype": o.dtype, "numel": o.numel, "peer": o.peer,
            "tag": o.tag, "site": "step.py:1",
        }
        for n, o in enumerate(schedule(plan, rank, dtype))
    ]  # fmt: skip


# ---- a Program -----------------------------------------------------------------------------------

SHAPES = {"w": (4, 3), "b": (3,)}
TERMS = ("main", "aux")


def program_reference(tier: str = "structure", step: int = 0, **change: Any) -> Reference:
    by_term = {
        t: {n: integers(s, 7 * i + j + 50 * step) for j, (n, s) in enumerate(SHAPES.items())}
        for i, t in enumerate(TERMS)
    }
    grads = {n: by_term["main"][n] + by_term["aux"][n] for n in SHAPES}
    partials = {
        (t, "all"): {n: (g / NUM_ROWS).expand(NUM_ROWS, *g.shape).clone() for n, g in held.items()}
        for t, held in by_term.items()
    }
    reference = Reference(
        step=step,
        grads=grads,
        by_term=by_term,
        resolution={t: dict.fromkeys(SHAPES, 1e-20) for t in TERMS},
        scale=dict.fromkeys(SHAPES, SCALE),
        floor=dict.fromkeys(SHAPES, FLOORS[tier]),
        floor_by_term={t: dict.fromkeys(SHAPES, FLOORS[tier]) for t in TERMS},
        same_dtype={n: g.clone() for n, g in grads.items()},
        norm=1.0,
        norm_floor=FLOORS[tier],
        counts=dict.fromkeys(TERMS, 8),
        weights="1234",
        kinds=dict.fromkeys(TERMS, "rows"),
        reached=tuple(SHAPES),
        partials=partials,
        intervals=tuple((i, i + 1) for i in range(NUM_ROWS)),
        row_counts={t: (1.0,) * NUM_ROWS for t in TERMS},
    )
    return replace(reference, **change)


def program_record(
    *,
    tiers: dict[str, str] | None = None,
    steps: int = 1,
    ranks: int = 3,
    law: str = "report",
    index: dict[int, dict[str, torch.Tensor]] | None = None,
) -> Record:
    """A Program's run in which every rank did right. index: rank -> name -> its shard."""
    topology = topology_of(train={"axes": {"dp": ranks}})
    tiers = TIERS if tiers is None else tiers
    facts = Facts(
        params=SHAPES, num_rows=NUM_ROWS, terms=TERMS, rows_as="tensors", float64=None,
        problems=(), weights="built", batch="drawn",
    )  # fmt: skip
    spec = RunSpec(
        topology=topology, facts=facts, workload="mine", seed=0, steps=steps, tiers=tiers,
        skipped={}, fault=None, law=law, timeout_s=1.0, reproduce="again", versions={},
    )  # fmt: skip
    references = {t: [program_reference(t, s) for s in range(steps)] for t in tiers}
    held = {r: _program_rank(r, references, tiers, (index or {}).get(r, {})) for r in range(ranks)}
    return Record(
        directory=Path("nowhere"), spec=spec, outcomes=outcomes(topology), ranks=held,
        references=references,
        started={r: [e for kept in held[r].events.values() for e in kept] for r in range(ranks)},
    )  # fmt: skip


def _program_rank(
    rank: int,
    references: dict[str, list[Reference]],
    tiers: dict[str, str],
    index: dict[str, torch.Tensor],
) -> RankRecord:
    grads, info, events = {}, {}, {}
    for tier, dtype in tiers.items():
        for ref in references[tier]:
            events[tier, ref.step] = [
                {
                    "n": len(events), "call": 0, "label": f"{tier}/{ref.step}/step",
                    "op": "allreduce", "reduce": "SUM", "group": "0-2", "dtype": dtype, "numel": 15,
                    "site": "mine.py:9", "pg": "0",
                }
            ]  # fmt: skip
            grads[tier, ref.step] = {
                n: (g.reshape(-1)[index[n]] if n in index else g).to(getattr(torch, dtype))
                for n, g in ref.grads.items()
            }
            info[tier, ref.step] = {
                "tier": tier, "step": ref.step, "changed_weights": [], "other_weights": [],
                "races": [], "partial": [], "unwaited": [], "backwards": 1,
                "fault": {"calls": 0, "changed": 0},
                "feeds": [{"call": 0, "grads": [[n, 1.0] for n in SHAPES]}],
            }  # fmt: skip
    last_tier = list(tiers)[-1]
    last = grads[last_tier, len(references[last_tier]) - 1]
    return RankRecord(
        rank=rank, grads=grads, again={n: g.clone() for n, g in last.items()},
        again_tier=last_tier,
        index=index, params=tuple(SHAPES), unknown=(), built="built", batch="drawn", info=info,
        events=events, stray=(), ledger_whole=True,
    )  # fmt: skip


def with_rank(record: Any, rank: int, **change: Any) -> Any:
    """The record with one rank's fields changed."""
    return replace(record, ranks={**record.ranks, rank: replace(record.ranks[rank], **change)})


def compared(record: Record, *, again: Any = ()) -> Compared:
    """A record, compared."""
    return Compared(
        record=record, diffs=compare(record), again=again, mismatches=ledger_mismatches(record)
    )


def found(check: Check, record: Record, *, again: Any = ()) -> list[Finding]:
    """What a check finds in a record."""
    return list(check(compared(record, again=again)))


def texts(check: Check, record: Record) -> list[str]:
    """The words of what a check finds."""
    return [finding.text for finding in found(check, record)]
