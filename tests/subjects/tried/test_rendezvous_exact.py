"""What ranks send each other in a trial: begun when all have come to it, or by nobody."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from sumgrad.subjects.program.tried.board import MOST_KEYS, Board, number_of
from sumgrad.subjects.program.tried.rendezvous import Parted, Rendezvous


class Asked:
    """A call of one rank's; `began` tells all that was carried out, in order."""

    def __init__(self, began, rank, op, ranks, peer=None, numel=3, reduce="SUM", tag=0, pg="0"):
        self.op, self.args = op, ([torch.zeros(numel)],)
        self.group = SimpleNamespace(ranks=ranks, size=lambda: len(ranks))
        self.event = {"pg": pg, "dtype": "float64", "reduce": reduce}
        if peer is not None:
            self.event |= {"peer": peer, "tag": tag}
        self._began, self._rank = began, rank

    def issue(self):
        self._began.append((self._rank, self.op, self.event.get("peer")))
        return SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)


def ranks_do(tmp_path, *steps, patience_s=5.0, as_it_is=False):
    """Each rank's step as a thread. What was carried out, and by rank how its step ended."""
    began, ended, threads = [], {}, []

    def one(rank, step):
        own = Rendezvous(Board(tmp_path / "board", rank, len(steps)), rank)
        own.patience_s = patience_s
        try:
            with own.round(as_it_is=as_it_is) as operations:
                step(lambda *args, **more: operations(Asked(began, rank, *args, **more)))
            ended[rank] = "ended"
        except (Parted, ValueError) as error:
            ended[rank] = str(error)

    for rank, step in enumerate(steps):
        threads.append(threading.Thread(target=one, args=(rank, step)))
        threads[-1].start()
    for thread in threads:
        thread.join(20)
    return began, ended


def test_all_come_and_it_is_carried_out_by_each(tmp_path):
    def late(ask):
        time.sleep(0.1)
        ask("allreduce", [0, 1, 2])
        ask("allreduce", [0, 1, 2], numel=4)

    def step(ask):
        ask("allreduce", [0, 1, 2])
        ask("allreduce", [0, 1, 2], numel=4)

    began, ended = ranks_do(tmp_path, step, late, step)
    assert sorted(began) == [(r, "allreduce", None) for r in (0, 0, 1, 1, 2, 2)]
    assert {*ended.values()} == {"ended"}


def test_one_that_has_ended_comes_no_more_and_nobody_begins(tmp_path):
    def leaves(ask):
        ask("allreduce", [0, 1, 2])
        raise ValueError("left")

    def step(ask):
        ask("allreduce", [0, 1, 2])
        ask("broadcast", [0, 1, 2])

    began, ended = ranks_do(tmp_path, step, leaves, step)
    assert [op for _, op, _ in began] == ["allreduce"] * 3
    assert ended[1] == "left"
    assert "rank 1 does not come to broadcast" in {ended[0], ended[2]}


@pytest.mark.parametrize("other", [
    {"op": "broadcast"}, {"numel": 4}, {"reduce": "MAX"},
])  # fmt: skip
def test_what_is_something_else_on_another_rank_is_not_begun(tmp_path, other):
    op = other.pop("op", "allreduce")
    began, ended = ranks_do(
        tmp_path, lambda ask: ask("allreduce", [0, 1]), lambda ask: ask(op, [0, 1], **other)
    )
    assert not began
    assert any("something else" in said for said in ended.values())
    assert "ended" not in ended.values()


def test_groups_are_told_apart(tmp_path):
    """Of as many ranks, and of the same ranks by another name."""

    def one(ask):
        ask("allreduce", [0, 1], pg="a")
        ask("allreduce", [0, 1], pg="b", numel=5)

    began, ended = ranks_do(tmp_path, one, one)
    assert len(began) == 4
    assert {*ended.values()} == {"ended"}


def test_ranks_that_wait_for_each_other_in_different_places_leave_after_a_while(tmp_path):
    began, ended = ranks_do(
        tmp_path,
        lambda ask: ask("allreduce", [0, 1], pg="a"),
        lambda ask: ask("allreduce", [0, 1], pg="b"),
        patience_s=0.1,
    )
    assert not began
    assert "ranks wait for each other in different places" in ended.values()


def test_a_step_as_it_is_goes_on_where_ranks_do_not_meet(tmp_path):
    """They issue without waiting what they wait for later; and then so do all that follow."""
    began, ended = ranks_do(
        tmp_path,
        lambda ask: (ask("allreduce", [0, 1], pg="a"), ask("allreduce", [0, 1], pg="b")),
        lambda ask: (ask("allreduce", [0, 1], pg="b"), ask("allreduce", [0, 1], pg="a")),
        patience_s=0.1,
        as_it_is=True,
    )
    assert len(began) == 4
    assert {*ended.values()} == {"ended"}


def test_two_that_send_each_other_wait_in_either_order(tmp_path):
    def one(peer, first):
        def step(ask):
            works = [ask("recv", [0, 1], peer=peer), ask("send", [0, 1], peer=peer)]
            for at in (first, 1 - first):
                works[at].wait()

        return step

    began, ended = ranks_do(tmp_path, one(1, 0), one(0, 0))
    assert sorted(began) == [(0, "recv", 1), (0, "send", 1), (1, "recv", 0), (1, "send", 0)]
    assert {*ended.values()} == {"ended"}


def test_what_is_sent_to_one_that_has_ended_is_not_begun(tmp_path):
    def leaves(_):
        raise ValueError("left")

    began, ended = ranks_do(tmp_path, lambda ask: ask("send", [0, 1], peer=1).wait(), leaves)
    assert not began
    assert ended == {0: "rank 1 does not come to send", 1: "left"}


def test_one_that_ends_has_begun_what_the_other_has_come_to(tmp_path):
    """Nobody waits for it on this side; the other one does."""
    came = threading.Event()

    def sends(ask):
        ask("send", [0, 1], peer=1)
        came.wait(5)

    def receives(ask):
        work = ask("recv", [0, 1], peer=0)
        came.set()
        work.wait()

    began, ended = ranks_do(tmp_path, sends, receives)
    assert sorted(began) == [(0, "send", 1), (1, "recv", 0)]
    assert {*ended.values()} == {"ended"}


def test_what_one_that_has_ended_did_not_begin_is_not_begun(tmp_path):
    left = threading.Event()

    def sends(ask):
        ask("send", [0, 1], peer=1)

    def receives(ask):
        assert left.wait(5)
        ask("recv", [0, 1], peer=0).wait()

    def first_then_second(rank, step):
        own = Rendezvous(Board(tmp_path / "board", rank, 2), rank)
        own.patience_s = 5.0
        with own.round(as_it_is=False) as operations:
            step(lambda *args, **more: operations(Asked(began, rank, *args, **more)))

    began = []
    board = Board(tmp_path / "board", 1, 2)
    board.begin()
    first_then_second(0, sends)
    left.set()
    with pytest.raises(Parted, match="rank 0 does not come to recv"):
        first_then_second(1, receives)
    assert not began


def test_the_second_of_its_kind_waits_for_the_second(tmp_path):
    def sends(ask):
        ask("send", [0, 1], peer=1).wait()

    def receives(ask):
        ask("recv", [0, 1], peer=0).wait()
        ask("recv", [0, 1], peer=0).wait()

    began, ended = ranks_do(tmp_path, sends, receives)
    assert sorted(began) == [(0, "send", 1), (1, "recv", 0)]
    assert ended[1] == "rank 0 does not come to recv"


@pytest.mark.parametrize(("sent", "taken", "begins"), [(3, 3, True), (2, 3, True), (4, 3, False)])
def test_more_than_is_taken_is_not_begun(tmp_path, sent, taken, begins):
    """Nor is what comes after it on the same way; the other way goes on."""

    def sends(ask):
        works = [ask("recv", [0, 1], peer=1)]
        works += [ask("send", [0, 1], peer=1, numel=numel) for numel in (3, sent, 3)]
        for work in works:
            work.wait()

    def receives(ask):
        works = [ask("send", [0, 1], peer=0)]
        works += [ask("recv", [0, 1], peer=0, numel=numel) for numel in (3, taken, 3)]
        for work in works:
            work.wait()

    began, ended = ranks_do(tmp_path, sends, receives)
    times = 3 if begins else 1
    assert began.count((0, "send", 1)) == began.count((1, "recv", 0)) == times
    assert began.count((1, "send", 0)) == began.count((0, "recv", 1)) == 1
    if begins:
        assert {*ended.values()} == {"ended"}
    else:  # who leaves later may find the other one gone
        assert "ended" not in ended.values()
        assert any(how.startswith("more is sent than ranks") for how in ended.values())


def test_a_tag_is_another_way(tmp_path):
    _, ended = ranks_do(
        tmp_path,
        lambda ask: ask("send", [0, 1], peer=1, tag=1).wait(),
        lambda ask: ask("recv", [0, 1], peer=0, tag=2).wait(),
        patience_s=0.1,
    )
    assert "ended" not in ended.values()


def test_who_polls_learns_that_nothing_comes(tmp_path):
    def polls(ask):
        work = ask("recv", [0, 1], peer=1)
        while not work.is_completed():
            pass

    _, ended = ranks_do(tmp_path, polls, lambda _: None)
    assert ended[0] == "rank 1 does not come to recv"


def test_who_parted_is_found_there_no_more(tmp_path):
    began, ended = ranks_do(
        tmp_path,
        lambda ask: ask("allreduce", [0, 1]),
        lambda ask: (time.sleep(0.5), ask("allreduce", [0, 1])),
        patience_s=0.1,
    )
    assert not began
    assert "ended" not in ended.values()


def test_who_parted_later_is_still_found_where_it_was_before(tmp_path, monkeypatch):
    """By one that came there in time and looks late."""
    parted, ended_there = threading.Event(), Board.has_ended

    def looks_late(board, rank):
        if threading.current_thread() in late:
            assert parted.wait(5)
        return ended_there(board, rank)

    def first(ask):
        late.append(threading.current_thread())
        ask("allreduce", [0, 1, 2])

    def leaves(ask):
        ask("allreduce", [0, 1, 2])

    def goes_on(ask):
        ask("allreduce", [0, 1, 2])
        try:
            ask("broadcast", [0, 1, 2])
        finally:
            parted.set()

    late = []
    monkeypatch.setattr(Board, "has_ended", looks_late)
    began, ended = ranks_do(tmp_path, first, leaves, goes_on)
    assert sorted(began) == [(rank, "allreduce", None) for rank in (0, 1, 2)]
    assert ended == {0: "ended", 1: "ended", 2: "rank 1 does not come to broadcast"}


def test_what_nobody_waits_for_in_a_step_as_it_is_is_begun(tmp_path):
    began, _ = ranks_do(
        tmp_path, lambda ask: ask("send", [0, 1], peer=1), lambda _: None, as_it_is=True
    )
    assert began == [(0, "send", 1)]


def test_a_round_knows_nothing_of_the_last(tmp_path):
    boards = [Board(tmp_path / "board", rank, 2) for rank in (0, 1)]
    for board in boards:
        board.begin()
    assert boards[0].put(7, 2, 5)
    assert boards[1].seen(0, 7) == (2, 5)
    assert boards[1].seen(1, 7) == (0, 0)
    boards[0].end()
    assert boards[1].has_ended(0)
    assert not boards[0].has_ended(1)
    boards[1].begin()
    assert boards[1].seen(0, 7) == (0, 0)
    assert not boards[1].has_ended(0)


def test_a_board_that_is_full_says_so(tmp_path):
    board = Board(tmp_path / "board", 0, 1)
    board.begin()
    assert all(board.put(number_of(n), 1, 0) for n in range(MOST_KEYS))
    assert not board.put(number_of("one more"), 1, 0)
    assert board.put(number_of(3), 2, 9)
    assert board.seen(0, number_of(3)) == (2, 9)
