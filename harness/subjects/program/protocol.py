"""A Program: a user's own distributed training step, seen from outside.

Any object with build, batch, loss_sum and step; no base class. `distribute` and `terms` are
optional. The step is opaque; loss_sum says in plain single-process code what it should compute.

    program = make_program("mine.py:MyStep", topology, seed=0)
    facts = program_probe.probe(program)     # parameters, rows, terms; or what is wrong with it
"""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from sumgrad.base.errors import Broken, UserError
from sumgrad.base.tensors import hash_weights, overlapping
from sumgrad.subjects.loading import find_class, lacking, takes
from sumgrad.subjects.program.caches import forget_those_of_others
from sumgrad.topology.pools import Topology
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

OPTIONAL = ("distribute", "gradient_of", "shard_of", "terms")  # that are called where they are


def is_program(cls: Any) -> bool:
    """Whether an object or a class has a Program's methods."""
    return not lacking(cls)


def misspelled(program: Any) -> list[str]:
    """Methods that nothing calls and whose names are nearly those of optional ones, in words."""
    own = {n for c in type(program).__mro__ if c is not object for n in vars(c)}
    lacks = [name for name in OPTIONAL if name not in own]
    near = {n: get_close_matches(n, lacks, n=1, cutoff=0.9) for n in sorted(own - {*OPTIONAL})
            if callable(getattr(program, n, None))}  # fmt: skip
    return [f"{type(program).__name__}.{name} is not called: did you mean {close[0]}?"
            for name, close in near.items() if close]  # fmt: skip


def make_program(spec: str, topology: Topology, *, seed: int, like: Any = None) -> Any:
    """The Program that a topology or `--workload` names. Raises UserError.

    Its class is called with those of `options`, `seed` and `topology` that it takes. like: a
    Program that was made so, of whose class it is to be, as it is now; else its file is read anew.
    """
    where = topology.where(("workload",)) if spec == topology.workload else "--workload"
    made = like._program if isinstance(like, FirstRows) else like
    cls = find_class(spec, where) if made is None else type(made)
    program = _make(cls, spec, topology, where, seed)
    return FirstRows(program, topology.rows) if topology.rows else program


class FirstRows:
    """A Program whose batch is cut to its first rows."""

    def __init__(self, program: Any, rows: int) -> None:
        self._program, self._rows = program, rows
        self._batch = program.batch  # its own, whatever is held in its place later

    @property
    def whole_batch(self) -> Any:
        """The Program's own batch(), of all rows."""
        return self._batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            setattr(self._program, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._program, name)
        super().__delattr__(name)

    def batch(self, *args: Any, **named: Any) -> Any:
        batch = self._batch(*args, **named)
        return {key: value[: self._rows] for key, value in batch.items()}


def check_options_taken(spec: str, topology: Topology) -> None:
    """UserError where a topology has options and the Program takes none. Runs none of its code."""
    cls = find_class(spec, "--workload")
    if topology.options and not (inspect.isclass(cls) and takes(cls, "options")):
        raise UserError(
            f"{topology.where(('options',))}: {spec} takes no options; its __init__ has no "
            f"parameter `options`"
        )


def _make(cls: Any, spec: str, topology: Topology, where: str, seed: int) -> Any:
    if not inspect.isclass(cls):
        return cls
    offered = {"options": topology.options, "seed": seed, "topology": topology}
    given = {name: value for name, value in offered.items() if takes(cls, name)}
    try:
        return cls(**given)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: {spec} raised {type(error).__name__}: {error}") from error


def scramble(*numbers: int) -> None:
    """Seed every global generator from these numbers: what is drawn unseeded differs each time."""
    seed = 0x5EED
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack for lazy CUDA
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)


def call(program: Any, name: str, *args: Any, **named: Any) -> Any:
    """Call a method; Broken with the user's own file and line if it raises."""
    try:
        return getattr(program, name)(*args, **named)
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        users = [f for f in frames if "/torch/" not in f.filename] or frames
        place = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
        raise Broken(f"{name}() raised {type(error).__name__}: {error}{place}") from error


def with_place(program: Any, text: str) -> str:
    """What is wrong with a Program, and where the method stands that it is said of."""
    method = re.match(r"(\w+)\(\)", text)
    if method is None or re.search(r"\.py:\d", text):
        return text
    try:
        code = inspect.unwrap(getattr(program, method.group(1))).__func__.__code__
    except AttributeError:
        return text
    return f"{text} ({code.co_filename}:{code.co_firstlineno})"


def build(program: Any) -> nn.Module:
    """A fresh model. Broken if it is none."""
    model = call(program, "build")
    if not isinstance(model, nn.Module):
        raise Broken(f"build() returned {type(model).__name__}, expected an nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise Broken("build(): no parameter requires a gradient")
    for name, param in model.named_parameters():
        if isinstance(param, UninitializedParameter):
            raise Broken(
                f"build(): {name} of a lazy module has no shape yet: call the model once in build()"
            )
        if any(n > 1 and not step for n, step in zip(param.shape, param.stride(), strict=True)):
            raise Broken(
                f"build(): elements of {name} share memory, as of an expanded view, and have no "
                f"values of their own: clone it"
            )
    if tied := _tied_by_memory(model):
        raise Broken(
            f"build(): {tied[0]} and {tied[1]} are two parameters in one memory, as after "
            f"`a.data = b.data`: each has a gradient of its own, and a step of one moves the "
            f"other, until they are cast or copied; let them be one Parameter, `a = b`"
        )
    return model


def _tied_by_memory(model: nn.Module) -> tuple[str, str] | None:
    """The first two parameters that are not one and have memory in common: not those beside each
    other in a flat buffer."""
    plain = ((n, p) for n, p in model.named_parameters()
             if not p.is_meta and p.numel() and type(p.data) is Tensor)  # fmt: skip
    return next(overlapping(plain), None)


def to_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in a dtype. `Module.to` would take complex numbers' imaginary part away."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64

    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor.to(wide) if tensor.is_complex() else tensor

    return model._apply(converted)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Of the dtypes that are checked, that of fewest digits: all tiers have its numbers."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


Tie = list[tuple[str, nn.Module, str]]


def tied(model: nn.Module) -> list[Tie]:
    """Parameters that are one under several names: name, module and attribute of each."""
    uses: dict[int, Tie] = {}
    for prefix, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                name = f"{prefix}.{attribute}".lstrip(".")
                uses.setdefault(id(param), []).append((name, module, attribute))
    return [tie for tie in uses.values() if len(tie) > 1]


def untied(ties: Sequence[Tie], model: nn.Module) -> list[list[str]]:
    """The names of those that are several now, among the modules that the model still has."""
    inside = {id(module) for module in model.modules()}
    out = []
    for tie in ties:
        held = {name: module._parameters.get(attribute) for name, module, attribute in tie
                if id(module) in inside}  # fmt: skip
        now = {name: param for name, param in held.items() if param is not None}
        if len({id(param) for param in now.values()}) > 1:
            out.append(list(now))
    return out


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, tied ones once, by their first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors are float64 while float64 is judged; other dtypes leave the default alone."""
    forget_those_of_others(dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype == torch.float64 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- loss terms ----------------------------------------------------------------------------------


def terms_of(program: Any) -> dict[str, Any]:
    """Term name -> a loss_sum-like function, or a pair (statistics, value). Broken if malformed."""
    terms = getattr(program, "terms", None)
    if terms is None:
        return {"loss": program.loss_sum}
    if callable(terms):
        try:
            inspect.signature(terms).bind()
        except TypeError as error:
            raise Broken(
                f"terms: the name is taken for the loss's terms, a dict or a method that gives "
                f"one, and yours cannot be called without arguments ({error})"
            ) from None
        terms = terms()
    if not isinstance(terms, Mapping) or not terms:
        raise Broken(f"terms: got {kind_of(terms)}, expected a dict of functions")
    out = {}
    for name, term in terms.items():
        parts = term if isinstance(term, tuple) else (term,)
        if len(parts) > 2 or not all(callable(part) for part in parts) or "/" in str(name):
            raise Broken(f"terms[{name!r}]: expected a function, or (statistics, value)")
        bound = tuple(_bound(program, part) for part in parts)
        out[str(name)] = bound if len(bound) == 2 else bound[0]
    return out


def _bound(program: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function written in the class body lacks its `self`: all of them take two arguments."""
    try:
        taken = inspect.signature(function).parameters.values()
        given = sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in taken)
    except (TypeError, ValueError):
        return function
    return function.__get__(program) if given == 3 else function


def function_of(term: str) -> str:
    """What gives a term's sum, in words."""
    return "loss_sum()" if term == "loss" else f"terms[{term!r}]"


def loss_of(
    term: Callable[..., Any], name: str, model: nn.Module, rows: Any
) -> tuple[Tensor, float]:
    """(SUM, count) of a loss_sum-like function, checked. Broken if it gives anything else."""
    what = function_of(name)
    result = term(model, rows)
    if not isinstance(result, tuple) or len(result) != 2:
        raise Broken(f"{what} returned {kind_of(result)}, expected (sum, count)")
    total, count = result
    if not isinstance(total, Tensor) or total.dim() != 0:
        raise Broken(f"{what}: the sum is {kind_of(total)}, expected a tensor of shape ()")
    if isinstance(count, Tensor) and count.requires_grad:
        raise Broken(
            f"{what}: the count depends on parameters, and it is taken as a constant: return its "
            f"detach() where the step does so, too, and else the ratio as the sum, with count 1"
        )
    number = float(count)
    if not number >= 0:
        raise Broken(f"{what}: the count is {number}, expected a number >= 0")
    return total, number


def hash_model(model: nn.Module) -> str:
    """A hash of a model's parameters and buffers, also of those that no state_dict has."""
    held = {f"p.{n}": p.detach() for n, p in model.named_parameters()}
    return hash_weights(held | {f"b.{n}": b for n, b in model.named_buffers()})


class Weights(Mapping[str, Tensor]):
    """The weights of a step by name: build()'s, then moved by drawn perturbations, made when asked.

    base: as build() gives them. rounded: to whose numbers; dtype: what they are given in. The move
    does not depend on gradients, so that steps can be judged one by one.
    """

    def __init__(
        self, base: Mapping[str, Tensor], step: int, rounded: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.base, self.step, self.rounded, self.dtype = base, step, rounded, dtype
        self._number = {name: i for i, name in enumerate(sorted(base))}

    def __getitem__(self, name: str) -> Tensor:
        moved = value = self.base[name]
        if self.step and value.is_floating_point() and value.numel():
            seed = 7919 * self.step + self._number[name]
            generator = torch.Generator().manual_seed(seed)
            moved = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            size = float(value.float().square().mean().sqrt()) or 0.1
            moved = moved.mul_(0.1 * size).add_(value)
        return moved.to(self.rounded).to(self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
