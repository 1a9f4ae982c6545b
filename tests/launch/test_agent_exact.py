"""A store whose host may be gone: every operation ends."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from sumgrad.launch.torchrun import agent
from sumgrad.launch.torchrun.agent import Listener, NotSaid, Store, StoreGone
from torch.distributed import DistNetworkError, DistStoreError


class Fake:
    """A store that keeps what it is given; hangs, or raises, when it is told to."""

    def __init__(self):
        self.held, self.hangs, self.error = {}, threading.Event(), None
        self.hangs.set()

    def _answer(self):
        self.hangs.wait(30)
        if self.error:
            raise self.error

    def check(self, keys):
        self._answer()
        return all(key in self.held for key in keys)

    def get(self, key):
        self._answer()
        return self.held[key]

    def set(self, key, value):
        self._answer()
        self.held[key] = value


@pytest.fixture
def fake():
    fake = Fake()
    yield fake
    fake.hangs.set()


def test_what_is_set_is_there(fake):
    store = Store(fake, seconds=5)
    assert not store.check("a")
    store.set("a", b"1")
    assert store.check("a")
    assert store.get("a") == b"1"
    assert not store.gone


def test_a_host_that_says_nothing_is_gone_and_then_at_once(fake, monkeypatch):
    monkeypatch.setattr(agent, "ANSWER_S", 0.2)
    store = Store(fake, seconds=5)
    fake.hangs.clear()
    with pytest.raises(StoreGone, match=r"0\.2 s"):
        store.set("a", b"1")
    assert store.gone
    monkeypatch.setattr(agent, "ANSWER_S", 30)
    started = time.monotonic()
    with pytest.raises(StoreGone):
        store.get("a")
    assert time.monotonic() - started < 10, "it does not ask again"


def test_a_connection_that_is_closed_is_gone(fake):
    store = Store(fake, seconds=5)
    fake.error = DistNetworkError("closed")
    with pytest.raises(StoreGone, match="closed"):
        store.check("a")
    assert store.gone


def test_a_value_that_does_not_come_is_said(fake):
    store = Store(fake, seconds=5)
    fake.error = DistStoreError("wait timeout")
    with pytest.raises(NotSaid, match="wait timeout"):
        store.get("a")
    fake.error = None
    assert not store.gone
    assert not store.check("a")


@pytest.mark.parametrize(("failed", "waits_in", "ended"), [
    (True, [3, 3, 3, 3], True),
    (False, [3, 3, 3, 3], False),  # nobody has failed: others are only late
    (True, [None, None, None, None], False),  # it computes: it will end, or wait, by itself
    (True, [1, 2, 3, 4], False),  # it gets on
])  # fmt: skip
def test_a_rank_that_waits_for_one_that_has_failed_ends(fake, monkeypatch, failed, waits_in, ended):
    killed, asked, seen = [], iter(waits_in), threading.Event()
    monkeypatch.setattr(agent, "LISTEN_S", 0.05)
    monkeypatch.setattr(agent.os, "kill", lambda pid, number: killed.append((pid, number)))

    def waiting():
        number = next(asked, "over")
        if number == "over":
            seen.set()
            return None
        return number

    store = Store(fake, seconds=5)
    if failed:
        store.set(agent.FAILED, "2")
    listener = Listener(store, waiting, seconds=5)
    for _ in range(200):
        if seen.is_set() or killed:
            break
        time.sleep(0.05)
    listener.close()
    assert killed == ([(os.getpid(), signal.SIGTERM)] if ended else [])
