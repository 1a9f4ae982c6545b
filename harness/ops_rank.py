"""What five ranks do for `sumgrad ops`: share the configurations out, then meet as real groups.

First every operator's base configuration is computed once and stored. Then the ranks take
(operator, property) units from a common list, each claimed by creating a file. Last come the
data-parallel properties: the ranks of a group of 1, 2, 3 or 5 compute their shares and reduce the
weight gradients over gloo, by the operator's own exchange.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from sumgrad.arrangement import PROPERTIES, RANK_COUNTS, Arrangement, base, ranked
from sumgrad.check_rank import local_group, meet
from sumgrad.invariance import (
    LENGTHS,
    Difference,
    Operator,
    Problem,
    Report,
    Tensors,
    check_operator,
    compare,
    draw_problem,
    errors_against_oracle,
    raised,
    run_arrangement,
    run_share,
)
from sumgrad.rank import RankGuard
from sumgrad.workload import import_file

NUM_RANKS = max(RANK_COUNTS)
LOCAL = [prop for prop in PROPERTIES if not prop.startswith("dp")]


def load_operators(sources: Sequence[str]) -> list[Operator]:
    """Operators from "module:function" and "file.py:NAME" (an operator, or a list of them)."""
    found: list[Operator] = []
    for source in sources:
        where, _, name = source.rpartition(":")
        module = (
            import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        )
        value = getattr(module, name)
        value = value() if callable(value) else value
        found += value if isinstance(value, list) else [value]
    return found


def ops_rank(
    guard: RankGuard,
    *,
    sources: list[str],
    names: list[str],
    dtype: str,
    seed: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """One rank's part; cells and errors go into files in the run directory."""
    operators = [op for op in load_operators(sources) if not names or op.name in names]
    work = _Work(guard.env.directory, operators, getattr(torch, dtype), seed, device)
    with local_group(guard) as ledger:
        for i in work.claim("base", len(operators)):
            work.store_base(operators[i])
        meet(ledger)
        units = [(op, prop) for op in operators for prop in LOCAL]
        for i in work.claim("unit", len(units)):
            work.check(*units[i])
        meet(ledger)
        groups = {size: dist.new_group(list(range(size))) for size in RANK_COUNTS}
        for operator in operators:
            for size, group in groups.items():
                if guard.env.rank < size:
                    work.check_ranks(operator, size, guard.env.rank, group)
        meet(ledger)
    return {}


class _Work:
    """The common list in the run directory."""

    def __init__(
        self,
        directory: Path,
        operators: Sequence[Operator],
        dtype: torch.dtype,
        seed: int,
        device: str,
    ) -> None:
        self.directory, self.dtype, self.seed, self.device = directory, dtype, seed, device
        self.slot = {op.name: i for i, op in enumerate(operators)}
        self.files = 0

    def claim(self, kind: str, number: int) -> Iterator[int]:
        """The numbers that nobody took before."""
        for i in range(number):
            try:
                (self.directory / f"{kind}-{i}.claim").touch(exist_ok=False)
            except FileExistsError:
                continue
            yield i

    def store_base(self, operator: Operator) -> None:
        """Run the base configuration, compare with the oracle, keep the results."""
        problem = self._problem(operator)
        try:
            found = run_arrangement(operator, problem, base(LENGTHS))
        except Exception as error:
            self._write([], operator, failure=f"{type(error).__name__}: {error}")
            return
        save_file({k: v.contiguous() for k, v in found.items()}, self._base_file(operator))
        self._write([], operator, errors=errors_against_oracle(operator, problem, found))

    def _problem(self, operator: Operator) -> Problem:
        return draw_problem(operator, seed=self.seed, dtype=self.dtype, device=self.device)

    def _base_file(self, operator: Operator) -> Path:
        return self.directory / f"base-{self.slot[operator.name]}.safetensors"

    def _base(self, operator: Operator) -> Tensors | None:
        path = self._base_file(operator)
        return load_file(path) if path.exists() else None

    def check(self, operator: Operator, prop: str) -> None:
        """One property in this process."""
        if prop == "chunked" and not operator.chunks:
            return
        found = self._base(operator)
        if found is None:
            return
        report: Report = check_operator(
            operator,
            dtype=self.dtype,
            seed=self.seed,
            properties=[prop],
            num_ranks=(),
            reference=found,
            device=self.device,
        )
        self._write([(t, p, d) for (t, p), d in report.cells.items()], operator)

    def check_ranks(self, operator: Operator, size: int, rank: int, group: Any) -> None:
        """One size of group, on its ranks; a rank that fails says so before the others wait."""
        arrangement = ranked(LENGTHS, size, cut=operator.cut, rows_alone=operator.rows_alone)
        reference = self._base(operator)
        if reference is None:
            return
        problem = self._problem(operator)
        failure = ""
        try:
            share = run_share(operator, problem, arrangement, rank)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        failures: list[Any] = [None] * size
        dist.all_gather_object(failures, failure, group=group)
        if any(failures):
            first = next(f for f in failures if f)
            cells = raised(operator.name, arrangement, reference, RuntimeError(first))
        else:
            rows = {name: value.cpu() for name, value in share.rows.items()}
            found = {**rows, **operator.exchange(share.state, group)}
            cells = compare(
                operator.name,
                arrangement.prop,
                (base(LENGTHS).name, _restricted(operator, reference, arrangement, rank)),
                (
                    f"{arrangement.name}, rank {rank}",
                    _restricted(operator, found, arrangement, rank),
                ),
            )
        self._write([(t, arrangement.prop, d) for t, d in cells.items()], operator)

    def _write(
        self,
        cells: list[tuple[str, str, Difference | None]],
        operator: Operator,
        *,
        errors: dict[str, float] | None = None,
        failure: str | None = None,
    ) -> None:
        data = {
            "operator": operator.name,
            "expect": operator.expect,
            "cells": [(t, p, d and asdict(d)) for t, p, d in cells],
            "errors": errors or {},
            "failure": failure,
        }
        self.files += 1
        name = f"cells-{time.monotonic_ns()}-{id(self)}-{self.files}.json"
        temporary = self.directory / f".{name}"
        temporary.write_text(json.dumps(data))
        temporary.rename(self.directory / name)


def _own_rows(arrangement: Arrangement, rank: int) -> torch.Tensor:
    """bool (tokens,): the logical rows that a rank computes."""
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    own = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    for call in arrangement.calls:
        for s in call.segments if call.rank == rank else ():
            own[starts[s.sample] + s.start : starts[s.sample] + s.stop] = True
    return own


def _restricted(operator: Operator, found: Tensors, arrangement: Arrangement, rank: int) -> Tensors:
    """Results without those rows that other ranks compute."""
    own = _own_rows(arrangement, rank)
    by_row = {"y", *("d" + name for name in operator.rows)} - {"d" + n for n in operator.weights}
    return {
        name: value[own] if name in by_row else value
        for name, value in found.items()
        if name not in by_row or own.any()
    }
