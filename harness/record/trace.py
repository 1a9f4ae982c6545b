"""What went through a step's modules: outputs, the gradients that reached them, data that entered.

Recorded in a second run of a failing step, on every rank and in one process: `trace/` of a run
directory, a file of tensors and one of words for each. Off in a run that passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sumgrad.base.files import read_json, write_json
from sumgrad.base.outcome import describe_operation
from sumgrad.record.adjoint import Adjoint, read_adjoints
from sumgrad.record.computed import Computed, computed_as_json, computed_as_tensors, computed_from
from sumgrad.record.endings import rank_file
from sumgrad.record.exchanged import Exchange, exchanges_as_tensors, exchanges_from
from sumgrad.record.hooked import Hooked, hooked_as_json, hooked_as_tensors, hooked_from
from sumgrad.record.line import NO_LINE, Line, line_of
from sumgrad.record.reference import Grads, read_tensors, write_tensors
from sumgrad.record.spec import DAMAGED
from sumgrad.record.uses import Uses, uses_as_json, uses_as_tensors, uses_from
from sumgrad.record.ways import Passed, Ways, passed_as_json, passed_from, ways_as_json, ways_from
from torch import Tensor

FOLDER = "trace"
LOSS = "the loss"
INTO = "what goes into "
A_GROUP = "a process group"  # of what a module is handed, in words
MAX_USED = 4  # states of one parameter that differ
MAX_SAMPLE = 2039  # elements of a parameter: a prime, or evenly apart may be all of one column


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What ran when a module was called. lines: a user's, `PATH:12` and what stands there, the
    innermost first; inside: the modules whose forward, the outermost first. made: the line that
    made what goes in, where it is a user's."""

    lines: tuple[Line, ...] = ()
    inside: tuple[str, ...] = ()
    made: Line = NO_LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A backward that starts at what a call gave, from a gradient that it is handed.

    call: its place among the trace's calls. line: a user's, that calls the backward; made: the one
    that made the gradient, where it is a user's.
    """

    call: int
    line: Line
    made: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One tensor that one call of a module gave, or that went into it.

    module: its name in build()'s model, INTO before it for what goes into it; number: of the call;
    part: of the output. operation, operation_back: how many collectives this rank had issued when
    it was there, and when its gradient was; None where none came. recomputed: in the backward, by
    a checkpoint. stack: which of the trace's. arrivals: how many backwards its gradient came in;
    again: how often one of these came once more, the same. changed_from: the place of the call that
    gave the same tensor as it was before it was changed in place, -1 where none did.
    """

    module: str
    number: int
    part: int
    operation: int
    operation_back: int | None
    recomputed: bool
    arrivals: int = 0
    again: int = 0
    stack: int = -1
    changed_from: int = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """What one process saw. outputs and gradients go with calls, which are in order.

    gradients: None where none came. sources: module -> its class and line. data: what entered
    modules and no module made; entered: which module, entered_as: in which of its calls, as which
    argument. batch: the full one, of the single process.
    operations: all collectives, in words; events: the same, as the ledger has them. exchanges: of
    those with floating numbers, what went in and came out. left_out: modules with a tensor over the
    limit of what is kept: that it is not there says nothing.
    by_term: gradients of each term of a loss of several, in the single process. takes: there too, a
    module, or LOSS -> the modules whose outputs its own is made from, with none in between. params:
    there too, by name, the values of the step. own, own_at: of a rank, by parameter, what each of
    its backwards gave, (passes, samples), and which elements of the flat whole one these are;
    own_lines: and which line of a user's called each; uses: what each line that takes one gave in
    all of them. losses: the values that its backwards start
    from; in the single process that of the whole loss, where it is known. used: `forward/NAME` or
    `backward/NAME` -> samples of the parameter or buffer of that name of build()'s model as its
    module had it when it was called, or when the gradient of its output came, and `uncalled/NAME`
    at the end, where it is never called: those that differ, at the places
    sample_of(numel, MAX_SAMPLE). used_numel: of how many elements each, by its name.
    frozen: by parameter that did not require a gradient then, `forward` or `backward` or both.
    computed: what a user's lines did outside of torch's modules. ways: of a rank, from module to
    module, what autograd passes. makers: by parameter, which functions' backwards give its
    gradient. modes: by module, those that it was called in, `training` and `eval`. classes: of all
    modules, called or not, at the end. handed: by a user's module, of each of its calls what it was
    handed, by the names of its arguments, in words. stacks: of calls. started: backwards that
    start at what modules gave. entered_at: the lines that made the data, where they are a user's.
    settings: by module, what is set on it beside its parameters when it is called, by attribute, in
    words: values that differ; turned: of those that change, what they are in each call. hooked:
    what goes in and comes out as it is before the hooks of others; hooks: of these the lines where
    they start, by module, INTO before it for pre-hooks.
    """

    calls: tuple[Call, ...]
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]
    sources: Mapping[str, str]
    data: tuple[Tensor, ...] = ()
    entered: tuple[str, ...] = ()
    entered_as: tuple[tuple[int, str], ...] = ()
    entered_at: tuple[Line, ...] = ()
    batch: Mapping[str, Tensor] | None = None
    operations: tuple[str, ...] = ()
    events: tuple[Mapping[str, Any], ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    left_out: tuple[str, ...] = ()
    by_term: Mapping[str, tuple[Tensor | None, ...]] = field(default_factory=dict)
    takes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    params: Mapping[str, Tensor] = field(default_factory=dict)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    own_at: Mapping[str, Tensor] = field(default_factory=dict)
    own_lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    uses: Uses = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    used: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)
    used_numel: Mapping[str, int] = field(default_factory=dict)
    frozen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    computed: Computed = field(default_factory=Computed)
    ways: Ways = field(default_factory=dict)
    makers: Mapping[str, tuple[Passed, ...]] = field(default_factory=dict)
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    handed: Mapping[str, tuple[Mapping[str, str], ...]] = field(default_factory=dict)
    stacks: tuple[Stack, ...] = ()
    started: tuple[Started, ...] = ()
    settings: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    turned: Mapping[str, tuple[Mapping[str, str], ...]] = field(default_factory=dict)
    hooked: tuple[Hooked, ...] = ()
    hooks: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)

    def output_of(self, call: Call) -> Tensor:
        """What a call gave. ValueError where it is none of these."""
        return self.outputs[self.calls.index(call)]

    def gradient_of(self, call: Call) -> Tensor | None:
        """What reached it, None where nothing did. ValueError where it is none of these."""
        return self.gradients[self.calls.index(call)]

    def stack(self, call: Call) -> Stack:
        """What ran when a module was called; nothing where it was not recorded."""
        return self.stacks[call.stack] if 0 <= call.stack < len(self.stacks) else Stack()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traces:
    """Those of one step: every rank's, and the single process's. adjoints: of Functions that the
    ranks ran again together."""

    tier: str
    step: int
    ranks: Mapping[int, Trace]
    single: Trace
    adjoints: tuple[Adjoint, ...] = ()


def with_operations(trace: Trace, ledger: Iterable[Mapping[str, Any]]) -> Trace:
    """A rank's, with what its ledger says that it issued."""
    issued = tuple(event for event in ledger if "op" in event)
    words = tuple(describe_operation(event) or str(event["op"]) for event in issued)
    return replace(trace, operations=words, events=issued)


def write_trace(path: Path, trace: Trace) -> None:
    """Write PATH.safetensors and PATH.json."""
    tensors: Grads = {}
    for kind, held in (("output", trace.outputs), ("gradient", trace.gradients),
                       ("data", trace.data)):  # fmt: skip
        tensors |= {f"{kind}/{i}": t for i, t in enumerate(held) if t is not None}
    for term, gradients in trace.by_term.items():
        tensors |= {f"term/{term}/{i}": t for i, t in enumerate(gradients) if t is not None}
    tensors |= {f"batch/{name}": t.clone() for name, t in (trace.batch or {}).items()}
    for kind, named in (("param", trace.params), ("own", trace.own), ("own_at", trace.own_at)):
        tensors |= {f"{kind}/{name}": t for name, t in named.items()}
    tensors |= {
        f"used/{i}/{name}": t for name, own in trace.used.items() for i, t in enumerate(own)
    }
    tensors |= computed_as_tensors(trace.computed)
    tensors |= exchanges_as_tensors(trace.exchanges)
    tensors |= hooked_as_tensors(trace.hooked)
    tensors |= uses_as_tensors(trace.uses)
    first: dict[int, str] = {}
    again = {
        key: known
        for key, tensor in tensors.items()
        if tensor.numel() and (known := first.setdefault(id(tensor), key)) != key
    }
    write_tensors(
        path.with_suffix(".safetensors"), {k: t for k, t in tensors.items() if k not in again}
    )
    said = {
        "again": again,
        "calls": [asdict(call) for call in trace.calls],
        "sources": dict(trace.sources),
        "terms": list(trace.by_term),
        "operations": list(trace.operations),
        "events": [dict(event) for event in trace.events],
        "entered": list(trace.entered),
        "entered_as": [list(one) for one in trace.entered_as],
        "entered_at": [list(one) for one in trace.entered_at],
        "left_out": list(trace.left_out),
        "takes": {name: list(others) for name, others in trace.takes.items()},
        "own_lines": {name: list(lines) for name, lines in trace.own_lines.items()},
        "uses": uses_as_json(trace.uses),
        "losses": list(trace.losses),
        "used": {name: len(own) for name, own in trace.used.items()},
        "used_numel": dict(trace.used_numel),
        "frozen": {name: list(when) for name, when in trace.frozen.items()},
        "computed": computed_as_json(trace.computed),
        "ways": ways_as_json(trace.ways),
        "makers": passed_as_json(trace.makers),
        "modes": {name: list(modes) for name, modes in trace.modes.items()},
        "classes": dict(trace.classes),
        "settings": {
            name: {n: list(values) for n, values in own.items()}
            for name, own in trace.settings.items()
        },
        "turned": {name: [dict(call) for call in calls] for name, calls in trace.turned.items()},
        "hooked": hooked_as_json(trace.hooked),
        "hooks": {name: [list(line) for line in lines] for name, lines in trace.hooks.items()},
        "started": [asdict(one) for one in trace.started],
        "stacks": [asdict(stack) for stack in trace.stacks],
        "handed": {name: [dict(call) for call in calls] for name, calls in trace.handed.items()},
    }
    write_json(path.with_suffix(".json"), said)


def read_trace(path: Path) -> Trace:
    """Read it back. Raises FileNotFoundError or one of spec.DAMAGED."""
    said: dict[str, Any] = read_json(path.with_suffix(".json"))
    held = dict(read_tensors(path.with_suffix(".safetensors")))
    held |= {key: held[known] for key, known in said.get("again", {}).items()}
    calls = tuple(Call(**call) for call in said["calls"])
    num_data = sum(key.startswith("data/") for key in held)

    def named(kind: str) -> Grads:
        return {key.removeprefix(kind): t for key, t in held.items() if key.startswith(kind)}

    return Trace(
        calls=calls,
        outputs=tuple(held[f"output/{i}"] for i in range(len(calls))),
        gradients=tuple(held.get(f"gradient/{i}") for i in range(len(calls))),
        sources=said["sources"],
        data=tuple(held[f"data/{i}"] for i in range(num_data)),
        batch=named("batch/"),
        params=named("param/"),
        own=named("own/"),
        own_at=named("own_at/"),
        entered=tuple(said["entered"]),
        entered_as=tuple((int(call), str(name)) for call, name in said.get("entered_as", ())),
        entered_at=tuple(map(line_of, said.get("entered_at", ()))),
        operations=tuple(said["operations"]),
        events=tuple(said.get("events", ())),
        exchanges=exchanges_from(held),
        left_out=tuple(said["left_out"]),
        takes={name: tuple(others) for name, others in said["takes"].items()},
        own_lines={name: tuple(lines) for name, lines in said.get("own_lines", {}).items()},
        uses=uses_from(said.get("uses", {}), held),
        losses=tuple(float(x) for x in said.get("losses", ())),
        used={
            name: tuple(held[f"used/{i}/{name}"] for i in range(num))
            for name, num in said.get("used", {}).items()
        },
        used_numel=said.get("used_numel", {}),
        frozen={name: tuple(when) for name, when in said.get("frozen", {}).items()},
        computed=computed_from(said.get("computed", {}), held),
        ways=ways_from(said.get("ways", {})),
        makers=passed_from(said.get("makers", {})),
        modes={name: tuple(modes) for name, modes in said.get("modes", {}).items()},
        classes=said.get("classes", {}),
        handed={name: tuple(calls) for name, calls in said.get("handed", {}).items()},
        stacks=tuple(
            Stack(
                lines=tuple(map(line_of, stack["lines"])),
                inside=tuple(stack["inside"]),
                made=line_of(stack["made"]),
            )
            for stack in said.get("stacks", ())
        ),
        started=tuple(
            Started(call=one["call"], line=line_of(one["line"]), made=line_of(one["made"]))
            for one in said.get("started", ())
        ),
        settings={
            name: {n: tuple(values) for n, values in own.items()}
            for name, own in said.get("settings", {}).items()
        },
        turned={name: tuple(calls) for name, calls in said.get("turned", {}).items()},
        hooked=hooked_from(said.get("hooked", ()), held),
        hooks={n: tuple(map(line_of, lines)) for n, lines in said.get("hooks", {}).items()},
        by_term={
            term: tuple(held.get(f"term/{term}/{i}") for i in range(len(calls)))
            for term in said["terms"]
        },
    )


def rank_trace(folder: Path, rank: int) -> Path:
    return rank_file(folder, rank, "_trace")


def single_trace(folder: Path) -> Path:
    return folder / "single_trace"


def read_traces(directory: Path, ranks: Sequence[int]) -> Traces | None:
    """The traces of a run directory; None where there are none, or not all, or damaged ones."""
    folder = directory / FOLDER
    try:
        asked = read_json(folder / "asked.json")
        return Traces(
            tier=str(asked["tier"]),
            step=int(asked["step"]),
            ranks={rank: read_trace(rank_trace(folder, rank)) for rank in ranks},
            single=read_trace(single_trace(folder)),
            adjoints=read_adjoints(folder, ranks),
        )
    except DAMAGED:
        return None
