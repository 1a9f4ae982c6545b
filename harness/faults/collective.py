"""Faults of the second layer: what a collective or a message can do wrong, as data.

    CollectiveFault(kind="avg", target="allreduce@dp#1")     the second all-reduce over dp averages
    parse_collective_fault("avg:allreduce@dp")               every all-reduce over dp averages

Each kind tells the real bugs it stands for, which operations it has a meaning for, and as what the
Diagnosis must name it. `misbehaviour` carries them out; this module touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sumgrad.base.errors import UserError
from sumgrad.ledger.operations import REDUCTIONS, Operation

FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to misbehave. families: operations it has a meaning for; only on floats unless
    `integers`. named: kinds of cause that the Diagnosis may give it; exchanged: also, where what is
    exchanged carries no gradient (an activation, a count). counts: also, where it is a count that
    every rank then has of its own. min_steps: steps it needs."""

    name: str
    story: str
    operator: str | None
    families: tuple[str, ...]
    named: tuple[str, ...]
    exchanged: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    integers: bool = False
    min_steps: int = 1


OWN_COUNT = ("local_count", "wrong_count")
WEIGHTS = ("gathered_weights",)  # where what is gathered is a parameter
ALL = (*REDUCTIONS, "all_gather", "all_to_all", "broadcast")

# fmt: off
KINDS = {
    kind.name: kind
    for kind in (
        Kind("avg", "AVG where SUM is meant", "M07", REDUCTIONS, ("avg",), counts=OWN_COUNT),
        Kind("skip", "the reduction is left out for some parameters", "M13", ALL,
             ("skipped_collective", "too_few_ranks"), exchanged=("skipped_collective", *WEIGHTS),
             counts=OWN_COUNT, integers=True),
        Kind("double", "an already reduced gradient is reduced again", "M15",
             ("allreduce", "reduce_scatter"), ("double_reduction",), counts=OWN_COUNT,
             integers=True),
        Kind("subgroup",
             "the group lacks its last rank, which reduces alone (rank-conditional work)", "M43",
             ("allreduce",), ("wrong_group", "too_few_ranks"), counts=OWN_COUNT, integers=True),
        Kind("copy", "all_reduce(x.contiguous()) reduces a temporary", "M23", ALL,
             ("unused_result",), exchanged=("unused_result", *WEIGHTS), counts=OWN_COUNT,
             integers=True),
        Kind("missing_wait",
             "the buffer is read before the work is done; half of it is still local", "M41", ALL,
             ("missing_wait",),
             exchanged=("unused_result", "missing_wait", "changed_input", *WEIGHTS),
             counts=OWN_COUNT),
        Kind("stale",
             "a reused buffer is not zeroed: one rank adds what it sent in the step before", "M37",
             REDUCTIONS, ("stale_buffer", "changed_input"), counts=OWN_COUNT, min_steps=2),
        Kind("early", "the reduction starts before one rank has written its gradient", "M35",
             REDUCTIONS, ("lost_contribution", "not_reduced"), counts=OWN_COUNT),
        Kind("low_precision", "the reduction runs in bfloat16", "M64", ALL, ("low_precision",),
             counts=OWN_COUNT),
        Kind("scale_one", "one rank's contribution is 1.001 times what it should be", None, ALL,
             ("rank_factor", "weights_of_ranks", "open"),
             exchanged=("changed_input", "rank_factor", *WEIGHTS), counts=OWN_COUNT),
        Kind("drop", "what was received is thrown away: the buffer keeps zeros", "M25", ("recv",),
             ("unused_result", "open"), exchanged=("unused_result",)),
    )
}
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFault:
    """target: a stream (`allreduce@dp`, every one of a step) or one of it (`allreduce@dp#0`)."""

    kind: str
    target: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.target}"

    @property
    def named(self) -> tuple[str, ...]:
        """Kinds of cause that name it, where the collective carries gradients."""
        kind = KINDS[self.kind]
        return (*kind.named, *kind.exchanged)

    @property
    def named_elsewhere(self) -> tuple[str, ...]:
        """The same where it carries something else."""
        kind = KINDS[self.kind]
        return (*(kind.exchanged or kind.named), *kind.counts)

    @property
    def min_steps(self) -> int:
        return KINDS[self.kind].min_steps

    def hits(self, stream: str, number: int) -> bool:
        return self.target in (stream, f"{stream}#{number}")


def parse_collective_fault(text: str) -> CollectiveFault:
    """`KIND:FAMILY@GROUP[#N]`. Raises UserError."""
    kind, _, target = text.partition(":")
    family, at, group = target.partition("@")
    if kind not in KINDS or not at or not group:
        raise UserError(
            f"--fault: got {text!r}, expected KIND:FAMILY@GROUP or KIND:FAMILY@GROUP#N, "
            f"such as avg:allreduce@dp#0; kinds: {', '.join(KINDS)}"
        )
    if family not in KINDS[kind].families:
        raise UserError(
            f"--fault {text}: {kind} has a meaning for {', '.join(KINDS[kind].families)} only"
        )
    return CollectiveFault(kind=kind, target=target)


def faults_for(operations: Iterable[Sequence[Operation]]) -> list[CollectiveFault]:
    """Every fault that the operations of a clean step offer. operations: rank -> its step.

    One for each kind and each operation of a group larger than one that carries numbers.
    """
    found: dict[str, CollectiveFault] = {}
    for mine in operations:
        for operation in mine:
            event = operation.event
            alone = isinstance(event["group"], list) and len(event["group"]) < 2
            if alone or not event["numel"]:
                continue
            for kind in KINDS.values():
                if operation.family not in kind.families:
                    continue
                if event["dtype"] not in FLOATS and not kind.integers:
                    continue
                fault = CollectiveFault(kind=kind.name, target=operation.name)
                found.setdefault(fault.name, fault)
    return list(found.values())
