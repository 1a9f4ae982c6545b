"""The protocol of a planned workload: formulas only.

A workload is a class `W(options, *, seed)`; with a parameter `where` it is also given
`where(key_path) -> "file.yaml:LINE: key.path"`, for errors about options. It declares itself (data,
for the Plan), gives the weights of every step, and casts its formulas to a dtype. The formulas hold
no normaliser, no rank and no collective: the distributed step and the reference call the same ones,
each with counts that it took itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sumgrad.base.errors import UserError
from sumgrad.subjects.loading import find_class, takes
from sumgrad.topology.declaration import Declaration
from sumgrad.topology.pools import Topology

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Produced:
    """What the producing role computes from its rows.

    quantity: unit -> (n, ...), the numbers that travel to the other pools.
    inner: whatever the workload's own statistics need (the logits behind the quantity, say).
    """

    quantity: dict[str, torch.Tensor]
    inner: Any = None


class Formulas(Protocol):
    """A workload's mathematics in one dtype on one device.

    rows: (n,) int64, global row indices in any order, n >= 1. params, quantity: by name and unit.
    state: rank-local tensors, rows first, of a term that carries some from step to step.
    """

    def produce(self, params: Tensors, rows: torch.Tensor) -> Produced: ...

    def count(self, term: str, rows: torch.Tensor) -> int:
        """What a term is divided by, counted over these rows (all that exist: the global count)."""
        ...

    def coefficient(self, term: str) -> float:
        """The term's fixed factor in the loss."""
        ...

    def loss_sum(
        self,
        term: str,
        *,
        params: Tensors,
        quantity: Tensors,
        rows: torch.Tensor,
        units: tuple[str, ...],
        step: int,
        state: Tensors,
    ) -> torch.Tensor:
        """Unnormalised loss of a `rows` or `replicated` term over these rows and units (scalar)."""
        ...

    def statistics(self, term: str, produced: Produced, rows: torch.Tensor) -> torch.Tensor:
        """A `statistic` term's additive sums over these rows, 1-d."""
        ...

    def value(self, term: str, statistics: torch.Tensor, count: int) -> torch.Tensor:
        """A `statistic` term's value, without its coefficient, at the global sums."""
        ...

    def initial_state(self, term: str, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """State before the first step; empty for a term without state."""
        ...

    def advance(
        self,
        term: str,
        *,
        params: Tensors,
        quantity: Tensors,
        rows: torch.Tensor,
        step: int,
        state: Tensors,
    ) -> dict[str, torch.Tensor]:
        """The state that this step's loss uses, from the previous one. Nothing here is trained."""
        ...


@runtime_checkable
class Workload(Protocol):
    """What `--workload` loads: `W(options, *, seed)` with these members."""

    declaration: Declaration

    def params(self, step: int) -> dict[str, torch.Tensor]:
        """The float64 weights at a step; between steps they move by a drawn perturbation."""
        ...

    def formulas(
        self, dtype: torch.dtype, device: str, *, rounded_to: torch.dtype | None = None
    ) -> Formulas:
        """The formulas in a dtype; constants are rounded to `rounded_to` first, if it is given.

        A workload that can also run on Triton's kernels takes `kernels="triton"` here.
        """
        ...


def load_workload(spec: str, topology: Topology, *, seed: int) -> Workload:
    """Make the workload that a topology or a flag names.

    spec: NAME of a shipped one, `file.py:Class` (a relative path starts at the working directory)
    or `package.module:Class`. UserError says what is wrong with it.
    """
    where = topology.where(("workload",)) if spec == topology.workload else "--workload"
    cls = find_class(spec, where)
    if topology.rows is not None:
        raise UserError(f"{topology.where(('rows',))}: is for Programs; a workload has options")
    try:
        more = {"where": topology.where} if takes(cls, "where") else {}
        workload = cls(topology.options, seed=seed, **more)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{where}: {spec} raised {type(error).__name__}: {error}") from error
    missing = [m for m in ("declaration", "params", "formulas") if not hasattr(workload, m)]
    if missing:
        raise UserError(f"{where}: {spec} is no workload: it lacks {', '.join(missing)}")
    if not isinstance(workload.declaration, Declaration):
        raise UserError(
            f"{where}: {spec}.declaration is no sumgrad.topology.declaration.Declaration"
        )
    return workload


def first_params(workload: Workload) -> dict[str, torch.Tensor]:
    """The weights of the first step, checked. UserError for whatever is wrong with them."""
    name = workload.declaration.workload
    try:
        params = workload.params(0)
        check_params(workload, params)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        text = f"workload {name}: params(0) raised {type(error).__name__}: {error}"
        raise UserError(text) from error
    return params


def check_params(workload: Workload, params: Mapping[str, torch.Tensor]) -> None:
    """UserError where the weights are not those that the workload declares."""
    import torch

    name = workload.declaration.workload
    if not isinstance(params, Mapping):
        raise UserError(f"workload {name}: params(): got {type(params).__name__}, expected a dict")
    odd = [key for key, value in params.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise UserError([f"workload {name}: params(): {key!r} is no tensor" for key in odd])
    declared = {param.name: param.shape for param in workload.declaration.params}
    problems = [f"params(): lacks {name!r}" for name in declared if name not in params]
    problems += [f"params(): {name!r} is not declared" for name in params if name not in declared]
    problems += [
        f"params(): {name!r} has shape {tuple(params[name].shape)}, declared {shape}"
        for name, shape in declared.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    if problems:
        raise UserError([f"workload {workload.declaration.workload}: {p}" for p in problems])


def check_produced(declaration: Declaration, produced: Produced, num_rows: int) -> None:
    """ValueError where the quantity is not what the workload declares."""
    quantity = declaration.quantity
    for unit, shape in quantity.shapes.items() if quantity else ():
        got = tuple(produced.quantity[unit].shape) if unit in produced.quantity else None
        if got != (num_rows, *shape):
            raise ValueError(f"produce(): {unit!r} has shape {got}, declared {(num_rows, *shape)}")


def check_statistics(declaration: Declaration, term: str, sums: torch.Tensor) -> None:
    """ValueError where a statistic term's sums are not what the workload declares."""
    numel = declaration.term(term).statistic_numel
    if tuple(sums.shape) != (numel,):
        raise ValueError(f"statistics({term!r}) has shape {tuple(sums.shape)}, declared {(numel,)}")


def check_scalar(term: str, loss: torch.Tensor) -> None:
    """ValueError where a loss is no scalar."""
    if tuple(loss.shape) != ():
        raise ValueError(f"the loss of {term!r} has shape {tuple(loss.shape)}, expected a scalar")


def rank_formulas(workload: Workload, dtype: torch.dtype, device: str, *, kernels: str) -> Formulas:
    """The formulas that ranks execute. kernels: "torch" or "triton"; the reference has torch's."""
    more: dict[str, Any] = {} if kernels == "torch" else {"kernels": kernels}
    return workload.formulas(dtype, device, **more)


def has_kernels(workload: Workload) -> bool:
    """Whether a workload can run on Triton's kernels."""
    return takes(workload.formulas, "kernels")
