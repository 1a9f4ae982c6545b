"""What a step computes line by line: calls of torch functions, with their values and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from sumgrad.record.derivative import (
    Back,
    Derivative,
    back_as_json,
    back_as_tensors,
    back_from,
    derivative_from,
)
from sumgrad.record.line import Line, line_of
from torch import Tensor

MODULE = "module "
LARGE = "a large tensor, number "  # in place of the number of its value
OF_THE_FIRST = {
    "to",
    "type_as",
    "view_as",
    "expand_as",
    "reshape_as",  # of others dtype or shape
    "getitem",
    "gather",
    "index_select",
    "take_along_dim",
}  # or where they stand
OF_THE_OTHERS = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
                 "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "len",
                 "embedding"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """One call of a torch function by a user's line, or of one of torch's own modules.

    function: its name; of a torch.autograd.Function its class, of a module MODULE and its name.
    line: `PATH:12`; code: what stands there; part: the expression, as far as it is one line. site:
    which call in the code it is. takes: its arguments in order: the number of a value, or in words
    what is no tensor; keys: the names of those that were given by name. gives: of what it returns
    the numbers of the values. made_at: of each argument, the line and the code where the tensor was
    made, or two empty ones; written_at: that which had written into its memory before. within: the
    function of the code that the line is in, `PATH:10 NAME`. inside: the
    modules whose forward runs, the outermost first. calls: how many of the trace's calls were there
    already. written: where the backward of a Function stands, `PATH:12`. function_of: the Function
    whose forward it is in.
    """

    function: str
    line: str
    code: str
    takes: tuple[int | str, ...]
    made_at: tuple[Line, ...]
    inside: tuple[str, ...] = ()
    calls: int = 0
    gives: tuple[int, ...] = ()
    site: str = ""
    part: str = ""
    written: str = ""
    function_of: str = ""
    within: str = ""
    keys: tuple[str, ...] = ()
    written_at: tuple[Line, ...] = ()

    @property
    def uses(self) -> list[int]:
        """The numbers of those arguments whose own numbers enter what it gives."""
        taken = self.takes[1:] if self.function in OF_THE_OTHERS else self.takes
        taken = taken[:1] if self.function in OF_THE_FIRST else taken
        return [t for t in taken if isinstance(t, int)]

    def key(self, at: int) -> str:
        """The name of argument `at`; empty where it was given by its place."""
        given = self.takes[at]
        if isinstance(given, str) and "=" in given:
            return given.partition("=")[0]
        return self.keys[at] if self.keys else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """A tensor that a line kept for the backward came back as something else: `PATH:12` of the
    line, and of the user's hooks that packed and unpacked it."""

    line: str
    pack: str
    unpack: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncleared:
    """A leaf whose gradient was read, and was there still when the next backward gave more of it.

    made: `PATH:12` and what stands there, empty where that is not known; read: the same.
    """

    made: Line
    read: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class SetGrad:
    """A line that put something in place of a parameter's `.grad`: `PATH:12`, what stands there."""

    name: str
    line: Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A tensor that a line changed in place: the numbers of its values before it and after it."""

    before: int
    after: int
    line: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What one process computed, in order, and the values of arguments and results.

    gradients: of each term of the loss, or of all together, by number of a value what reached it.
    with_graph: numbers of those values that autograd knows a function of. arrivals: of the leaves
    among them, the gradient that each backward gave, in order. unlike: what was kept for the
    backward and came back as something else. again: what the same lines and modules computed when
    the backward ran them once more, with numbers of values_again. changes: of the forward.
    ran: every line of the forward that called a torch function, whatever its tensors, by the
    function that it is in. names: of each such function, of what kind is what stands under a name
    in it; set_up: the same of those that run while the step's model is distributed. uncleared:
    leaves that are no parameters. set_grads: of parameters, not
    what clears them.
    found_none: lines that read parameters' `.grad`, each time where there was none. derivatives: of
    Functions' backwards, held against their forwards. backs: what these were given and gave. hooks:
    what hooks of the user's compute in a backward, and after how many of the computations.
    """

    computations: tuple[Computation, ...] = ()
    values: tuple[Tensor, ...] = ()
    gradients: tuple[Mapping[int, Tensor], ...] = ()
    with_graph: frozenset[int] = frozenset()
    arrivals: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    unlike: tuple[Unlike, ...] = ()
    again: tuple[Computation, ...] = ()
    values_again: tuple[Tensor, ...] = ()
    changes: tuple[Change, ...] = ()
    uncleared: tuple[Uncleared, ...] = ()
    ran: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    set_up: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    set_grads: tuple[SetGrad, ...] = ()
    found_none: tuple[Line, ...] = ()
    derivatives: tuple[Derivative, ...] = ()
    backs: tuple[Back, ...] = ()
    hooks: tuple[tuple[int, Computation], ...] = ()

    def in_order(self) -> Iterator[Computation]:
        """What lines computed, those of hooks among the others."""
        hooks = [*self.hooks]
        for i, one in enumerate(self.computations):
            while hooks and hooks[0][0] <= i:
                yield hooks.pop(0)[1]
            yield one
        yield from (one for _, one in hooks)


def computed_as_json(computed: Computed) -> dict[str, Any]:
    return {
        "computations": [asdict(one) for one in computed.computations],
        "terms": len(computed.gradients),
        "with_graph": sorted(computed.with_graph),
        "unlike": [asdict(one) for one in computed.unlike],
        "again": [asdict(one) for one in computed.again],
        "changes": [asdict(one) for one in computed.changes],
        "found_none": [list(line) for line in computed.found_none],
        "set_grads": [asdict(one) for one in computed.set_grads],
        "ran": {within: [list(line) for line in lines] for within, lines in computed.ran.items()},
        "names": {within: {**own} for within, own in computed.names.items()},
        "set_up": {within: {**own} for within, own in computed.set_up.items()},
        "uncleared": [asdict(one) for one in computed.uncleared],
        "derivatives": [asdict(one) for one in computed.derivatives],
        "hooks": [[at, asdict(one)] for at, one in computed.hooks],
        "backs": [back_as_json(one) for one in computed.backs],
    }


def computed_as_tensors(computed: Computed) -> dict[str, Tensor]:
    gradients = {
        f"value_gradient/{term}/{i}": gradient
        for term, own in enumerate(computed.gradients)
        for i, gradient in own.items()
    }
    arrivals = {
        f"value_arrival/{i}/{k}": gradient
        for i, own in computed.arrivals.items()
        for k, gradient in enumerate(own)
    }
    again = {f"value_again/{i}": t for i, t in enumerate(computed.values_again)}
    values = {f"value/{i}": t for i, t in enumerate(computed.values)}
    backs: dict[str, Tensor] = {}
    for i, one in enumerate(computed.backs):
        backs |= back_as_tensors(i, one)
    return values | gradients | arrivals | again | backs


def computed_from(said: Mapping[str, Any], held: Mapping[str, Tensor]) -> Computed:
    """Of what computed_as_json and computed_as_tensors gave."""
    num_values = sum(key.startswith("value/") for key in held)
    num_again = sum(key.startswith("value_again/") for key in held)
    gradients: list[dict[int, Tensor]] = [{} for _ in range(said.get("terms", 0))]
    arrivals: dict[int, dict[int, Tensor]] = {}
    for key, tensor in held.items():
        if key.startswith("value_arrival/"):
            _, number, nth = key.split("/")
            arrivals.setdefault(int(number), {})[int(nth)] = tensor
        if key.startswith("value_gradient/"):
            _, term, number = key.split("/")
            gradients[int(term)][int(number)] = tensor
    return Computed(
        computations=tuple(map(_computation_from, said.get("computations", ()))),
        values=tuple(held[f"value/{i}"] for i in range(num_values)),
        gradients=tuple(gradients),
        with_graph=frozenset(said.get("with_graph", ())),
        arrivals={n: tuple(own[k] for k in sorted(own)) for n, own in arrivals.items()},
        unlike=tuple(Unlike(**one) for one in said.get("unlike", ())),
        again=tuple(map(_computation_from, said.get("again", ()))),
        values_again=tuple(held[f"value_again/{i}"] for i in range(num_again)),
        changes=tuple(Change(**one) for one in said.get("changes", ())),
        derivatives=tuple(map(derivative_from, said.get("derivatives", ()))),
        hooks=tuple((at, _computation_from(one)) for at, one in said.get("hooks", ())),
        backs=tuple(back_from(i, one, held) for i, one in enumerate(said.get("backs", ()))),
        found_none=tuple(map(line_of, said.get("found_none", ()))),
        set_grads=tuple(
            SetGrad(name=one["name"], line=line_of(one["line"]))
            for one in said.get("set_grads", ())
        ),
        ran={w: tuple(map(line_of, lines)) for w, lines in said.get("ran", {}).items()},
        names={within: {**own} for within, own in said.get("names", {}).items()},
        set_up={within: {**own} for within, own in said.get("set_up", {}).items()},
        uncleared=tuple(
            Uncleared(made=line_of(one["made"]), read=line_of(one["read"]))
            for one in said.get("uncleared", ())
        ),
    )


def _computation_from(one: Mapping[str, Any]) -> Computation:
    return Computation(
        function=one["function"],
        line=one["line"],
        code=one["code"],
        takes=tuple(one["takes"]),
        keys=tuple(one.get("keys", ())),
        made_at=tuple(map(line_of, one["made_at"])),
        written_at=tuple(map(line_of, one.get("written_at", ()))),
        inside=tuple(one["inside"]),
        calls=one["calls"],
        gives=tuple(one["gives"]),
        site=one["site"],
        part=one["part"],
        written=one["written"],
        function_of=one["function_of"],
        within=one.get("within", ""),
    )


def computed_together(found: Sequence[Computed]) -> Computed:
    """Of several terms' runs in one process, one after the other. A value that several of them made
    at the same place is one, with a gradient of each."""
    computations: list[Computation] = []
    values: list[Tensor] = []
    gradients: list[dict[int, Tensor]] = []
    with_graph: set[int] = set()
    made: dict[tuple[str, int, int], int] = {}
    backs: list[Back] = []
    for one in found:
        backs += [replace(b, computation=b.computation + len(computations)) for b in one.backs]
        place = places_of(one)
        number: dict[int, int] = {}
        for i, value in enumerate(one.values):
            key = place.get(i)
            known = None if key is None else made.get(key)
            if known is None or not same_value(values[known], value):
                known = len(values)
                values.append(value)
            if key is not None:
                made.setdefault(key, known)
            number[i] = known
        for c in one.computations:
            takes = tuple(number[t] if isinstance(t, int) else t for t in c.takes)
            gives = tuple(number[t] for t in c.gives)
            computations.append(replace(c, takes=takes, gives=gives))
        for own in one.gradients:
            gradients.append({number[i]: gradient for i, gradient in own.items()})
        with_graph |= {number[i] for i in one.with_graph}
    return Computed(
        computations=tuple(computations),
        values=tuple(values),
        gradients=tuple(gradients),
        with_graph=frozenset(with_graph),
        derivatives=tuple(d for one in found for d in one.derivatives),
        backs=tuple(backs),
        ran=_ran_together(found),
        names=_names_together(found),
    )


def _names_together(found: Sequence[Computed]) -> dict[str, Mapping[str, str]]:
    every: dict[str, Mapping[str, str]] = {}
    for one in found:
        for within, own in one.names.items():
            every[within] = {**every.get(within, {}), **own}
    return every


def _ran_together(found: Sequence[Computed]) -> dict[str, tuple[Line, ...]]:
    every: dict[str, dict[Line, None]] = {}
    for one in found:
        for within, lines in one.ran.items():
            every.setdefault(within, {}).update(dict.fromkeys(lines))
    return {within: tuple(lines) for within, lines in every.items()}


def places_of(one: Computed) -> dict[int, tuple[str, int, int]]:
    """Number of a value -> the call that gave it: which in the code, the how manieth, which of its
    results."""
    times: dict[str, int] = {}
    out: dict[int, tuple[str, int, int]] = {}
    for c in one.computations:
        nth = times[c.site] = times.get(c.site, -1) + 1
        for k, number in enumerate(c.gives):
            out.setdefault(number, (c.site, nth, k))
    return out


def same_value(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
