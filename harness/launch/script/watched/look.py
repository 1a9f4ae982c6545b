"""A failing step of a script once more, with eyes on its modules: on the ranks, and in one process.

What was trained so far does not matter: every step begins with the weights that the single run had.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sumgrad.ledger.process_group import Ledger, Observer
from sumgrad.record.endings import rank_file, read_ledger
from sumgrad.record.trace import Trace, rank_trace, single_trace, with_operations, write_trace
from sumgrad.subjects.exchanges import Exchanges
from sumgrad.subjects.program.watched.watch import ModuleWatch
from sumgrad.subjects.script.asked import Asked
from sumgrad.subjects.script.models import Models, outermost
from torch import Tensor, nn

SINGLE = "single"  # in place of a rank, in what is asked


class Look:
    """Of one process, and its ledger."""

    def __init__(self, asked: Asked, ledger: Ledger) -> None:
        self._asked, self._ledger = asked, ledger
        self._exchanges: Exchanges | None = None
        self._step = -1
        self._seen: ModuleWatch | None = None
        self._root: nn.Module | None = None
        self._passes = 0

    @property
    def of_the_single_process(self) -> bool:
        return self._asked.trace.endswith(f"/{SINGLE}")

    def entering(self, module: nn.Module, step: int, models: Models) -> None:
        """A model is called: the first one of the step is looked into."""
        if step != self._step and self._exchanges is not None:
            self._exchanges.begin_step()
        self._step = step
        if step != self._asked.look:
            return
        root = outermost(module)
        if self._seen is None:
            self._root = root
            self._seen = ModuleWatch(
                root,
                models.renumbered(root),
                operations=lambda: self._ledger.num_operations,
                with_paths=self.of_the_single_process,
                with_ways=True,
            )
            self._seen.__enter__()
        self._passes += root is self._root

    def observing(self, inner: Observer) -> Observer:
        """What observes the ledger, and keeps what collectives are given and give."""
        if self._exchanges is None:
            self._exchanges = Exchanges(self._ledger, inner)
        self._exchanges.inner = inner
        return self._exchanges.observe

    def at_loss(self, loss: Tensor) -> None:
        """backward is called on it."""
        if self._seen is not None:
            self._seen.at_loss(loss)

    def write(self, rank: int) -> None:
        """The step's gradients are there."""
        if self._seen is None:
            return
        self._seen.__exit__(None, None, None)
        found = self._seen.trace()
        folder = Path(self._asked.trace)
        if self.of_the_single_process:
            write_trace(single_trace(folder.parent), replace(found, batch=self._batch(found)))
        else:
            ledger = read_ledger(rank_file(Path(self._asked.directory), rank, ".ledger.jsonl"))
            kept = () if self._exchanges is None else self._exchanges.found
            found = with_operations(replace(found, exchanges=kept), ledger)
            write_trace(rank_trace(folder, rank), found)

    def _batch(self, found: Trace) -> dict[str, Tensor]:
        """What went into the model at once. Of several calls nobody says whose rows are whose."""
        if self._passes != 1 or not found.data:
            return {}
        num = len(found.data[0])
        return {f"input {i}": t for i, t in enumerate(found.data) if len(t) == num}
