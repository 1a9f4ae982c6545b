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
    assert work._copies[0] is copy
    assert work.wait("for long") is True
    assert gloo.work.waited == [("for long",)]
    assert (work.exception(), work.result()) == ("its exception", "the backend's")
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


def test_with_a_gpu_for_each_rank_nccl_is_made_once_and_takes_what_is_on_them(monkeypatch):
    gloo, nccl, made = Backend(), Backend(), []

    def make(store, rank, size, options):
        made.append((store, rank, size, options._timeout))
        return nccl

    make.Options = SimpleNamespace
    dist = SimpleNamespace(
        is_nccl_available=lambda: True, ProcessGroupNCCL=make,
        PrefixStore=lambda name, store: (name, store),
    )  # fmt: skip
    monkeypatch.setattr(backends, "dist", dist)
    monkeypatch.setattr(backends, "has_gpu_each", lambda: True)
    options = SimpleNamespace(store="store", group_rank=2, group_size=4, timeout="a minute")
    below = Backends(gloo, options)
    for op in ("allreduce", "send", "recv"):
        below.carry_out(op, ([on_gpu(1)], 0), {})
    below.carry_out("allreduce", ([torch.ones(1)], 0), {})
    below.carry_out("allgather", ([[on_gpu(1)]], [on_gpu(1)]), {})
    assert made == [(("sumgrad/nccl", "store"), 2, 4, "a minute")]
    assert [name for name, *_ in nccl.asked] == ["allreduce", "send", "recv", "allgather"]
    assert [name for name, *_ in gloo.asked] == ["allreduce"]
