"""What five ranks do for `sumgrad ops`: share the configurations out, then meet as real groups.

First every operator's base configuration is computed once and stored. Then the ranks take
(operator, property) units from a common list, each claimed by creating a file. Last come the
data-parallel properties: the ranks of a group of 1, 2, 3 or 5 compute their shares and reduce the
weight gradients over gloo, by the operator's own exchange. Whatever an operator raises is its own
result and ends nobody else's.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from sumgrad.invariance.arrangement import PROPERTIES, RANK_COUNTS, Call, base, ranked
from sumgrad.invariance.bits import Difference, compare, describe, errors_against_oracle, raised
from sumgrad.invariance.operator_run import (
    Problem,
    Tensors,
    draw_problem,
    run_arrangement,
    run_share,
    starts_of,
)
from sumgrad.invariance.protocol import Operator, OperatorError, has_a_row_for_each_token, validate
from sumgrad.invariance.runs import LENGTHS, USER_ERRORS, check_operator
from sumgrad.launch.guard import RankGuard
from sumgrad.launch.rank import local_group, meet
from sumgrad.subjects.loading import import_file

NUM_RANKS = max(RANK_COUNTS)
LOCAL = [prop for prop in PROPERTIES if not prop.startswith("dp")]
Selection = Sequence[tuple[str, Sequence[str] | None]]


def load_operators(source: str) -> list[Operator]:
    """Operators from "module:NAME" or "file.py:NAME": an operator, a list, or a function of none.

    Raises OperatorError for anything else, and whatever the file raises.
    """
    where, _, name = source.rpartition(":")
    module = import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    value = getattr(module, name)
    if inspect.isfunction(value):
        if inspect.signature(value).parameters:
            raise OperatorError(
                f"{name} is a function of {len(inspect.signature(value).parameters)} arguments, "
                f"not an operator; wrap it with sumgrad.invariance.runs.plain"
            )
        value = value()
    found = list(value) if isinstance(value, list | tuple) else [value]
    for operator in found:
        validate(operator)
    return found


def select(selection: Selection) -> list[Operator]:
    """The operators of some sources; names: those to keep (None: all)."""
    return [
        operator
        for source, names in selection
        for operator in load_operators(source)
        if names is None or operator.name in names
    ]


def ops_rank(
    guard: RankGuard, *, selection: Selection, dtype: str, seed: int, device: str = "cpu"
) -> dict[str, Any]:
    """One rank's part; cells and errors go into files in the run directory."""
    operators = select(selection)
    work = _Work(guard, operators, getattr(torch, dtype), seed, device)
    with local_group(guard) as ledger:
        for i in work.claim("base", len(operators)):
            work.run_base(i)
        meet(ledger)
        units = [(i, prop) for i in range(len(operators)) for prop in LOCAL]
        for n in work.claim("unit", len(units)):
            work.check(*units[n])
        meet(ledger)
        groups = {size: dist.new_group(list(range(size))) for size in RANK_COUNTS}
        for i in range(len(operators)):
            for size, group in groups.items():
                if guard.env.rank < size:
                    work.check_ranks(i, size, group)
        meet(ledger)
    return {}


class _Work:
    """The common list in the run directory. Operators go by their number."""

    def __init__(
        self,
        guard: RankGuard,
        operators: Sequence[Operator],
        dtype: torch.dtype,
        seed: int,
        device: str,
    ) -> None:
        self.directory, self.rank = guard.env.directory, guard.env.rank
        self.operators, self.dtype, self.seed, self.device = operators, dtype, seed, device
        self.files = 0

    def claim(self, kind: str, number: int) -> Iterator[int]:
        """The numbers that nobody took before."""
        for i in range(number):
            try:
                (self.directory / f"{kind}-{i}.claim").touch(exist_ok=False)
            except FileExistsError:
                continue
            yield i

    def now(self, text: str) -> None:
        """Leave word of what this rank is at, for the case that it never comes back."""
        (self.directory / f"now-{self.rank}.txt").write_text(text)

    def run_base(self, number: int) -> None:
        """Run the base configuration, compare with the oracle, keep the results."""
        operator = self.operators[number]
        self.now(f"{operator.name}: {base(LENGTHS).name}")
        try:
            problem = self._problem(operator)
            found = run_arrangement(operator, problem, base(LENGTHS))
            save_file({k: v.contiguous() for k, v in found.items()}, self._base_file(number))
        except USER_ERRORS as error:
            self._write(number, failure=f"the base configuration: {_text(error)}")
            return
        try:
            errors = errors_against_oracle(operator, problem, found)
        except USER_ERRORS as error:
            self._write(number, tensors=list(found), failure=f"its oracle: {_text(error)}")
            return
        self._write(number, tensors=list(found), errors=errors)

    def _problem(self, operator: Operator) -> Problem:
        return draw_problem(
            operator, lengths=LENGTHS, seed=self.seed, dtype=self.dtype, device=self.device
        )

    def _base_file(self, number: int) -> Path:
        return self.directory / f"base-{number}.safetensors"

    def _base(self, number: int) -> Tensors | None:
        path = self._base_file(number)
        return load_file(path) if path.exists() else None

    def check(self, number: int, prop: str) -> None:
        """One property in this process."""
        operator, found = self.operators[number], self._base(number)
        if found is None or (prop == "chunked" and not operator.chunks):
            return
        self.now(f"{operator.name}: {prop}")
        try:
            report = check_operator(
                operator,
                dtype=self.dtype,
                seed=self.seed,
                properties=[prop],
                num_ranks=(),
                reference=found,
                device=self.device,
                progress=self.now,
            )
        except USER_ERRORS as error:
            self._write(number, failure=f"{prop}: {_text(error)}")
            return
        self._write(number, cells=[(t, p, d) for (t, p), d in report.cells.items()])

    def check_ranks(self, number: int, size: int, group: Any) -> None:
        """One size of group, on its ranks; a rank that fails says so before the others wait."""
        operator, reference = self.operators[number], self._base(number)
        if reference is None:
            return
        arrangement = ranked(LENGTHS, size, cut=operator.cut, rows_alone=operator.rows_alone)
        self.now(f"{operator.name}: {arrangement.name}")
        order = 100 * size + self.rank
        failure = ""
        try:
            share = run_share(operator, self._problem(operator), arrangement, self.rank)
        except USER_ERRORS as error:
            failure = _text(error)
        failures: list[Any] = [None] * size
        dist.all_gather_object(failures, failure, group=group)
        first = next((i for i, text in enumerate(failures) if text), None)
        if first is not None:
            text = f"rank {first} of {size}: {failures[first]}"
            cells = raised(operator.name, arrangement, list(reference), text, order)
        else:
            rows = {name: value.cpu() for name, value in share.rows.items()}
            found = {**rows, **operator.exchange(share.state, group)}
            own = _own_rows(arrangement.calls, self.rank)
            names = (
                (base(LENGTHS).name, _restricted(operator, reference, own)),
                (f"{arrangement.name}, rank {self.rank}", _restricted(operator, found, own)),
            )
            cells = compare(operator.name, arrangement, *names, order=order)
            cells = {t: d and _logical(d, operator, own) for t, d in cells.items()}
        self._write(number, cells=[(t, arrangement.prop, d) for t, d in cells.items()])

    def _write(
        self,
        number: int,
        *,
        cells: Sequence[tuple[str, str, Difference | None]] = (),
        tensors: Sequence[str] = (),
        errors: dict[str, float] | None = None,
        failure: str | None = None,
    ) -> None:
        data = {
            "number": number,
            "cells": [(t, p, d and asdict(d)) for t, p, d in cells],
            "tensors": list(tensors),
            "errors": errors,
            "failure": failure,
        }
        self.files += 1
        name = f"cells-{self.rank}-{self.files}.json"
        temporary = self.directory / f".{name}"
        temporary.write_text(json.dumps(data))
        temporary.rename(self.directory / name)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, OperatorError) else describe(error)


def _own_rows(calls: Sequence[Call], rank: int) -> torch.Tensor:
    """bool (tokens,): the logical rows that a rank computes."""
    starts = starts_of(LENGTHS)
    own = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    for call in calls:
        for s in call.segments if call.rank == rank else ():
            own[starts[s.sample] + s.start : starts[s.sample] + s.stop] = True
    return own


def _restricted(operator: Operator, found: Tensors, own: torch.Tensor) -> Tensors:
    """Results without those rows that other ranks compute."""
    by_row = {name for name in found if has_a_row_for_each_token(operator, name)}
    return {
        name: value[own] if name in by_row else value
        for name, value in found.items()
        if name not in by_row or own.any()
    }


def _logical(found: Difference, operator: Operator, own: torch.Tensor) -> Difference:
    """The index of the row in the whole batch, not among the rank's own."""
    if not has_a_row_for_each_token(operator, found.tensor) or not found.index:
        return found
    return replace(found, index=(int(own.nonzero()[found.index[0]]), *found.index[1:]))
