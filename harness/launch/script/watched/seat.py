"""Which rank a process of a script is, once it says so: its ledger, files and one end record."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from sumgrad.base.outcome import SETUP
from sumgrad.launch.guard import RankEnv, RankGuard
from sumgrad.ledger.process_group import Ledger
from sumgrad.record.endings import rank_file, read_end_record
from sumgrad.record.ranks import INDEX, RankFiles
from sumgrad.subjects.script.asked import Asked
from torch import Tensor

OTHERS_S = 10.0  # that a rank which is done waits for the others


class Seat:
    """Taken by the first process that says it is a rank; of another with its number nothing is
    kept. ledger: records from the beginning, and is written once the rank is known."""

    def __init__(self, asked: Asked) -> None:
        self.directory, self._seconds = Path(asked.directory), asked.seconds
        self.ledger = Ledger(None)
        self._refused = False
        self._guard: RankGuard | None = None
        self._files: RankFiles | None = None
        self._label: contextlib.AbstractContextManager[None] | None = None

    @property
    def taken(self) -> bool:
        return self._guard is not None

    @property
    def files(self) -> RankFiles:
        assert self._files is not None, "no rank yet"
        return self._files

    def take(self) -> bool:
        """Whether this process is a rank; from the first time on its watchdog runs."""
        if self.taken:
            return True
        if self._refused or threading.current_thread() is not threading.main_thread():
            return False
        rank, world_size = place()
        try:
            claim = rank_file(self.directory, rank, ".claim")
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            self._refused = True
            return False
        env = RankEnv(
            rank=rank,
            world_size=world_size,
            directory=self.directory,
            rendezvous=self.directory / "rendezvous",
            timeout_s=self._seconds,
        )
        self._guard, self._files = RankGuard(env), RankFiles(self.directory, rank)
        self._guard.start()
        self._guard.ledger = self.ledger
        self.ledger.redirect(env.file(".ledger.jsonl"))
        self.name(f"{SETUP}/script")
        return True

    def name(self, text: str) -> None:
        """What operations belong to, from here on."""
        if self._label is not None:
            self._label.__exit__(None, None, None)
        self._label = self.ledger.label(text)
        self._label.__enter__()

    def raised(self, error: BaseException) -> None:
        """The end record of an exception."""
        assert self._guard is not None
        self._guard.raised(error)

    def finish(self, places: Mapping[str, Tensor], result: Mapping[str, Any]) -> None:
        """The end record of a rank that came to its end. places: which elements it holds."""
        assert self._guard is not None
        self.ledger.settle()
        self.files.others |= {f"{INDEX}/{name}": index for name, index in places.items()}
        try:
            files = self.files.finish(stretches=False)
        except OSError as error:
            self._guard.raised(error)
            return
        more = {"operations": self.ledger.num_operations, "world_size": place()[1]}
        self._guard.finish("ok", result={"grads": files, **result, **more})

    def wait_for_the_others(self) -> None:
        """Until every rank has its end record, or they had their time."""
        deadline, world_size = time.monotonic() + OTHERS_S, place()[1]
        while time.monotonic() < deadline and len(self._ended()) < world_size:
            time.sleep(0.02)

    def others_saw_enough(self, steps: int) -> bool:
        """Whether a rank has ended, and every one that has did so well, after so many steps."""
        records = [read_end_record(self.directory, rank) or {} for rank in self._ended()]
        return bool(records) and all(
            record.get("status") == "ok" and len(record["result"]["steps"]) >= steps
            for record in records
        )

    def _ended(self) -> list[int]:
        found = (self.directory / "ranks").glob("rank_*.json")
        return [int(path.stem.removeprefix("rank_")) for path in found]


def place() -> tuple[int, int]:
    """This process's rank and how many there are: by its group, else by its environment."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def is_a_rank() -> bool:
    """Whether the environment says so, of a process that the script did not start itself."""
    return "RANK" in os.environ and multiprocessing.parent_process() is None
