"""A failing step of a script once more, with eyes on its modules: on the ranks, and in one process.

What was trained so far does not matter: every step begins with the weights that the single run had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sumgrad.base.outcome import describe_operation
from sumgrad.record.endings import rank_file, read_ledger
from sumgrad.record.trace import Trace, rank_trace, single_trace, write_trace
from sumgrad.subjects.program.watch import ModuleWatch
from sumgrad.subjects.script.asked import Asked
from sumgrad.subjects.script.models import outermost
from torch import Tensor, nn

SINGLE = "single"  # in place of a rank, in what is asked


class Look:
    """Of one process. operations: how many collectives it has issued."""

    def __init__(self, asked: Asked, operations: Callable[[], int]) -> None:
        self._asked, self._operations = asked, operations
        self._seen: ModuleWatch | None = None
        self._root: nn.Module | None = None
        self._passes = 0

    @property
    def of_the_single_process(self) -> bool:
        return self._asked.trace.endswith(f"/{SINGLE}")

    def entering(self, module: nn.Module, step: int) -> None:
        """A model is called: the first one of the step is looked into."""
        if step != self._asked.look:
            return
        root = outermost(module)
        if self._seen is None:
            self._root = root
            self._seen = ModuleWatch(
                root,
                operations=self._operations,
                with_paths=self.of_the_single_process,
                with_ways=True,
            )
            self._seen.__enter__()
        self._passes += root is self._root

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
            words = tuple(describe_operation(e) or str(e["op"]) for e in ledger if "op" in e)
            write_trace(rank_trace(folder, rank), replace(found, operations=words))

    def _batch(self, found: Trace) -> dict[str, Tensor]:
        """What went into the model at once. Of several calls nobody says whose rows are whose."""
        if self._passes != 1 or not found.data:
            return {}
        num = len(found.data[0])
        return {f"input {i}": t for i, t in enumerate(found.data) if len(t) == num}
