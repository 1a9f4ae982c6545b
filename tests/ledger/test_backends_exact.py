"""Which backend carries an operation out, and how Gloo sends what is on a GPU. GPUs are played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.ledger import backends
from sumgrad.ledger.backends import Backends


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


def on_gpu(*values: float) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnGpu)


class Work:
    def __init__(self) -> None:
        self.done, self.waited, self.synchronized = False, [], False

    def wait(self, *timeout):
        self.waited.append(timeout)
        return True

    def is_completed(self):
        return self.done

    def synchronize(self):
        self.synchronized = True

    def result(self):
        return "the backend's"

    def exception(self):
        return "its exception"


class Backend:
    """Writes down what it is asked for; a receive gets 7."""

    def __init__(self) -> None:
        self.asked, self.work = [], Work()

    def __getattr__(self, name):
        def call(tensors, *rest, **named):
            if name.startswith("recv"):
                for tensor in tensors:
                    tensor.fill_(7)
            self.asked.append((name, tensors, rest, named))
            return self.work

        return call


@pytest.fixture
def gloo(monkeypatch):
    monkeypatch.setattr(backends, "has_gpu_each", lambda: False)
    return Backend()


def test_host_tensors_and_collectives_go_to_gloo_as_they_are(gloo):
    below = Backends(gloo)
    here, there = torch.ones(2), on_gpu(1, 2)
    assert below.carry_out("send", ([here], 1, 0), {}) is gloo.work
    assert below.carry_out("allreduce", ([there], "opts"), {"named": 1}) is gloo.work
    assert below.carry_out("barrier", ("opts",), {}) is gloo.work
    (send, reduce, barrier) = gloo.asked
    assert send[:3] == ("send", [here], (1, 0))
    assert send[1][0] is here
    assert reduce[1][0] is there
    assert reduce[2:] == (("opts",), {"named": 1})
    assert barrier[0] == "barrier"


def test_what_is_sent_from_a_gpu_is_a_copy_that_lives_as_long_as_the_work(gloo):
    tensor = on_gpu(1, 2)
    work = Backends(gloo).carry_out("send", ([tensor], 1, 5), {})
    ((name, (copy,), rest, _),) = gloo.asked
    assert (name, rest, copy.tolist(), copy.is_cuda) == ("send", (1, 5), [1, 2], False)
    assert work._held[0] is copy
    assert work.wait("for long") is True
    assert gloo.work.waited == [("for long",)]
    assert (work.exception(), work.result()) == ("its exception", [])
    assert tensor.tolist() == [1, 2]


@pytest.mark.parametrize("op", ["recv", "recv_anysource"])
def test_what_a_gpu_receives_is_there_once_it_was_waited_for(op, gloo):
    tensor = on_gpu(0, 0)
    work = Backends(gloo).carry_out(op, ([tensor], 1), {})
    assert tensor.tolist() == [0, 0]
    ((_, (copy,), _, _),) = gloo.asked
    assert copy is not tensor
    assert copy.device == torch.device("cpu")
    assert work.is_completed() is False
    assert tensor.tolist() == [0, 0]
    assert work.wait() is True
    assert tensor.tolist() == [7, 7]
    tensor.fill_(1)
    assert work.wait() is True
    assert tensor.tolist() == [1, 1]  # what was done with it since is not undone


def test_a_receive_that_is_polled_or_synchronized_has_ended_too(gloo):
    for end in ("is_completed", "synchronize"):
        tensor = on_gpu(0)
        work = Backends(gloo).carry_out("recv", ([tensor], 0, 0), {})
        gloo.work.done = True
        getattr(work, end)()
        assert tensor.tolist() == [7]
    assert gloo.work.synchronized


def test_a_leaf_that_requires_a_gradient_may_be_received_into(gloo):
    tensor = on_gpu(0.0).requires_grad_()
    work = Backends(gloo).carry_out("recv", ([tensor], 0, 0), {})
    assert work.result() == [tensor]
    work.wait()
    assert tensor.tolist() == [7]
    assert work.result()[0] is tensor


@pytest.mark.parametrize("op", ["allreduce_coalesced", "allgather_coalesced"])
def test_what_gloo_cannot_do_on_gpus_goes_through_host_memory_both_ways(op, gloo):
    outputs, inputs = [[on_gpu(0, 0)], [on_gpu(1)]], [on_gpu(3), on_gpu(4)]
    args = (outputs, inputs, "opts") if op == "allgather_coalesced" else ([on_gpu(5)], "opts")
    work = Backends(gloo).carry_out(op, args, {})
    ((name, given, rest, _),) = gloo.asked
    assert name == op
    if op == "allgather_coalesced":
        assert [t.tolist() for t in rest[0]] == [[3], [4]]
        assert rest[1] == "opts"
        given[1][0].fill_(9)
        assert outputs[1][0].tolist() == [1]
        work.wait()
        assert [outputs[0][0].tolist(), outputs[1][0].tolist()] == [[0, 0], [9]]
        assert [t.tolist() for t in inputs] == [[3], [4]]
    else:
        given[0].fill_(9)
        work.wait()
        assert args[0][0].tolist() == [9]


class Store(dict):
    """A rendezvous store; a key that nobody has set is an error here, and a wait there."""

    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


def played(monkeypatch, store, able):
    """Two members, the second of whom has said whether it has a GPU; what NCCL was made with."""
    nccl, made, synchronized = Backend(), [], []

    def make(where, rank, size, options):
        made.append((where, rank, size, options._timeout))
        return nccl

    make.Options = SimpleNamespace
    dist = SimpleNamespace(
        is_nccl_available=lambda: True, ProcessGroupNCCL=make,
        PrefixStore=lambda name, inner: inner.setdefault(name, Store()),
    )  # fmt: skip
    monkeypatch.setattr(backends, "dist", dist)
    monkeypatch.setattr(backends, "has_gpu_each", lambda: able)
    stream = SimpleNamespace(synchronize=lambda: synchronized.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    options = SimpleNamespace(store=store, group_rank=0, group_size=2, timeout="a minute")
    return nccl, made, synchronized, options


def test_with_a_gpu_for_every_member_nccl_is_made_once_and_takes_collectives(monkeypatch):
    store, gloo = Store({"sumgrad/gpus": Store({"1": b"1"})}), Backend()
    nccl, made, synchronized, options = played(monkeypatch, store, able=True)
    below = Backends(gloo, options, nccl=True)
    work = below.carry_out("allreduce", ([on_gpu(1)], 0), {})
    below.carry_out("allgather", ([[on_gpu(1)]], [on_gpu(1)]), {})
    below.carry_out("allreduce", ([torch.ones(1)], 0), {})
    below.carry_out("send", ([on_gpu(1)], 0, 7), {})  # NCCL would lose its tag
    assert made == [(store["sumgrad/gpus"], 0, 2, "a minute")]
    assert [name for name, *_ in nccl.asked] == ["allreduce", "allgather"]
    assert [name for name, *_ in gloo.asked] == ["allreduce", "send"]
    assert synchronized == []
    assert work.wait() is True
    assert synchronized == [True]  # the host, too, has waited


@pytest.mark.parametrize(("able", "other"), [(True, b"0"), (False, b"1")])
def test_where_one_member_has_none_all_stay_with_gloo(able, other, monkeypatch):
    store, gloo = Store({"sumgrad/gpus": Store({"1": other})}), Backend()
    _, made, _, options = played(monkeypatch, store, able=able)
    below = Backends(gloo, options, nccl=True)
    for _ in range(2):
        below.carry_out("allreduce", ([on_gpu(1)], 0), {})
    assert store["sumgrad/gpus"]["0"] == (b"1" if able else b"0")
    assert (made, len(gloo.asked)) == ([], 2)


def test_nccl_is_never_taken_where_it_was_not_asked_for(monkeypatch):
    store, gloo = Store({"sumgrad/gpus": Store({"1": b"1"})}), Backend()
    _, made, _, options = played(monkeypatch, store, able=True)
    Backends(gloo, options).carry_out("allreduce", ([on_gpu(1)], 0), {})
    assert (made, len(gloo.asked)) == ([], 1)
