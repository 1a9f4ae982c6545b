"""What ranks give each other through memory: what goes that way, where it lies, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.subjects.program.tried.exchange import HEAD_BYTES, SENT, SLOT, SLOTS, Exchange

X = torch.arange(6.0).double().reshape(3, 2)
ROOT = SimpleNamespace(rootRank=1)


def call(op, *args, reduce="SUM", ranks=(0, 1), **named):
    group = SimpleNamespace(ranks=[*ranks], size=lambda: len(ranks))
    return SimpleNamespace(op=op, args=args, kwargs=named, group=group, event={"reduce": reduce})


def two(tmp_path):
    return [Exchange(tmp_path / "exchange", rank, 2) for rank in range(2)]


def carried(ranks, calls, number=1, key=5):
    """What each rank's operation gives its tensors."""
    slots = [one.bring(key, number, its) for one, its in zip(ranks, calls, strict=True)]
    assert all(slots)
    for one, its in zip(ranks, calls, strict=True):
        work = one.carry_out(its, slots, number, its.args)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.get_future().value() == work.result()
    return calls


@pytest.mark.parametrize(("op", "args", "more"), [
    ("allreduce", ([X],), {"reduce": "AVG"}), ("allreduce", ([X.bfloat16()],), {}),
    ("allreduce", ([X > 1],), {}), ("allreduce", ([X, X],), {}),
    ("allreduce", ([X.to_sparse()],), {}), ("allreduce", ([X.to("meta")],), {}),
    ("allreduce", ([torch.zeros((SLOT - HEAD_BYTES) // 8 + 1).double()],), {}),
    ("allgather", ([[X, X]], [X.float()]), {}), ("allgather", ([[X]], [X]), {}),
    ("_allgather_base", (torch.zeros(2, 6).double().t(), X), {}),
    ("reduce_scatter", ([X], [[X]]), {}), ("_reduce_scatter_base", (X, X[:, :1]), {}),
    ("alltoall", ([X, X], [X]), {}),
    ("alltoall_base", (X, X, [], [1, 1]), {}), ("reduce", ([X],), {}),
    ("allreduce", ([X],), {"opts": None}),
])  # fmt: skip
def test_what_goes_by_gloo(tmp_path, op, args, more):
    assert two(tmp_path)[0].bring(5, 1, call(op, *args, **more)) == 0


def test_the_largest_that_goes_by_memory(tmp_path):
    most = [torch.ones((SLOT - HEAD_BYTES) // 8).double() for _ in range(2)]
    carried(two(tmp_path), [call("allreduce", [x]) for x in most])
    assert all(torch.equal(x, torch.full_like(x, 2.0)) for x in most)


def test_as_many_groups_as_there_is_room_for(tmp_path):
    one = two(tmp_path)[0]
    assert [one.bring(key, 1, call("allreduce", [X])) for key in range(SLOTS + 2)] == [
        *range(1, SLOTS + 1), 0, 0
    ]  # fmt: skip
    assert one.bring(3, 2, call("allreduce", [X])) == 4


def test_what_comes_next_leaves_what_is_still_read(tmp_path):
    first, second = two(tmp_path)
    slots = [first.bring(5, 1, call("allreduce", [X])), second.bring(5, 1, call("allreduce", [X]))]
    first.bring(5, 2, call("allreduce", [X * 7]))
    got = X.clone()
    second.carry_out(call("allreduce", [got]), slots, 1, ([got],))
    assert torch.equal(got, 2 * X)


def test_a_write_that_autograd_does_not_count(tmp_path):
    x = [X.clone(), X.clone()]
    carried(two(tmp_path), [call("broadcast", [one], ROOT) for one in x])
    assert x[0]._version == 0
    leaf = [X.clone().requires_grad_(), X.clone().requires_grad_()]
    carried(two(tmp_path), [call("allreduce", [one]) for one in leaf])
    assert torch.equal(leaf[1].detach(), 2 * X)


def test_an_alltoall_of_other_sizes_than_are_taken(tmp_path):
    sent = [call("alltoall_base", X.clone(), X, [1, 2], [2, 1]),
            call("alltoall_base", X.clone(), X, [2, 1], [1, 2])]  # fmt: skip
    with pytest.raises(RuntimeError, match="other sizes are sent than taken"):
        carried(two(tmp_path), sent)
    sent = [call("alltoall_base", X.clone(), X, [2, 1], [2, 1]),
            call("alltoall_base", X.clone(), X, [1, 2], [1, 2])]  # fmt: skip
    carried(two(tmp_path), sent)
    assert torch.equal(sent[0].args[0], torch.cat([X[:2], X[:1]]))
    empty = [call("alltoall_base", X[:0].clone(), X[:0], [0, 0], [0, 0]) for _ in range(2)]
    carried(two(tmp_path), empty)


def test_parts_of_other_sizes_than_are_taken(tmp_path):
    lists = [call("alltoall", [X[:1].clone(), X[:1].clone()], [X[:1], X[:2]]) for _ in range(2)]
    with pytest.raises(RuntimeError, match="alltoall brings 4 numbers for 2"):
        carried(two(tmp_path), lists)


def test_what_another_rank_brought_as_another_kind(tmp_path):
    ranks, many = two(tmp_path), (SLOT - HEAD_BYTES) // 4
    calls = [call("alltoall", [X, X], [X[:1], X[:2]]),
             call("alltoall", [X] * 2, [torch.zeros(many).float(), torch.zeros(0)])]  # fmt: skip
    slots = [ranks[0].bring(5, 1, calls[0]), 1]
    calls[1].args[0][:] = [torch.zeros(1).float()] * 2
    assert ranks[1].bring(5, 1, calls[1]) == 1
    with pytest.raises(RuntimeError, match="no such thing"):
        ranks[0].carry_out(calls[0], slots, 1, calls[0].args)


def test_parts_of_before_are_no_parts_of_now(tmp_path):
    ranks = two(tmp_path)
    lists = [call("alltoall", [X[:1].clone()] * 2, [X[:1], X[1:2]]) for _ in range(2)]
    carried(ranks, lists, number=1)
    x = [X.clone(), X.clone()]
    carried(ranks, [call("allreduce", [one]) for one in x], number=3)
    assert torch.equal(x[0], 2 * X)


def sent(value, numel_taken=None):
    taken = torch.zeros(value.numel() if numel_taken is None else numel_taken, dtype=value.dtype)
    return call("send", [value], 1, 0), call("recv", [taken], 0, 0), taken


def test_what_one_sends_lies_beside_what_it_has_sent(tmp_path):
    first, second = two(tmp_path)
    some = [X, X[0] * 3, torch.tensor([True, False]), torch.zeros(0)]
    calls = [sent(one.clone()) for one in some]
    parts = [first.send(send) for send, _, _ in calls]
    assert all(parts)
    assert len({*parts}) == len(parts)
    for (send, _, taken), part, one in zip(calls, parts, some, strict=True):
        second.receive(0, part, send.args[0][0].nbytes, ([taken],)).wait()
        assert torch.equal(taken, one.reshape(-1))


def test_a_round_begins_where_nothing_was_sent(tmp_path):
    first, _ = two(tmp_path)
    part = first.send(sent(X)[0])
    assert first.send(sent(X)[0]) > part
    first.begin()
    assert first.send(sent(X)[0]) == part


def test_no_more_is_sent_by_memory_than_there_is_room_for(tmp_path):
    first, _ = two(tmp_path)
    most = torch.zeros(SENT // 8 - 8).double()
    assert first.send(sent(torch.zeros(SENT // 8 + 1).double())[0]) == 0
    assert first.send(sent(most)[0])
    assert first.send(sent(X)[0])  # 48 bytes are left, and two times eight
    assert first.send(sent(X)[0]) == 0


@pytest.mark.parametrize("odd", [X.t(), X.to("meta"), X.to_sparse()])
def test_what_is_sent_by_gloo(tmp_path, odd):
    assert two(tmp_path)[0].send(call("send", [odd], 1, 0)) == 0


def test_more_than_is_taken_is_refused(tmp_path):
    first, second = two(tmp_path)
    send, _, taken = sent(X, numel_taken=5)
    with pytest.raises(RuntimeError, match="no tensor that is taken"):
        second.receive(0, first.send(send), X.nbytes, ([taken],))
    assert not taken.any()
