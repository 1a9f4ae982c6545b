"""What was asked of a run, and what its subject says about itself: run.json, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from sumgrad.base.errors import UserError
from sumgrad.base.files import read_json, write_json
from sumgrad.topology.declaration import Declaration, declaration_from_json, declaration_to_json
from sumgrad.topology.pools import Topology, topology_from_json, topology_to_json

SCHEMA = 2
CLIP_EPS = 1e-6  # what torch adds to the norm that it clips by
DTYPES = ("float64", "float32", "bfloat16", "float16")
DAMAGED = (
    OSError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    SafetensorError,
)
RowsAs = Literal["tensors", "indices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """What a step does to its reduced gradients before it ends, all by one factor.

    clip: to a global norm of `value`, which is divided by the norm plus eps; scale: times `value`.
    """

    kind: Literal["clip", "scale"]
    value: float
    eps: float = CLIP_EPS

    def factor(self, norm: float) -> float:
        """What gradients of this global norm are multiplied by."""
        if self.kind == "scale":
            return self.value
        total = norm + self.eps
        return 1.0 if total <= self.value else self.value / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a Program says about itself in one process.

    params: name -> full shape, of all that require a gradient. rows_as: whether loss_sum takes the
    batch cut to some rows (a dict of tensors) or the indices of the rows (int64). float64: why it
    cannot run in float64, or None. problems: why it cannot be checked at all. weights, batch:
    hashes of what build() and batch() give, batch of the first step.

    Where it says so itself: after: what its step does to reduced gradients. buffers: patterns of
    names of buffers that are compared like gradients. microbatches: how many a step takes.
    dtypes: of what build() trains; every tier computes in one. hashed: lines that go by Python's
    hash of strings, for which its ranks are not forked from one process. runs_in: what it runs in
    besides float64. sample: a digest of what its functions give of some rows, and of the gradients.
    """

    params: dict[str, tuple[int, ...]]
    num_rows: int
    terms: tuple[str, ...]
    rows_as: RowsAs
    float64: str | None
    problems: tuple[str, ...]
    weights: str
    batch: str
    after: After | None = None
    buffers: tuple[str, ...] = ()
    microbatches: int | None = None
    dtypes: tuple[str, ...] = ()
    hashed: tuple[str, ...] = ()
    runs_in: str = "float32"
    sample: str = ""

    def compares(self, buffer: str) -> bool:
        """Whether a buffer is compared like a gradient."""
        return any(fnmatch(buffer, pattern) for pattern in self.buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A gradient of a single run that is not what it was in a kept one. off, bound, size: of its
    random projections, how far apart they are, how far noise puts them, and how large they are."""

    step: int
    name: str
    off: float
    bound: float
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """A single run beside one that was kept as projections, under a name, some time ago.

    tensors: how many were compared.
    """

    name: str
    made: str
    tensors: int
    changed: tuple[Changed, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What a script's ranks are compared with: another run of it, as that one said of itself.

    command: how that run was started. rows: of each step, by what was called, digests of the rows
    that it was given. losses: of each step, what backward was called on. rescaled: of each step, by
    parameter, the factor between backward and optimizer, None where it is none, and whether a clip
    of torch's made it; empty where there is none. draws: of each step, by line, digests of what it
    drew at random. said: what a reader should know of how the runs were made comparable.
    since: that run beside one that was kept earlier; None where it is compared with none. twins:
    groups of parameters of one shape that began with the same values. again: of each step, of each
    later call of the optimizer's closure in it, the gradients' norms by parameter. zero: patterns
    of names of parameters whose gradient is known to be zero.
    """

    command: str
    rows: tuple[dict[str, list[list[str]]], ...]
    losses: tuple[tuple[float, ...], ...]
    said: tuple[str, ...] = ()
    rescaled: tuple[dict[str, tuple[float | None, bool]], ...] = ()
    draws: tuple[dict[str, list[str]], ...] = ()
    since: Since | None = None
    twins: tuple[tuple[str, ...], ...] = ()
    again: tuple[tuple[dict[str, float], ...], ...] = ()
    zero: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """What was asked. tiers: those that run, name -> dtype; skipped: tier -> why it does not.

    workload: as `--workload` takes it. lift: the structure tier lifts casts to fewer digits.
    bitwise: the dtype of the bitwise tier, "" where it does not run; its kernels are of their own.
    device: where the ranks' tensors are, "cpu" or "cuda"; the reference is computed on the CPU.
    What the subject knows of itself is one of two: declaration: a planned workload's; facts: a
    Program's, and with script what a script's other run shows.
    """

    topology: Topology
    workload: str
    seed: int
    steps: int
    tiers: dict[str, str]
    fault: str | None
    law: str
    timeout_s: float
    reproduce: str
    versions: dict[str, str]
    declaration: Declaration | None = None
    facts: Facts | None = None
    script: Script | None = None
    skipped: dict[str, str] = field(default_factory=dict)
    kernels: str = "torch"
    lift: bool = True
    bitwise: str = ""
    bitwise_kernels: str = "fixed"
    device: str = "cpu"

    @property
    def name(self) -> str:
        """The subject's name in a verdict."""
        return self.declaration.workload if self.declaration else self.workload

    @property
    def opaque(self) -> bool:
        """Whether the step is a user's own: no plan says what it must do."""
        return self.declaration is None

    @property
    def params(self) -> tuple[str, ...]:
        """Every parameter whose gradient is compared."""
        if self.facts is not None:
            return tuple(self.facts.params)
        return tuple(p.name for p in self.declaration.params) if self.declaration else ()

    @property
    def terms(self) -> tuple[str, ...]:
        if self.facts is not None:
            return self.facts.terms
        return tuple(t.name for t in self.declaration.terms) if self.declaration else ()

    @property
    def problems(self) -> tuple[str, ...]:
        """Why nothing could be run."""
        return self.facts.problems if self.facts else ()


def write_spec(directory: Path, spec: RunSpec) -> None:
    """Write run.json."""
    data = {name: getattr(spec, name) for name in RunSpec.__dataclass_fields__}
    data["topology"] = topology_to_json(spec.topology)
    data["declaration"] = declaration_to_json(spec.declaration) if spec.declaration else None
    data["facts"] = asdict(spec.facts) if spec.facts else None
    data["script"] = asdict(spec.script) if spec.script else None
    kind = {} if spec.facts is None else {"kind": "program"}  # as earlier versions look for it
    write_json(directory / "run.json", {"schema": SCHEMA, **kind, **data})


def read_spec(directory: Path) -> RunSpec:
    """Read run.json; UserError if it is missing, damaged or of another version."""
    path = directory / "run.json"
    try:
        data = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{directory}: no run.json; expected a run directory") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise UserError(
            f"{path}: written with record schema {schema!r}, this version reads {SCHEMA}"
        )
    try:
        _check_spec(data, path)
        declaration, facts = data.get("declaration"), data.get("facts")
        known = {n: data[n] for n in RunSpec.__dataclass_fields__ if n in data}
        known["topology"] = topology_from_json(data["topology"], path=path)
        known["declaration"] = declaration_from_json(declaration) if declaration else None
        known["facts"] = facts_from_json(facts) if facts else None
        known["script"] = _script_from_json(data["script"]) if data.get("script") else None
        return RunSpec(**known)
    except UserError:
        raise
    except DAMAGED as error:
        raise UserError(f"{path}: damaged: {type(error).__name__}: {error}") from None


def facts_from_json(data: Mapping[str, Any]) -> Facts:
    """Read back what a Program said of itself."""
    params = {name: tuple(shape) for name, shape in data["params"].items()}
    more: dict[str, Any] = {key: tuple(data[key]) for key in ("terms", "problems")}
    more["buffers"] = tuple(data.get("buffers", ()))
    more["dtypes"] = tuple(data.get("dtypes", ()))
    more["hashed"] = tuple(data.get("hashed", ()))
    more["after"] = After(**data["after"]) if data.get("after") else None
    return Facts(**{**data, "params": params, **more})


def _script_from_json(data: Mapping[str, Any]) -> Script:
    return Script(
        command=str(data["command"]),
        rows=tuple(data["rows"]),
        losses=tuple(tuple(float(x) for x in step) for step in data["losses"]),
        said=tuple(data["said"]),
        rescaled=tuple(
            {n: (None if f is None else float(f), bool(clip)) for n, (f, clip) in step.items()}
            for step in data.get("rescaled", ())
        ),
        draws=tuple(data.get("draws", ())),
        since=_since_from_json(data["since"]) if data.get("since") else None,
        twins=tuple(tuple(map(str, names)) for names in data.get("twins", ())),
        again=tuple(
            tuple({n: float(x) for n, x in call.items()} for call in step)
            for step in data.get("again", ())
        ),
        zero=tuple(map(str, data.get("zero", ()))),
    )


def _since_from_json(data: Mapping[str, Any]) -> Since:
    changed = tuple(
        Changed(step=int(c["step"]), name=str(c["name"]),
                **{key: float(c[key]) for key in ("off", "bound", "size")})
        for c in data["changed"]
    )  # fmt: skip
    return Since(**{**data, "changed": changed})


def _check_spec(data: dict[str, Any], path: Path) -> None:
    steps, tiers = data["steps"], data["tiers"]
    problems = []
    if not isinstance(steps, int) or steps < 1:
        problems.append(f"{path}: steps: got {steps!r}, expected an integer >= 1")
    if not isinstance(tiers, dict) or not set(tiers.values()) <= set(DTYPES):
        problems.append(f"{path}: tiers: got {tiers!r}, expected names of {', '.join(DTYPES)}")
    if data["law"] not in ("report", "enforce"):
        problems.append(f"{path}: law: got {data['law']!r}, expected report or enforce")
    if (data.get("declaration") is None) == (data.get("facts") is None):
        problems.append(f"{path}: expected either a declaration or facts")
    if not isinstance(data.get("skipped", {} if data.get("declaration") else None), dict):
        problems.append(f"{path}: skipped: got {data.get('skipped')!r}, expected a mapping")
    if problems:
        raise UserError(problems)
