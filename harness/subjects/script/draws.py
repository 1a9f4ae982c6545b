"""What a script draws at random between two optimizer steps: whether another run drew the same.

A noise that is drawn per rank makes another function of every rank, and its gradients are no
mistake. A draw is known by its line and by digests of its rows, so that one for the whole batch is
the same wherever a rank takes its own rows of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from sumgrad.base.outcome import IN_WORKERS
from sumgrad.base.tensors import in_a_transform
from sumgrad.subjects.users_line import users_line
from torch import Tensor, nn

MAX_ROWS = 1024  # of one draw; further ones are not looked at
MOST_WRITTEN = 1 << 22  # bytes of digests of other processes; of more nothing is told
MOST = 65536  # draws of one line between two steps; a line that draws more is not looked at
_DRAWS = {
    torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.normal, torch.bernoulli,
    torch.poisson, torch.binomial, torch.multinomial, torch.randint, torch.randint_like,
    Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli, Tensor.bernoulli_,
    Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_, Tensor.random_, Tensor.multinomial,
}  # fmt: skip


class Draws:
    """Of one process, and of those that it forks, as a DataLoader's workers. Integers outside of a
    model are no draws: they choose rows, and which rows are read is compared by itself.

    file: into which forked processes write theirs.
    """

    def __init__(self) -> None:
        self.file: Path | None = None
        self._process = os.getpid()
        self._drawn: dict[str, set[str]] = {}
        self._before: dict[str, list[str]] | None = None  # the first call of a model
        self._state: str | None = None

    def seen(self, func: Callable[..., Any], result: Any) -> None:
        """A function of torch was called outside of torch's own."""
        if func not in _DRAWS or torch.compiler.is_compiling() or in_a_transform():
            return  # of a compiled forward the generator's state tells
        if not isinstance(result, Tensor) or isinstance(result, nn.Parameter):
            return
        inside = self._state is not None
        if type(result) is not Tensor or not (inside or result.is_floating_point()):
            return
        if result.numel():
            rows = result.detach().reshape(len(result) if result.dim() else 1, -1)[:MAX_ROWS]
            self._keep(rows.cpu().contiguous().view(torch.uint8).numpy())

    def _keep(self, drawn: numpy.ndarray) -> None:
        if os.getpid() != self._process:
            self._write(drawn)
            return
        held = self._drawn.setdefault(users_line(), set())
        if len(held) <= MOST:
            held.update(_digests(drawn))

    def _write(self, drawn: numpy.ndarray) -> None:
        if self.file is None:
            return
        lines = "".join(f"{digest} {users_line()}\n" for digest in sorted(_digests(drawn)))
        with contextlib.suppress(OSError):
            number = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                if os.fstat(number).st_size < MOST_WRITTEN:
                    os.write(number, lines.encode())
            finally:
                os.close(number)

    def of_workers(self) -> dict[str, list[str]]:
        """What forked processes have drawn since this one began: line -> digests."""
        found: dict[str, set[str]] = {}
        with contextlib.suppress(OSError, ValueError):
            if self.file is not None and self.file.stat().st_size < MOST_WRITTEN:
                for line in self.file.read_text().splitlines():
                    digest, _, place = line.partition(" ")
                    found.setdefault(place, set()).add(digest)
        return {f"{place}{IN_WORKERS}": sorted(held) for place, held in found.items()}

    def of_numbers(self, drawn: Any) -> None:
        """A number was drawn by Python, or an array by numpy."""
        array = numpy.asarray(drawn)
        if array.dtype.kind == "f":
            self._keep(array)

    def entering(self) -> None:
        """A model is called: a rank that was forked is none of those that draw for another."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self.file = self.file and self.file.with_name(f"{self.file.name}_{self._process}")
        if self._before is None:
            self._before = self.taken()
        self._state = _state()

    def leaving(self, label: str) -> None:
        """It has ended: what it drew, whoever drew it, if it drew anything."""
        now, before = _state(), self._state
        if before is not None and now != before:
            self._drawn.setdefault(f"the forward of {label}", set()).add(f"{before}>{now}")
        self._state = None

    def taken(self) -> dict[str, list[str]]:
        """Where something was drawn since the last call: line -> digests."""
        drawn, self._drawn = self._drawn, {}
        return {place: sorted(held) for place, held in drawn.items() if len(held) <= MOST}

    def before_the_first(self, later: Iterable[Iterable[str]]) -> dict[str, list[str]]:
        """What the first step drew before its forward: of what came before it, the lines that
        later steps draw on, too. (The others made the weights.)"""
        again = {place for step in later for place in step}
        return {p: drawn for p, drawn in (self._before or {}).items() if p in again}


def _state() -> str:
    """Digest of the states of the generators that a model may draw from."""
    total = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    total.update(repr(random.getstate()).encode())
    state = numpy.random.get_state(legacy=False)["state"]
    total.update(state["key"].tobytes())
    total.update(str(state["pos"]).encode())
    return total.hexdigest()


def _digests(drawn: numpy.ndarray) -> set[str]:
    """Of its rows."""
    rows = drawn.reshape(len(drawn) if drawn.ndim else 1, -1)[:MAX_ROWS] if drawn.size else ()
    return {hashlib.blake2b(r.tobytes(), digest_size=8).hexdigest() for r in rows}
