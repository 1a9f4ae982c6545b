"""What ties a rank to other hosts: torchrun's store, on the first one, and its agent on this one.

A host that loses its power or its cable closes no connection: whoever waits for it waits for ever,
in the store's client and in the agent alike.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

ANSWER_S = 10.0  # until a store that says nothing counts as gone
LISTEN_S = 1.0  # between two looks at whether a rank has failed
FAILED = "sumgrad/failed"
GRACE_S = 5  # for an agent to end by itself, and again after it was asked to


class StoreGone(RuntimeError):
    """The host of the store does not answer any more."""


class NotSaid(RuntimeError):
    """A value that nobody stored in time."""


class Store:
    """A store whose every operation ends: in an answer, in NotSaid, or in StoreGone.

    Once it is gone, every operation says so at once. seconds: how long values may be waited for.
    """

    def __init__(self, store: Any, *, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]]
        self._asked = queue.SimpleQueue()
        self.gone = False
        threading.Thread(target=self._work, daemon=True, name="sumgrad-store").start()

    def check(self, key: str, *, seconds: float | None = None) -> bool:
        """Whether there is something under a key; seconds: until it counts as gone."""
        return bool(self._do(lambda: self._store.check([key]), seconds or ANSWER_S))

    def get(self, key: str) -> bytes:
        """What is stored under a key, when it is there."""
        self.check(key)
        value: bytes = self._do(lambda: self._store.get(key), self._seconds + ANSWER_S)
        return value

    def set(self, key: str, value: str | bytes) -> None:
        self.check(key)
        self._do(lambda: self._store.set(key, value), self._seconds + ANSWER_S)

    def _do(self, operation: Callable[[], Any], seconds: float) -> Any:
        if self.gone:
            raise StoreGone("no answer")
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((operation, answer))
        try:
            result = answer.get(timeout=seconds)
        except queue.Empty:
            self.gone = True
            raise StoreGone(f"no answer within {seconds:g} s") from None
        if type(result).__name__ == "DistNetworkError":  # of torch, which is not imported here
            self.gone = True
            raise StoreGone(str(result)) from result
        if type(result).__name__ == "DistStoreError":
            raise NotSaid(str(result)) from result
        if isinstance(result, Exception):
            raise result
        return result

    def _work(self) -> None:
        while True:
            operation, answer = self._asked.get()
            try:
                answer.put(operation())
            except Exception as error:
                answer.put(error)


class Listener:
    """Ends this rank where it waits for one that has failed: nobody else tells ranks of other
    hosts, and the connections of one that has failed stay open until there is a verdict.

    waiting: the number of the operation that this rank stands in, None where it computes.
    """

    def __init__(self, store: Store, waiting: Callable[[], int | None], *, seconds: float) -> None:
        self._store, self._waiting, self._seconds = store, waiting, seconds
        self._over = threading.Event()
        threading.Thread(target=self._listen, daemon=True, name="sumgrad-listener").start()

    def close(self) -> None:
        self._over.set()

    def _listen(self) -> None:
        before: int | None = None
        while not self._over.wait(LISTEN_S):
            try:
                failed = self._store.check(FAILED, seconds=self._seconds)
            except RuntimeError:
                return  # the deadline is what is left
            now = self._waiting()
            if failed and now is not None and now == before and not self._over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)  # as the agent of its host would
                return
            before = now


def keeps_its_agent(environment: Mapping[str, str]) -> bool:
    """Whether this rank stays until there is a verdict, for the agent of its host to end with it.

    An agent whose ranks have all ended well waits minutes for the others' agents, and for one that
    a FAIL has ended it waits in vain. Rank 0's own agent needs nobody to stay.
    """
    return environment.get("GROUP_RANK", "0") != "0" and environment.get("LOCAL_RANK") == "0"


def end_agent() -> None:
    """End torchrun's agent of this host some seconds from now, if it has not ended by itself: it
    would wait for the store's host for ever. Does nothing where no agent started this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = os.getppid()
    wait = (
        f"n=0; while kill -0 {agent} 2>/dev/null && [ $n -lt {GRACE_S * 5} ]; "
        f"do sleep 0.2; n=$((n+1)); done"
    )
    subprocess.Popen(
        ["sh", "-c", f"{wait}; kill -TERM {agent} && {wait}; kill -KILL {agent}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
