"""What an operation gives comes at its wait; until then nothing is there that could be right."""

from __future__ import annotations

import pytest
import torch
from sumgrad.ledger.late import LateWork, only_written

OLD, NEW = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])


class Done:
    """Of an operation that has ended: Gloo's, which is waited for."""

    def wait(self, *timeout):
        return True

    def is_completed(self):
        return True


def late(carry_out, *args, op="allgather"):
    """The work, and what is said of who waits and who writes."""
    said = []

    def do(*copies):
        carry_out(*copies)
        return Done()

    work = LateWork(
        do, args, given=only_written(op, args), later=lambda: said.append("later"),
        written=lambda: said.append("written"),
    )  # fmt: skip
    return work, said


def gather(outputs, inputs):
    outputs[0].copy_(inputs[0] * 2)


@pytest.mark.parametrize(("old", "until"), [
    (OLD.clone(), [True, True]),
    (OLD.to(torch.complex64), [True, True]),
    (OLD.long(), [False, False]),
    (OLD > 1, [False, False]),
])  # fmt: skip
def test_a_buffer_that_is_kept_has_nothing_until_the_wait(old, until):
    out, own = old.clone(), NEW.to(old.dtype)
    version = out._version
    work, said = late(gather, [out], [own])
    assert out.isnan().tolist() == until
    assert any(until) or not bool(out.any())
    assert own.tolist() == NEW.to(old.dtype).tolist()
    work._end()
    assert torch.equal(out, (NEW.to(old.dtype) * 2).to(old.dtype))
    assert (said, out._version) == ([], version)


def test_what_is_a_part_of_what_is_taken_stays():
    whole = torch.arange(4.0)
    work, said = late(lambda o, i: o[0].copy_(torch.arange(4.0) + i[0].sum()), [whole], [whole[2:]])
    assert whole[:2].isnan().all()
    assert whole[2:].tolist() == [2.0, 3.0]
    work._end()
    assert whole.tolist() == [5.0, 6.0, 7.0, 8.0]
    assert said == []


def test_what_is_added_up_in_place_stays_until_the_wait():
    own = OLD.clone()
    work, said = late(lambda t: t[0].mul_(3), [own], op="allreduce")
    assert own.tolist() == OLD.tolist()
    work._end()
    assert own.tolist() == [3.0, 6.0]
    assert said == []


def test_what_an_operation_leaves_as_it_is_comes_back():
    out = OLD.clone()
    work, _ = late(lambda o, i: o[0][:1].copy_(i[0][:1]), [out], [NEW])
    work._end()
    assert out.tolist() == [3.0, 2.0]


def test_who_writes_before_the_wait_is_noticed():
    out = OLD.clone()
    work, said = late(gather, [out], [NEW.clone()])
    out.zero_()
    work._end()
    assert said == ["written"]


@pytest.mark.parametrize(("op", "number"), [
    ("allgather", 1), ("_allgather_base", 1), ("all_gather_single", 1), ("reduce_scatter", 1),
    ("alltoall_base", 1), ("recv", 1), ("scatter", 1), ("gather", 1), ("allreduce", 0),
    ("broadcast", 0), ("send", 0), ("reduce", 0),
])  # fmt: skip
def test_only_what_is_given_is_emptied(op, number):
    assert len(only_written(op, ([OLD], [NEW]))) == number
