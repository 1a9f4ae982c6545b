"""What is kept of a step's collectives: values before and after, and those of the step before."""

from __future__ import annotations

import torch
from sumgrad.ledger.process_group import Ledger
from sumgrad.subjects import exchanges as module
from sumgrad.subjects.exchanges import Exchanges
from sumgrad.subjects.users_line import is_users


class Counting:
    """Stands for a ledger: only the number of its next operation is asked for."""

    num_operations = 0


def inner(op, args):
    return {"op": op}, (lambda: "digest") if op == "allreduce" else None


def watching() -> tuple[Counting, Exchanges]:
    ledger = Counting()
    return ledger, Exchanges(ledger, inner)


def issue(ledger, exchanges, op, *args):
    seen, done = exchanges.observe(op, args)
    assert seen == {"op": op}
    ledger.num_operations += 1
    return done


def test_what_goes_in_is_kept_as_it_was_and_what_comes_out_as_it_is_when_waited_for():
    ledger, exchanges = watching()
    exchanges.begin_step()
    buffer = torch.tensor([1.0, 2.0])
    done = issue(ledger, exchanges, "allreduce", [buffer])
    buffer *= 3
    assert done() == "digest"
    buffer.zero_()
    (one,) = exchanges.found
    assert (one.number, one.given.tolist(), one.got.tolist()) == (0, [1, 2], [3, 6])


def test_nobody_waited_then_nothing_came_out():
    ledger, exchanges = watching()
    exchanges.begin_step()
    issue(ledger, exchanges, "allreduce", [torch.ones(2)])
    assert exchanges.found[0].got is None


def test_out_of_place_operations_have_their_own_inputs():
    ledger, exchanges = watching()
    exchanges.begin_step()
    out = [torch.zeros(2), torch.zeros(2)]
    done = issue(ledger, exchanges, "allgather", [out], [torch.tensor([5.0, 6.0])])
    out[1] += 1
    assert done() is None  # the observer behind has nothing to say of the result
    assert exchanges.found[0].given.tolist() == [5, 6]
    assert exchanges.found[0].got.tolist() == [0, 0, 1, 1]


def test_the_step_before_is_kept_beside_the_operation_of_the_same_number():
    ledger, exchanges = watching()
    for step in range(3):
        exchanges.begin_step()
        for i in range(2):
            issue(ledger, exchanges, "allreduce", [torch.full((2,), 10.0 * step + i)])
    assert [one.before.tolist() for one in exchanges.found] == [[10, 10], [11, 11]]
    assert [one.number for one in exchanges.found] == [4, 5]


def test_another_size_is_not_the_same_operation():
    ledger, exchanges = watching()
    for size in (2, 3):
        exchanges.begin_step()
        issue(ledger, exchanges, "allreduce", [torch.ones(size)])
    assert exchanges.found[0].before is None


def test_integers_messages_and_barriers_are_left_out():
    ledger, exchanges = watching()
    exchanges.begin_step()
    issue(ledger, exchanges, "allreduce", [torch.ones(2, dtype=torch.int64)])
    issue(ledger, exchanges, "send", [torch.ones(2)], 1)
    issue(ledger, exchanges, "barrier")
    issue(ledger, exchanges, "allreduce", [torch.ones(2), torch.ones(2, dtype=torch.float64)])
    assert exchanges.found == ()


def test_no_more_is_kept_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 40)
    ledger, exchanges = watching()
    exchanges.begin_step()
    done = issue(ledger, exchanges, "allreduce", [torch.ones(8)])
    done()  # 32 bytes went in, 32 more would come out
    assert exchanges.found[0].got is None
    exchanges.begin_step()
    issue(ledger, exchanges, "allreduce", [torch.ones(8)])
    assert len(exchanges.found) == 1


def test_a_real_ledger_counts_as_it_is_asked_here():
    assert isinstance(Ledger.num_operations, property)


def test_whose_line_it_is():
    assert is_users("/home/user/train.py")
    assert is_users(module.__file__.replace("subjects/exchanges", "workloads/programs/ddp"))
    assert not is_users(module.__file__)
    assert not is_users(module.__file__.replace("subjects/exchanges", "record/ranks"))
    assert not is_users(torch.__file__)
