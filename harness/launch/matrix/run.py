"""Runs the kill matrix: which fault on which topology could go wrong unnoticed?

A clean run first: it must pass, and its ledger says what can misbehave. Then every fault against
the same reference: a planned workload's one by one, a user's step's on ranks that stay warm. A
fault that is visible must be killed and named; one that is invisible here must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from sumgrad.base.errors import UserError
from sumgrad.base.outcome import RankOutcome, first_to_fail
from sumgrad.base.tensors import same_bits
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.verdict import judge
from sumgrad.faults.collective import CollectiveFault, faults_for
from sumgrad.faults.find import Fault, find_any, own_faults
from sumgrad.faults.matrix import Cell, Matrix
from sumgrad.judge.checks.complete import casts_never_made
from sumgrad.judge.joint import carried, carries, joint_operations
from sumgrad.launch.ask import DEFAULT_TIERS, CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.judging import is_right_in_float64
from sumgrad.launch.local.launcher import Launcher, RankJob, start_of
from sumgrad.launch.matrix.warm_rank import fault_directory, trace_directory
from sumgrad.ledger.operations import number_operations
from sumgrad.record.directory import Record, load_record, read_ranks
from sumgrad.record.spec import write_spec
from sumgrad.record.trace import Trace, Traces, rank_trace, read_trace
from sumgrad.subjects.loading import chosen_workload, find_class
from sumgrad.subjects.program.job import UserStep
from sumgrad.subjects.program.protocol import is_program
from sumgrad.topology.pools import load_topology
from sumgrad.topology.shipped import shipped_topologies

STEPS = 2  # a stale buffer needs the second
MOST_AT_ONCE = 48  # faults, one after the other on the same warm ranks
NO_GRADIENT = "none of its collectives carries a parameter's gradient, so that none was attacked"
Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One fault's run: its record, or how the ranks ended where there is none.

    verdict: where it was judged already. traces: what went through its modules, by step.
    """

    fault: str
    record: Record | None
    ended: RankOutcome | None = None
    verdict: Verdict | None = None
    traces: Mapping[int, Traces] = field(default_factory=dict)


def default_topologies() -> list[Path]:
    """Every shipped topology that can be started."""
    return [path for path in shipped_topologies() if not load_topology(path).plan_only]


def run_matrix(
    topologies: Sequence[Path],
    *,
    faults: Sequence[str] | None,
    seed: int,
    timeout_s: float,
    launcher: Launcher,
    progress: Progress,
    workload: str | None = None,
    quick: bool = False,
    look: bool = False,
) -> Matrix:
    """Every clean topology once, then every fault on it against the same reference.

    workload: instead of the one that each topology names. faults: only these. quick: of the
    operations of a kind over an axis only the first, and the first with gradients. look: each
    fault's step once more, with eyes on its modules, as a run does after a failure. Raises
    UserError for unknown names.
    """
    cells: list[Cell] = []
    for path in topologies:
        options = CheckOptions(
            topology=path,
            workload=workload,
            seed=seed,
            steps=STEPS,
            tiers=("structure",),
            timeout_s=timeout_s,
            keep_partials=True,
        )
        cells += _run_topology(
            options, faults, quick=quick, look=look, launcher=launcher, progress=progress
        )
    return Matrix(cells=tuple(cells))


def _run_topology(
    options: CheckOptions,
    faults: Sequence[str] | None,
    *,
    quick: bool,
    look: bool,
    launcher: Launcher,
    progress: Progress,
) -> Iterator[Cell]:
    """The cells of one topology, the clean one first."""
    name = options.topology.stem
    workload, where = chosen_workload(load_topology(options.topology), options.workload)
    opaque = is_program(find_class(workload, where))
    for fault in faults or ():
        find_any(fault, workload, opaque=opaque)
    with launcher.temporary_directory() as directory:
        progress(f"{name}: clean")
        options = replace(options, out=directory / "clean")
        verdict, stored = run_check(options, launcher=launcher)
        clean = load_record(stored)
        if casts_never_made(clean):  # faults are planted in float64: not in what they do
            progress(f"{name}: clean, as it is written")
            verdict = _unless_it_fails_as_written(verdict, options, launcher)
        told = _clean_cell(name, clean, verdict)
        of_several = clean.spec.topology.world_size > 1
        if told.ok and clean.spec.opaque and of_several and not gradient_operations(clean):
            told = replace(told, result="unattacked", cause=NO_GRADIENT)
        yield told
        if verdict.status != "pass":
            return
        chosen = _chosen(clean, faults)
        chosen = _first_of_each(clean, chosen) if quick and clean.spec.opaque else chosen
        if clean.spec.opaque:
            ran = run_faults(
                clean, chosen, directory, look=look, launcher=launcher, progress=progress
            )
        else:
            ran = list(_rerun(clean, chosen, options, launcher=launcher, progress=progress))
        yield from (cell_of(name, clean, one) for one in ran)


def _unless_it_fails_as_written(
    verdict: Verdict, options: CheckOptions, launcher: Launcher
) -> Verdict:
    """Of a clean step in float64; a PASS where nothing but its casts was left unseen there."""
    place = options.out.with_name("as_written") if options.out else None
    written, _ = run_check(replace(options, tiers=DEFAULT_TIERS, out=place), launcher=launcher)
    if written.status == "fail":
        return written
    return replace(verdict, status="pass") if is_right_in_float64(verdict) else verdict


def _rerun(
    clean: Record,
    faults: Sequence[str],
    options: CheckOptions,
    *,
    launcher: Launcher,
    progress: Progress,
) -> Iterator[Ran]:
    """Each fault as a run of its own, with the clean run's reference."""
    for fault in faults:
        progress(f"{options.topology.stem}: {fault}")
        out = clean.directory.with_name(fault)
        asked = replace(options, fault=fault, out=out, reuse=clean.directory)
        verdict, _ = run_check(asked, launcher=launcher)
        yield Ran(fault=fault, record=None, verdict=verdict)


def _fault(clean: Record, name: str) -> Fault:
    return find_any(name, clean.spec.workload, opaque=clean.spec.opaque)


def all_faults(clean: Record) -> list[str]:
    """Every fault that a clean run can have on its topology, by name."""
    spec = clean.spec
    if not spec.opaque:
        return own_faults(spec)
    operations = [
        number_operations(spec.topology, rank, held.events.get((next(iter(spec.tiers)), 0), []))
        for rank, held in clean.ranks.items()
    ]
    collective = [fault.name for fault in faults_for(operations)]
    return [*collective, *own_faults(spec)]


def _chosen(clean: Record, faults: Sequence[str] | None) -> list[str]:
    known = all_faults(clean)
    if not faults:
        return known
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
    look: bool = False,
    launcher: Launcher,
    progress: Progress,
) -> list[Ran]:
    """Run faults on warm ranks; ranks are started again only behind a fault that ended them, or
    when they have run many."""
    out: list[Ran] = []
    topology = clean.spec.topology
    tier = next(iter(clean.spec.tiers))
    singles = (
        [UserStep(clean.spec).trace_single(tier, s) for s in range(clean.spec.steps)]
        if look
        else []
    )
    while len(out) < len(faults):
        left = list(faults[len(out) :])[: MOST_AT_ONCE // 3 if look else MOST_AT_ONCE]
        place = directory / f"job{len(out)}"
        (place / "ranks").mkdir(parents=True)
        write_spec(place, clean.spec)
        job = RankJob(
            target="sumgrad.launch.matrix.warm_rank:run_faults",
            num_ranks=topology.world_size,
            directory=place,
            pools=[topology.pool_of(r).name for r in range(topology.world_size)],
            arguments={"faults": left, "look": look},
            timeout_s=clean.spec.timeout_s,
            runs=len(left),
            watch=_counter(topology.name, len(out), list(faults), place),
            start=start_of(clean.spec),
        )
        progress(f"{topology.name}: {len(left)} faults, {left[0]} first")
        outcomes = launcher.run(job, progress=progress)
        done = 0
        for i, fault in enumerate(left):
            record = _record_of(clean, fault, fault_directory(place, i))
            if record is None:
                break
            traces = _traces_of(record, singles)
            out.append(Ran(fault=fault, record=record, traces=traces))
            done += 1
        bad = [o for o in outcomes if not o.ok]
        if bad and done == len(left):  # all was written, but a rank did not survive it
            done -= 1
            out.pop()
        if done < len(left):
            ended = first_to_fail(bad) if bad else outcomes[0]
            out.append(Ran(fault=left[done], record=None, ended=ended))
    return out


def _counter(name: str, done: int, faults: Sequence[str], place: Path) -> Callable[[], str]:
    """Says which fault runs: each has a directory once it begins."""

    def said() -> str:
        begun = sum(1 for _ in place.glob("faults/*"))
        at = min(done + max(begun, 1), len(faults))
        return f"{name}: fault {at} of {len(faults)}, {faults[at - 1]}"

    return said


def _record_of(clean: Record, fault: str, place: Path) -> Record | None:
    """A fault's record beside the clean run's reference; None if a rank did not finish it."""
    ranks, started, damage = read_ranks(place, clean.spec)
    if len(ranks) < clean.spec.topology.world_size:
        return None
    steps = _fault(clean, fault).min_steps
    return replace(
        clean,
        directory=place,
        spec=replace(clean.spec, fault=fault, steps=steps),
        references={tier: held[:steps] for tier, held in clean.references.items()},
        ranks=ranks,
        started=started,
        damage=tuple(damage),
    )


def _traces_of(record: Record, singles: Sequence[Trace]) -> dict[int, Traces]:
    """By step, beside the single process's; nothing without these."""
    tier = next(iter(record.spec.tiers))
    return {
        step: Traces(
            tier=tier,
            step=step,
            ranks={
                rank: read_trace(rank_trace(trace_directory(record.directory, step), rank))
                for rank in record.ranks
            },
            single=single,
        )
        for step, single in enumerate(singles[: record.spec.steps])
    }


def _judged_alone(ran: Ran) -> Verdict:
    """As on a user's machine: without a clean run beside, looked into where it fails."""
    assert ran.record is not None
    alone = judge(ran.record)
    wrong = [t["step"] for t in alone.data["tensors"] if t["status"] == "fail"]
    traces = ran.traces.get(min(wrong, default=-1))
    return judge(replace(ran.record, traces=traces)) if traces is not None else alone


def _clean_cell(topology: str, clean: Record, verdict: Verdict) -> Cell:
    ended_well = all(o["status"] == "ok" for o in verdict.data["outcomes"])
    of_clean = {"pass": "clean", "unknown": "unknown", "fail": "alarm"}
    result = of_clean[verdict.status] if ended_well or verdict.status == "pass" else "crashed"
    why = next(iter([*verdict.reasons, *verdict.findings]), None)
    why = verdict.diagnoses[0].cause if verdict.diagnoses else why
    return Cell(topology=topology, workload=clean.spec.name, fault=None, result=result, cause=why)


def cell_of(topology: str, clean: Record, ran: Ran) -> Cell:
    """What one fault's run means."""
    base = Cell(topology=topology, workload=clean.spec.name, fault=ran.fault, result="missed")
    fault = _fault(clean, ran.fault)
    if ran.verdict is not None:
        return _planned_cell(base, fault, ran.verdict)
    if ran.record is None:
        assert ran.ended is not None
        hung = ran.ended.status == "timed_out"
        # What a collective does wrong is the whole bug: that the program dies of it is its answer.
        planted = isinstance(fault, CollectiveFault)
        its_own = planted and not (ran.ended.ok or ran.ended.ended_from_outside)
        result = "died" if its_own else "hung" if hung else "crashed"
        return replace(base, result=result, cause=ran.ended.detail)
    alone = _judged_alone(ran)
    # A clean run tells where a collective went another way; a changed program goes its own.
    beside = isinstance(fault, CollectiveFault) and alone.status != "pass"
    verdict = judge(ran.record, clean=clean) if beside else alone
    expected = expected_kinds(fault, clean)
    named_alone = bool({d.kind for d in alone.diagnoses[:1]} & {*expected})
    if named_alone and not {d.kind for d in verdict.diagnoses[:1]} & {*expected}:
        verdict = alone  # its second look told more than a clean run beside it
    cause = verdict.diagnoses[0] if verdict.diagnoses else None
    shown = cause.cause if cause else next(iter([*verdict.findings, *verdict.reasons]), None)
    base = replace(base, cause=shown, kind=cause.kind if cause else None)
    if not visible(fault, clean, ran.record):
        return replace(base, result="invisible" if verdict.status == "pass" else "alarm")
    if verdict.status == "pass":
        return replace(base, result="missed")
    compared = any(t["status"] == "fail" for t in verdict.data["tensors"])
    return replace(
        base,
        by="comparison" if compared else "ledger",
        result="killed" if base.kind in expected else "misnamed",
        named_alone=named_alone,
    )


def _planned_cell(base: Cell, fault: Fault, verdict: Verdict) -> Cell:
    """A plan fault says itself where it is visible, and what it predicts."""
    report = verdict.data["fault_report"]
    cause = verdict.diagnoses[0] if verdict.diagnoses else None
    base = replace(
        base,
        cause=cause.cause if cause else None,
        kind=cause.kind if cause else None,
        predicted=report["prediction"].get("worst_of_threshold"),
    )
    if any(o["status"] != "ok" for o in verdict.data["outcomes"]):
        return replace(base, result="crashed")
    if not report["visible"] and not report["breaks_law"]:
        return replace(base, result="invisible" if verdict.status == "pass" else "alarm")
    if verdict.status != "fail":
        return base
    if cause is None or cause.kind not in fault.named:
        return replace(base, result="misnamed")
    if not report["prediction"].get("agrees"):
        return replace(base, result="mispredicted")
    if report["visible"]:
        return replace(base, result="killed", by="comparison")
    return replace(base, result="law", by="ledger")


def visible(fault: Fault, clean: Record, record: Record) -> bool:
    """Whether the fault changed anything: a collective's result, or else a final gradient."""
    if isinstance(fault, CollectiveFault):
        return any(i["fault"]["changed"] for h in record.ranks.values() for i in h.info.values())
    for rank, held in record.ranks.items():
        for key, grads in held.grads.items():
            was = clean.ranks[rank].grads[key]
            if set(grads) != set(was) or not all(same_bits(g, was[n]) for n, g in grads.items()):
                return True
    return False


def expected_kinds(fault: Fault, clean: Record) -> tuple[str, ...]:
    """Kinds of cause that name this fault correctly."""
    if isinstance(fault, CollectiveFault) and fault.target not in gradient_operations(clean):
        return fault.named_elsewhere
    return fault.named


@lru_cache(maxsize=1)
def gradient_operations(clean: Record) -> frozenset[str]:
    """Operations of a clean step that gradients enter or leave, by name."""
    tier = next(iter(clean.spec.tiers))
    names = carried(clean, tier, 0)
    carrying = {
        (rank, event["n"])
        for joint in joint_operations(clean, tier, 0)
        if carries(joint, names)
        for rank, event in joint.events.items()
    }
    return frozenset(
        op.name
        for rank, held in clean.ranks.items()
        for op in number_operations(clean.spec.topology, rank, held.events.get((tier, 0), []))
        if (rank, op.event["n"]) in carrying
    )
