"""What a rank under torchrun knows of the others: who lives, who said its last word; their files.

Ranks share rank 0's run directory; where one does not see it, its files travel through the store.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from sumgrad.base.files import write_bytes
from sumgrad.launch.guard import RankEnv
from sumgrad.launch.torchrun.agent import Store
from sumgrad.record.endings import rank_file, read_end_record
from sumgrad.record.ranks import GRADS_FILE

PROCESS, LEFT = ".process.json", ".left.json"  # who a rank is, and its last word
RECORD_SUFFIXES = (".safetensors", ".ledger.jsonl", ".stack", ".json")


class Others:
    """The ranks beside this one. shared: whether this one sees rank 0's run directory."""

    def __init__(self, env: RankEnv, store: Store, *, shared: bool) -> None:
        self._env, self._store, self._shared = env, store, shared

    def has_left(self, rank: int) -> bool:
        """Whether a rank has said its last word."""
        left = rank_file(self._env.directory, rank, LEFT).exists()
        return left or self.has_key(f"sumgrad/left/{rank}")

    def gone(self, rank: int) -> bool:
        """Whether a rank's process is known to exist no more; of another machine's it never is."""
        who = self.who(rank)
        return who is not None and who["host"] == socket.gethostname() and not _runs(who["pid"])

    def who(self, rank: int) -> dict[str, Any] | None:
        """Its process id and host; None where it has not said so, or not here."""
        try:
            who: dict[str, Any] = json.loads(
                rank_file(self._env.directory, rank, PROCESS).read_text()
            )
        except (OSError, ValueError):
            return None
        return who

    def lowest_living(self) -> int:
        """The rank that judges."""
        return next(r for r in range(self._env.world_size) if self.alive(r))

    def alive(self, rank: int) -> bool:
        """A rank of this machine whose process exists; one of another machine counts as alive
        until it has left a record that it did not end well."""
        if rank == self._env.rank:
            return True
        if not self._shared:
            return rank == 0
        if (who := self.who(rank)) is None:
            return self.has_key(f"sumgrad/remote/{rank}") and not self.has_key(
                f"sumgrad/sent/{rank}"
            )
        if who["host"] != socket.gethostname():
            return read_end_record(self._env.directory, rank) is None or rank == 0
        return _runs(who["pid"])

    def has_key(self, key: str) -> bool:
        """Whether the store has it; not where nobody answers."""
        try:
            return self._store.check(key)
        except RuntimeError:
            return False

    def collect(self, deadline: float) -> None:
        """Wait for the others' records and last words, and fetch the records that travel."""
        others = [r for r in range(self._env.world_size) if r != self._env.rank]
        while time.monotonic() < deadline:
            if all(self.settled(rank) for rank in others):
                return
            time.sleep(0.05)

    def settled(self, rank: int) -> bool:
        """Whether nothing more is to come of a rank; one that failed waits for the verdict."""
        record = read_end_record(self._env.directory, rank)
        if record is None:
            return not (self.fetch(rank) or self.alive(rank))
        return record["status"] != "ok" or self.gone(rank) or self.has_left(rank)

    def send_files(self) -> None:
        """What this rank has written, through the store."""
        for suffix in RECORD_SUFFIXES:
            file = self._env.file(suffix)
            if file.exists():
                self._store.set(f"sumgrad/file/{self._env.rank}/{suffix}", file.read_bytes())
        for name in sorted(self._gradient_files(self._env.rank)):
            if not self.has_key(f"sumgrad/grads/{name}"):
                data = (self._env.directory / "ranks" / name).read_bytes()
                self._store.set(f"sumgrad/grads/{name}", data)
        self._store.set(f"sumgrad/sent/{self._env.rank}", "1")

    def _gradient_files(self, rank: int) -> set[str]:
        """Names of the files that a rank's gradients are in."""
        result = (read_end_record(self._env.directory, rank) or {}).get("result") or {}
        return {name for name in result.get("grads", {}).values() if GRADS_FILE.fullmatch(name)}

    def fetch(self, rank: int) -> bool:
        """Write down here what a rank has sent; whether all of it was there."""
        if not self.has_key(f"sumgrad/sent/{rank}"):
            return False
        try:
            for suffix in RECORD_SUFFIXES:
                key = f"sumgrad/file/{rank}/{suffix}"
                if self.has_key(key):
                    path = rank_file(self._env.directory, rank, suffix)
                    write_bytes(path, self._store.get(key))
            for name in sorted(self._gradient_files(rank)):
                path = self._env.directory / "ranks" / name
                if not path.exists():
                    write_bytes(path, self._store.get(f"sumgrad/grads/{name}"))
        except RuntimeError:
            return False
        return True


def _runs(pid: int) -> bool:
    """Whether a process of this machine exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state not in ("Z", "X")
