"""The kill matrix of Programs: which of a step's collectives could go wrong unnoticed?

A clean run first: it must pass, and its ledger says what can misbehave. Then every fault, one after
the other on the same ranks. A fault that changed a bit must be killed and named; one that changed
none is invisible here and must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from sumgrad.base.errors import UserError
from sumgrad.base.outcome import RankOutcome, first_to_fail
from sumgrad.base.tensors import same_bits
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.verdict import judge
from sumgrad.faults.collective import KINDS, CollectiveFault, faults_for
from sumgrad.faults.step import ProgramFault, find_program_fault, step_faults, variants
from sumgrad.judge.joint import carries, fed, joint_operations
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher, RankJob
from sumgrad.launch.matrix.cells import Cell
from sumgrad.launch.matrix.warm_rank import fault_directory
from sumgrad.ledger.operations import number_operations
from sumgrad.record.directory import Record, load_record, read_ranks
from sumgrad.record.spec import write_spec

STEPS = 2  # a stale buffer needs the second
Progress = Callable[[str], None]

# A collective that carries no gradient (an activation, a count) may also be named like this.
EXCHANGED = {
    "avg": ("avg",),
    "skip": ("skipped_collective",),
    "double": ("double_reduction",),
    "subgroup": ("wrong_group",),
    "copy": ("unused_result",),
    "missing_wait": ("unused_result", "missing_wait"),
    "stale": ("stale_buffer",),
    "early": ("lost_contribution",),
    "low_precision": ("low_precision",),
    "scale_one": ("changed_input", "rank_factor"),
    "drop": ("unused_result",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One fault's run: its record, or how the ranks ended where there is none."""

    fault: str
    record: Record | None
    ended: RankOutcome | None


def run_program_matrix(
    path: Path,
    *,
    workload: str | None,
    faults: Sequence[str] | None,
    quick: bool = False,
    seed: int,
    timeout_s: float,
    launcher: Launcher,
    progress: Progress,
) -> list[Cell]:
    """All cells of one Program on one topology. faults: only these. Raises UserError.

    quick: of the operations of a kind over an axis only the first, and the first with gradients.
    """
    with launcher.temporary_directory() as directory:
        options = CheckOptions(
            topology=path,
            workload=workload,
            seed=seed,
            steps=STEPS,
            tiers=("structure",),
            timeout_s=timeout_s,
            out=directory / "clean",
        )
        progress(f"{path.stem}: clean")
        verdict, stored = run_check(options, launcher=launcher)
        clean = load_record(stored)
        cells = [_clean_cell(path.stem, clean, verdict)]
        if verdict.status != "pass":
            return cells
        chosen = _chosen(clean, faults)
        chosen = _first_of_each(clean, chosen) if quick else chosen
        for ran in run_faults(clean, chosen, directory, launcher=launcher, progress=progress):
            cells.append(cell_of(path.stem, clean, ran))
        return cells


def all_faults(clean: Record) -> list[str]:
    """Every fault that a clean run's Program can have on its topology, by name."""
    spec = clean.spec
    operations = [
        number_operations(spec.topology, rank, held.events.get((next(iter(spec.tiers)), 0), []))
        for rank, held in clean.ranks.items()
    ]
    collective = [fault.name for fault in faults_for(operations)]
    own = [name for name, fault in variants().items() if fault.workload == spec.workload]
    return [*collective, *step_faults(), *own]


def _chosen(clean: Record, faults: Sequence[str] | None) -> list[str]:
    known = all_faults(clean)
    if not faults:
        return known
    for name in faults:
        find_program_fault(name, clean.spec.workload)
    chosen = [k for k in known if any(k == f or k.startswith(f"{f}#") for f in faults)]
    if not chosen:
        raise UserError(
            f"--fault {', '.join(faults)}: nothing of {clean.spec.workload} on "
            f"{clean.spec.topology.name} can have it; it can have {', '.join(known[:8])} ..."
        )
    return chosen


def _first_of_each(clean: Record, faults: Sequence[str]) -> list[str]:
    """Of faults of one kind in one stream, those of the first operation and the first gradient."""
    carrying = gradient_operations(clean)
    seen: set[tuple[str, bool]] = set()
    out = []
    for name in faults:
        stream, _, number = name.partition("#")
        key = (stream, name.partition(":")[2] in carrying)
        if not number or key not in seen:
            out.append(name)
        seen.add(key)
    return out


def run_faults(
    clean: Record,
    faults: Sequence[str],
    directory: Path,
    *,
    launcher: Launcher,
    progress: Progress,
) -> list[Ran]:
    """Run faults on warm ranks; ranks are started again only behind a fault that ended them."""
    out: list[Ran] = []
    topology = clean.spec.topology
    while len(out) < len(faults):
        left = list(faults[len(out) :])
        place = directory / f"job{len(out)}"
        (place / "ranks").mkdir(parents=True)
        write_spec(place, clean.spec)
        job = RankJob(
            target="sumgrad.launch.matrix.warm_rank:run_faults",
            num_ranks=topology.world_size,
            directory=place,
            pools=[topology.pool_of(r).name for r in range(topology.world_size)],
            arguments={"faults": left},
            timeout_s=clean.spec.timeout_s,
        )
        progress(f"{topology.name}: {len(left)} faults, {left[0]} first")
        outcomes = launcher.run(job)
        done = 0
        for i, fault in enumerate(left):
            record = _record_of(clean, fault, fault_directory(place, i))
            if record is None:
                break
            out.append(Ran(fault=fault, record=record, ended=None))
            done += 1
        bad = [o for o in outcomes if not o.ok]
        if bad and done == len(left):  # all was written, but a rank did not survive it
            done -= 1
            out.pop()
        if done < len(left):
            ended = first_to_fail(bad) if bad else outcomes[0]
            out.append(Ran(fault=left[done], record=None, ended=ended))
    return out


def _record_of(clean: Record, fault: str, place: Path) -> Record | None:
    """A fault's record beside the clean run's reference; None if a rank did not finish it."""
    ranks, started, damage = read_ranks(place, clean.spec)
    if len(ranks) < clean.spec.topology.world_size:
        return None
    steps = find_program_fault(fault, clean.spec.workload).min_steps
    return replace(
        clean,
        directory=place,
        spec=replace(clean.spec, fault=fault, steps=steps),
        references={tier: held[:steps] for tier, held in clean.references.items()},
        ranks=ranks,
        started=started,
        damage=tuple(damage),
    )


def _clean_cell(topology: str, clean: Record, verdict: Verdict) -> Cell:
    ended_well = all(o["status"] == "ok" for o in verdict.data["outcomes"])
    result = "clean" if verdict.status == "pass" else "alarm" if ended_well else "crashed"
    why = next(iter([*verdict.reasons, *verdict.findings]), None)
    why = verdict.diagnoses[0].cause if verdict.diagnoses else why
    return Cell(
        topology=topology, workload=clean.spec.workload, fault=None, result=result, cause=why
    )


def cell_of(topology: str, clean: Record, ran: Ran) -> Cell:
    """What one fault's run means."""
    base = Cell(topology=topology, workload=clean.spec.workload, fault=ran.fault, result="missed")
    if ran.record is None:
        assert ran.ended is not None
        hung = ran.ended.status == "timed_out"
        planted = isinstance(find_program_fault(ran.fault, clean.spec.workload), CollectiveFault)
        # What a collective does wrong is the whole bug: that the program dies of it is its answer.
        its_own = planted and not (ran.ended.ok or ran.ended.ended_from_outside)
        result = "died" if its_own else "hung" if hung else "crashed"
        return replace(base, result=result, cause=ran.ended.detail)
    fault = find_program_fault(ran.fault, clean.spec.workload)
    alone = judge(ran.record)
    # A clean run tells where a collective went another way; a changed program goes its own.
    beside = isinstance(fault, CollectiveFault) and alone.status != "pass"
    verdict = judge(ran.record, clean=clean) if beside else alone
    cause = verdict.diagnoses[0] if verdict.diagnoses else None
    shown = cause.cause if cause else next(iter([*verdict.findings, *verdict.reasons]), None)
    base = replace(base, cause=shown, kind=cause.kind if cause else None)
    if not visible(fault, clean, ran.record):
        return replace(base, result="invisible" if verdict.status == "pass" else "alarm")
    if verdict.status == "pass":
        return replace(base, result="missed")
    killed = replace(base, result="killed", by="comparison" if _compared(verdict) else "ledger")
    named = cause is not None and cause.kind in expected_kinds(fault, clean)
    kinds = {d.kind for d in alone.diagnoses[:1]}
    return replace(
        killed,
        result="killed" if named else "misnamed",
        named_alone=bool(kinds & set(expected_kinds(fault, clean))),
    )


def _compared(verdict: Verdict) -> bool:
    return any(t["status"] == "fail" for t in verdict.data["tensors"])


def visible(fault: ProgramFault, clean: Record, record: Record) -> bool:
    """Whether the fault changed anything: a collective's result, or else a final gradient."""
    if isinstance(fault, CollectiveFault):
        return any(i["fault"]["changed"] for h in record.ranks.values() for i in h.info.values())
    for rank, held in record.ranks.items():
        for key, grads in held.grads.items():
            before = clean.ranks[rank].grads[key]
            if set(grads) != set(before) or any(
                not same_bits(g, before[n]) for n, g in grads.items()
            ):
                return True
    return False


def expected_kinds(fault: ProgramFault, clean: Record) -> tuple[str, ...]:
    """Kinds of cause that name this fault correctly."""
    if not isinstance(fault, CollectiveFault):
        return fault.named
    if fault.target in gradient_operations(clean):
        return (*KINDS[fault.kind].named, *EXCHANGED[fault.kind])
    return EXCHANGED[fault.kind]


@lru_cache(maxsize=1)
def gradient_operations(clean: Record) -> frozenset[str]:
    """Operations of a clean step that gradients enter or leave, by name."""
    tier = next(iter(clean.spec.tiers))
    feeds = fed(clean, tier, 0)
    carrying = {
        (rank, event["n"])
        for joint in joint_operations(clean, tier, 0)
        if carries(joint, feeds)
        for rank, event in joint.events.items()
    }
    return frozenset(
        op.name
        for rank, held in clean.ranks.items()
        for op in number_operations(clean.spec.topology, rank, held.events.get((tier, 0), []))
        if (rank, op.event["n"]) in carrying
    )
