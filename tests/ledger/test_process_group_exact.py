"""What the recording process group writes down and hands on, over a backend that is played."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sumgrad.base.files import PACKAGE
from sumgrad.ledger import process_group
from sumgrad.ledger.backends import Backends, tensors_in
from sumgrad.ledger.process_group import Ledger, RecordingProcessGroup
from sumgrad.record.endings import OPERATION, stands_in_operation


class Work:
    """A backend's work that has not ended until it is waited for."""

    def __init__(self) -> None:
        self.waited: list[object] = []
        self.synchronized = False
        self.future = Future()

    def wait(self, *timeout):
        self.waited.append(timeout)
        return True

    def is_completed(self):
        return bool(self.waited)

    def is_success(self):
        return bool(self.waited)

    def synchronize(self):
        self.synchronized = True

    def exception(self):
        return "none"

    def result(self):
        return ["the result"]

    def get_future(self):
        return self.future


class Backend:
    """Writes down what it is asked for. Like Gloo, it has no coalesced form."""

    def __init__(self) -> None:
        self.asked: list[tuple] = []
        self.works: list[Work] = []

    def rank(self):
        return 1

    def size(self):
        return 2

    def __getattr__(self, name):
        if "coalesced" in name or name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.asked.append((name, args, kwargs))
            self.works.append(Work())
            return self.works[-1]

        return call


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
def group(ledger):
    return RecordingProcessGroup(Backends(Backend()), [4, 7], ledger)


def lines(tmp_path, name="ledger.jsonl"):
    """But for what is said of waiting."""
    told = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    said = [e for e in told if "waits" not in e and "ends" not in e]
    return [{k: v for k, v in e.items() if k != "async"} for e in said]


def test_a_rank_stands_in_what_it_asked_for_without_waiting_from_its_wait_on(
    group, ledger, tmp_path
):
    file, stood = tmp_path / "ledger.jsonl", []
    work, other = (group.allreduce([X], options()) for _ in range(2))
    assert not stands_in_operation(file)
    own = group._inner.works[0].wait
    group._inner.works[0].wait = lambda *_: stood.append(stands_in_operation(file)) or own()
    work.wait()
    assert stood == [True]
    assert not stands_in_operation(file)
    future = other.get_future()  # nobody says when it is waited for
    assert stands_in_operation(file)
    future.set_result(None)
    assert not stands_in_operation(file)
    another = group.allreduce([X], options()).get_future()
    ledger.redirect(tmp_path / "next.jsonl")  # whose operations have the same numbers
    for _ in range(3):
        group.allreduce([X], options()).get_future()
    another.set_result(None)
    assert "ends" not in (tmp_path / "next.jsonl").read_text()


def test_a_rank_stands_in_what_torch_waits_for_at_once(tmp_path):
    line = dict.fromkeys(OPERATION) | {"n": 0, "op": "barrier", "group": [0]}
    file = tmp_path / "ledger.jsonl"
    file.write_text(json.dumps(line) + "\n")
    assert stands_in_operation(file)
    file.write_text(json.dumps(line) + "\n" + json.dumps({"done": 0}) + "\n{")
    assert not stands_in_operation(file)
    assert not stands_in_operation(tmp_path / "none")


def options(op=dist.ReduceOp.SUM):
    out = dist.AllreduceOptions()
    out.reduceOp = op
    return out


X = torch.zeros(2, 3, dtype=torch.bfloat16)


def test_an_operation_is_written_when_it_starts_and_when_it_was_waited_for(group, ledger, tmp_path):
    group._set_group_name("9")
    with ledger.label("structure/0/step"):
        work = group.allreduce([X], options(dist.ReduceOp.AVG))
    (begun,) = lines(tmp_path)
    assert begun.pop("site").startswith("test_process_group_exact.py:")
    assert begun == {
        "n": 0, "label": "structure/0/step", "op": "allreduce", "group": [4, 7],
        "dtype": "bfloat16", "numel": 6, "pg": "9", "reduce": "AVG",
    }  # fmt: skip
    assert group._inner.asked[0][0] == "allreduce"
    assert not work.is_completed()
    assert ledger.waiting_for()["n"] == 0
    assert work.wait()
    assert work.wait()
    assert lines(tmp_path)[1:] == [{"done": 0}]
    assert ledger.waiting_for() is None
    assert ledger.num_operations == 1
    assert (work.is_completed(), work.is_success(), work.exception(), work.result()) == (
        True, True, "none", ["the result"]
    )  # fmt: skip
    assert (group.ranks, group.group_name, group.getBackendName()) == ([4, 7], "9", "sumgrad")


def test_who_polls_until_it_is_done_has_waited(group, ledger, tmp_path):
    with ledger.label("structure/0/step"):
        work = group.allreduce([X], options())
    assert not work.is_completed()
    assert ledger.nobody_waits_for() == [0]
    work._inner.wait()  # it ends by itself
    assert work.is_completed()
    assert lines(tmp_path)[1:] == [{"done": 0}]
    assert ledger.nobody_waits_for() == []


@pytest.mark.parametrize(
    ("call", "event"),
    [
        (
            lambda g: g.allreduce([X, X], options()),
            {"op": "allreduce", "numel": 12, "reduce": "SUM"},
        ),
        (lambda g: g.allreduce([X]), {"reduce": "SUM"}),  # a group's own method, by default
        (lambda g: g._reduce_scatter_base(X[:1], X), {"reduce": "SUM"}),
        (lambda g: g.allreduce([X], opts=options(dist.ReduceOp.MAX)), {"reduce": "MAX"}),
        (lambda g: g.allreduce([X.int()], options(dist.ReduceOp.BXOR)), {"reduce": "BXOR"}),
        (lambda g: g.send([X], 1, 5), {"op": "send", "peer": 7, "tag": 5, "numel": 6}),
        (lambda g: g.recv([X], 0), {"op": "recv", "peer": 4, "tag": 0}),
        (lambda g: g.barrier(), {"op": "barrier", "numel": 0, "dtype": None}),
        (lambda g: g.allgather([[X, X]], [X]), {"op": "allgather", "numel": 12}),
        (lambda g: g._allgather_base(X, X[:1]), {"op": "_allgather_base", "numel": 6}),
        (lambda g: g.broadcast([X.int()]), {"op": "broadcast", "dtype": "int32"}),
    ],
)
def test_what_is_written_of_each_operation(group, tmp_path, call, event):
    call(group)
    (begun,) = lines(tmp_path)
    assert {k: begun[k] for k in event} == event
    assert begun["label"] == ""
    name, args, kwargs = group._inner.asked[0]
    assert name == begun["op"]
    assert len(args) + len(kwargs) >= (begun["op"] != "barrier")
    if begun["op"] not in ("send", "recv"):
        assert "peer" not in begun
        assert "tag" not in begun


@pytest.mark.parametrize(
    "file",
    [
        *(PACKAGE / f"{name}.py"
          for name in ("ledger/process_group", "subjects/program/lift", "subjects/planned/exchange",
                       "convention", "faults/misbehaviour",
                       "subjects/program/functions/every_apply",
                       "subjects/program/watched/computations")),
        Path(torch.__file__).with_name("anything.py"),
        Path("/usr/lib/python3/contextlib.py"),
    ],
)  # fmt: skip
def test_the_call_site_is_the_first_line_outside_of_torch_and_the_transport(group, tmp_path, file):
    def called():
        exec(compile("group.barrier()", str(file), "exec"), {"group": group})

    called()
    (begun,) = lines(tmp_path)
    assert begun["site"] == f"test_process_group_exact.py:{called.__code__.co_firstlineno + 1}"


def test_long_groups_are_written_short(ledger, tmp_path):
    for ranks in (list(range(3, 12)), list(range(8)), [0, 1, 2, 3, 4, 5, 6, 7, 9]):
        RecordingProcessGroup(Backends(Backend()), ranks, ledger).barrier()
    assert [e["group"] for e in lines(tmp_path)] == [
        "3-11", list(range(8)), [0, 1, 2, 3, 4, 5, 6, 7, 9]
    ]  # fmt: skip


def test_what_gloo_lacks_is_done_one_by_one_and_all_of_it_waited_for(group, ledger, tmp_path):
    outputs, inputs = [X, X + 1, X + 2], [X[:1], X[:1] + 1, X[:1] + 2]
    work = group.allgather_into_tensor_coalesced(outputs, inputs)
    asked = group._inner.asked
    assert [name for name, _, _ in asked] == ["_allgather_base"] * 3
    for (_, (out, held), _), a, b in zip(asked, outputs, inputs, strict=True):
        assert out is a
        assert held is b
    assert [bool(w.waited) for w in group._inner.works] == [True, True, False]
    work.wait()
    assert group._inner.works[-1].waited
    (begun, done) = lines(tmp_path)
    assert (begun["op"], begun["numel"]) == ("allgather_into_tensor_coalesced", 18)
    assert done == {"done": 0}


def test_a_timeout_is_handed_on_and_futures_and_streams_count_as_waiting(group, ledger, tmp_path):
    one, two, three = (group.allreduce([X], options()) for _ in range(3))
    assert ledger.nobody_waits_for() == [0, 1, 2]
    one.wait("soon")
    assert group._inner.works[0].waited == [("soon",)]
    assert two.get_future() is group._inner.works[1].future
    assert ledger.nobody_waits_for() == [2]
    three.synchronize()
    assert group._inner.works[2].synchronized
    assert ledger.nobody_waits_for() == []
    assert [e["done"] for e in lines(tmp_path) if "done" in e] == [0, 2]
    ledger.settle()  # what has not ended stays open
    assert ledger.waiting_for()["n"] == 1
    group._inner.works[1].wait()
    ledger.settle()
    assert ledger.waiting_for() is None
    assert [e["done"] for e in lines(tmp_path) if "done" in e] == [0, 2, 1]


def test_whose_future_is_done_has_ended_before_the_work_says_so(group, ledger):
    """Gloo's thread completes the future, which wakes who waits for it, and then the work."""
    group.allreduce([X], options()).get_future().set_result(None)
    group.allreduce([X], options())
    group._inner.works[1].future.set_result(None)  # nobody has asked for this one
    ledger.settle()
    assert list(ledger.open_works) == [1]


def test_a_method_that_nobody_knows_is_written_down_and_handed_on(tmp_path, ledger):
    class WithMore(RecordingProcessGroup):
        put_signal = process_group._unrecorded("put_signal")

    group = WithMore(Backends(Backend()), [4, 7], ledger)
    work = group.put_signal(X, peer=1)
    assert group._inner.asked == [("put_signal", (X,), {"peer": 1})]
    assert work is group._inner.works[0]
    begun, done = lines(tmp_path)
    assert (begun["op"], begun["n"], done) == ("put_signal", 0, {"done": 0})


def test_another_file_begins_anew(group, ledger, tmp_path):
    group.allreduce([X], options()).get_future()
    group.barrier()
    ledger.redirect(tmp_path / "other.jsonl")
    assert (ledger.num_operations, ledger.waiting_for()) == (0, None)
    assert ledger.nobody_waits_for() == []
    assert ledger.asked == set()
    group.barrier()
    assert [e["n"] for e in lines(tmp_path, "other.jsonl")] == [0]
    assert [e["n"] for e in lines(tmp_path)] == [0, 1]
    ledger.redirect(None)
    group.barrier()
    assert len(lines(tmp_path, "other.jsonl")) == 1


def test_labels_nest_and_say_what_belongs_to_a_step(ledger):
    assert not ledger.in_step
    with ledger.label("structure/0"):
        assert ledger.in_step
        with ledger.label("setup/x"):
            assert not ledger.in_step
        assert ledger.in_step
    with pytest.raises(ValueError, match="x"), ledger.label("structure/0"):
        raise ValueError("x")
    assert not ledger.in_step


def test_an_observer_sees_operations_of_a_step_only_and_adds_to_the_event(group, ledger, tmp_path):
    seen = []

    def observe(op, args):
        seen.append((op, args[0]))
        return {"digest": "d"}, lambda: "after"

    ledger.observe = observe
    group.barrier()
    work = group.allreduce([X], options())
    assert seen == []
    with ledger.label("setup"):
        group.allreduce([X], options())
    assert seen == []
    with ledger.label("structure/0/step"):
        work = group.allreduce([X], options())
    assert [op for op, _ in seen] == ["allreduce"]
    work.wait()
    begun, done = lines(tmp_path)[-2:]
    assert (begun["digest"], begun["op"]) == ("d", "allreduce")
    assert done == {"done": 3, "output": "after"}


def test_an_interposer_stands_in_for_operations_of_a_step_only(group, ledger, tmp_path):
    calls = []
    ledger.interpose = lambda call: calls.append(call) or call.issue([X + 1], reduce="MIN")
    group.allreduce([X], options())
    with ledger.label("setup"):
        group.allreduce([X], options())
    assert calls == []
    with ledger.label("structure/0/step"):
        group.allreduce([X], opts=options())
    (call,) = calls
    assert (call.op, call.group, call.event["reduce"]) == ("allreduce", group, "SUM")
    name, (sent,), kwargs = group._inner.asked[-1]
    assert (name, list(kwargs)) == ("allreduce", ["opts"])
    assert torch.equal(sent[0], X + 1)
    begun = lines(tmp_path)[-1]
    assert (begun["n"], begun["reduce"], begun["numel"]) == (2, "MIN", 6)
    call.issue()
    assert torch.equal(group._inner.asked[-1][1][0][0], X)
    num = len(lines(tmp_path))
    call.quietly()
    call.quietly([X + 2])
    assert len(lines(tmp_path)) == num
    assert torch.equal(group._inner.asked[-2][1][0][0], X)
    assert torch.equal(group._inner.asked[-1][1][0][0], X + 2)
    assert all(work.waited for work in group._inner.works[-2:])


def test_tensors_are_found_in_nested_lists_in_order():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in tensors_in([a, (b, [c]), None, 3])] == [1, 2, 3]
    assert list(tensors_in("x")) == []


@pytest.mark.parametrize(("given", "ranks"), [([], [0, 1, 2]), ([4, 6, 9], [4, 6, 9])])
def test_a_groups_members_are_those_that_torch_names_else_all_of_its_size(
    given, ranks, monkeypatch, ledger
):
    made = {}
    monkeypatch.setattr(process_group, "_go_by_the_name_below", lambda: None)
    monkeypatch.setattr(
        process_group.dist.Backend, "register_backend",
        lambda name, create, **_: made.update({name: create}),
    )  # fmt: skip
    monkeypatch.setattr(process_group.dist, "ProcessGroupGloo", lambda *_: Backend())
    process_group.register_backend(ledger)
    options = SimpleNamespace(
        group_size=3, group_rank=1, store=None, timeout=None, global_ranks_in_group=given
    )
    assert made["sumgrad"](options).ranks == ranks


def test_of_works_that_were_handed_over_the_last_64_are_kept_alive():
    held = Ledger(None).handed_over
    held.extend(range(70))  # type: ignore[arg-type]
    assert list(held) == list(range(6, 70))
