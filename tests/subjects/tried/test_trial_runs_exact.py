"""A step again with one thing done otherwise: what is changed in it, and what is told of that."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sumgrad.record.trial import (
    TRIALS,
    Asked,
    Change,
    Edit,
    Trial,
    Values,
    add_trial,
    finish_trials,
    read_asked,
    read_trials,
    write_asked,
)
from sumgrad.subjects.program.tier_run import TierRun
from sumgrad.subjects.program.tried import changed, trials
from sumgrad.subjects.program.tried.changed import Changed
from sumgrad.subjects.program.tried.functions_run import functions_run
from sumgrad.subjects.program.tried.trials import Agreement, Trials
from sumgrad.subjects.program.watched.computations import Computations
from torch import nn
from torch.nn import functional as F

G = torch.Generator().manual_seed(3)
X = torch.randn(4, 6, generator=G, dtype=torch.float64)
W = torch.randn(6, 6, generator=G, dtype=torch.float64)


def stepped(x, w):
    h = F.linear(x, w)
    kept = h.detach()
    scaled = kept * 3.0
    both = torch.cat([h, scaled])
    return F.group_norm(both[:, :, None], num_groups=2)[..., 0].tanh()


def site(part):
    """Of the call of a step that is written so."""
    with Computations(lambda: ((), 0)) as computations:
        stepped(X.clone().requires_grad_(), W)
    (found,) = [c for c in computations.computed().computations if c.part == part]
    return found


def ran(change, x=X, modules=None):
    with Changed(change, None, modules or {}):
        return stepped(x, W)


def change(part, way, **more):
    c = site(part)
    return Change(site=c.site, function=c.function, way=way, **more)


@pytest.fixture
def three_ranks(monkeypatch):
    """Where each of three ranks has the same."""
    asked = []

    def all_reduce(tensor, op, group):
        asked.append((op, group))
        tensor.mul_(3 if op == dist.ReduceOp.SUM else 1)

    monkeypatch.setattr(changed.dist, "all_reduce", all_reduce)
    return asked


def test_a_sum_of_what_a_line_gives_and_nothing_else(three_ranks):
    own = change("kept * 3.0", "sum", axis="tp")
    h = X @ W.T
    wanted = F.group_norm(torch.cat([h, 9 * h])[:, :, None], num_groups=2)[..., 0].tanh()
    assert torch.allclose(ran(own), wanted)
    assert three_ranks == [(dist.ReduceOp.SUM, None)]
    elsewhere = Change(site=own.site + "1", function=own.function, way="sum")
    assert torch.equal(ran(elsewhere), stepped(X, W))
    other = Change(site=own.site, function="add", way="sum")
    assert torch.equal(ran(other), stepped(X, W))
    assert len(three_ranks) == 1


@pytest.mark.parametrize(
    ("way", "forward", "backward"),
    [("sum", 3, 1), ("sum_both", 3, 3), ("sum_back", 1, 3), ("largest", 1, 1), ("smallest", 1, 1)],
)
def test_a_sum_in_the_forward_and_in_the_backward(three_ranks, way, forward, backward):
    x = X.clone().requires_grad_()
    change = Change(site="", function="", way=way)
    out = changed._Otherwise.apply(x, change, "group")
    assert torch.equal(out, forward * X)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, backward))
    ops = {"largest": dist.ReduceOp.MAX, "smallest": dist.ReduceOp.MIN}
    op = ops.get(way, dist.ReduceOp.SUM)
    assert three_ranks[0] == (op, "group")
    assert {*three_ranks[1:]} <= {(dist.ReduceOp.SUM, "group")}
    assert len(three_ranks) == {"sum_both": 2, "largest": 3, "smallest": 3}.get(way, 1)


@pytest.mark.parametrize("way", ["largest", "smallest"])
def test_the_gradient_of_a_largest_is_that_of_all_ranks_where_it_is(monkeypatch, way):
    """This rank has the first alone, and one of the others has that, too."""
    others = torch.tensor([1.0, 9.0] if way == "largest" else [1.0, -9.0])

    def all_reduce(tensor, op, group):
        ops = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}
        tensor.copy_(ops[op](tensor, others) if op in ops else tensor + 1)

    monkeypatch.setattr(changed.dist, "all_reduce", all_reduce)
    x = torch.tensor([1.0, 2.0]).requires_grad_()
    change = Change(site="", function="", way=way)
    out = changed._Otherwise.apply(x, change, "group")
    assert torch.equal(out, others)
    (out * torch.tensor([3.0, 5.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([(3 + 1) / 2, 0.0]))


def test_an_argument_is_counted_as_a_computations_are(three_ranks):
    """Those of a list each by itself, and words, too."""
    h = X @ W.T
    wanted = F.group_norm(torch.cat([h, 9 * h])[:, :, None], num_groups=2)[..., 0].tanh()
    assert torch.allclose(ran(change("torch.cat([h, scaled])", "sum", ats=(1,))), wanted)
    norm = "F.group_norm(both[:, :, None], num_groups=2)"
    takes = site(norm).takes
    (at,) = [i for i, taken in enumerate(takes) if taken == "2"] or [
        i for i, taken in enumerate(takes) if str(taken) == "num_groups=2"
    ]
    three = F.group_norm(torch.cat([h, 3 * h])[:, :, None], num_groups=3)[..., 0].tanh()
    assert torch.allclose(ran(change(norm, "number", ats=(at,), by=1.5)), three)


def test_what_runs_in_a_backward_and_what_is_no_number_is_left_as_it_is(three_ranks):
    """Where a checkpoint runs its lines again, the first pass has made the sum."""
    own = change("kept * 3.0", "sum", axis="tp")
    x = X.clone().requires_grad_()
    with Changed(own, None, {}):
        out = torch.utils.checkpoint.checkpoint(stepped, x, W, use_reentrant=False)
        out.sum().backward()
    assert len(three_ranks) == 1
    whole = torch.arange(4)
    assert Changed(own, None, {})._otherwise(whole) is whole
    before = X.clone()
    ran(change("torch.cat([h, scaled])", "sum", ats=(0,)))
    assert torch.equal(before, X)


def test_what_is_detached_or_not_or_left_out():
    x = X.clone().requires_grad_()
    ran(change("h.detach()", "attach"), x).sum().backward()
    both = x.grad.clone()
    x.grad = None
    stepped(x, W).sum().backward()
    assert not torch.allclose(both, x.grad)
    x.grad = None
    out = ran(change("torch.cat([h, scaled])", "detach", ats=(0,)), x)
    assert not out.requires_grad
    h = X @ W.T
    wanted = F.group_norm(torch.cat([h, h])[:, :, None], num_groups=2)[..., 0].tanh()
    assert torch.allclose(ran(change("kept * 3.0", "skip")), wanted)


def test_a_share_of_an_argument():
    h = X @ W.T
    wanted = F.group_norm(torch.cat([h, h])[:, :, None], num_groups=2)[..., 0].tanh()
    own = change("torch.cat([h, scaled])", "once", ats=(1,), by=1 / 3)
    assert torch.allclose(ran(own), wanted)


@pytest.mark.parametrize(("number", "by", "wanted"), [
    (6, 0.5, 3), (3, 0.5, 1.5), (0.5, 2.0, 1.0), (True, 2.0, True), ("a", 2.0, "a"),
])  # fmt: skip
def test_a_whole_number_stays_one_where_it_can(number, by, wanted):
    got = changed._times(number, by)
    assert (got, type(got)) == (wanted, type(wanted))


def test_what_goes_into_a_module_and_what_it_gives(three_ranks):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    x = X.clone().requires_grad_()
    (alone,) = torch.autograd.grad(model(x).sum(), x)
    into = Change(site="", function="module 0", way="sum_back", ats=(0,))
    with Changed(into, None, {"0": model[0]}):
        (summed,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.allclose(summed, 3 * alone)
    given = Change(site="", function="module 0", way="sum")
    with Changed(given, None, {"0": model[0]}):
        out = model(x)
    assert torch.allclose(out, (3 * model[0](x)).tanh())
    assert torch.equal(model(x), model[0](x).tanh())  # the hook is gone
    with Changed(Change(site="", function="module 9", way="sum"), None, {"0": model[0]}):
        assert torch.equal(model(x), model[0](x).tanh())


RIGHT = {"w": torch.tensor([1.0, 2.0]).double()}
WANTED = {"0/w": RIGHT["w"], "1/w": RIGHT["w"]}
FAILED = {"w": torch.tensor([1.0, 3.0]).double()}
AIMS = Values(wanted=WANTED, before={0: FAILED})
CHANGES = tuple(Change(site=f"f.py:{i}", function="mul", way="sum") for i in range(9))


class NoRendezvous:
    """Where operations are carried out as ever."""

    is_off = False
    by_memory = False

    @contextlib.contextmanager
    def round(self, *, as_it_is):
        yield None


class Alone:
    """The agreement of one rank."""

    def rendezvous(self):
        return NoRendezvous()

    def of_all(self, own, patience_s=0.0):
        return [own]

    def is_over(self):
        return False


class Step:
    """What a step gives, by the change that is made in it."""

    def __init__(self, gives, monkeypatch):
        self.gives, self.asked = gives, []
        placed = [SimpleNamespace(name="w", slice=lambda full: full)]
        ledger = SimpleNamespace(unwritten=contextlib.nullcontext)
        self.seat = SimpleNamespace(rank=0, ledger=ledger)
        monkeypatch.setattr(trials, "kept_from_outside", lambda **_: contextlib.nullcontext())
        self.placement = SimpleNamespace(placed=placed)
        self.model, self.modules = nn.Module(), {}
        monkeypatch.setattr(trials, "names_of_modules", lambda *_: {})
        monkeypatch.setattr(trials, "seen_modules", lambda *_: [])
        monkeypatch.setattr(Trials, "_changed", lambda _, change: contextlib.nullcontext(change))
        self.bare_step = self.step

    def step(self, step, change):
        self.asked.append(change)
        given = self.gives(change, len(self.asked))
        if isinstance(given, Exception):
            raise given
        return given


def found(monkeypatch, gives, *, changes=CHANGES, step=0, bound=1e-9, seconds=99.0):
    run = Step(gives, monkeypatch)
    asked = Asked(tier="structure", step=step, changes=changes, bounds={"0/w": bound, "1/w": bound},
                  seconds=seconds)  # fmt: skip
    return [*Trials(run, asked, AIMS, Alone()).found()], run


def test_a_change_is_on_while_the_step_runs_and_goes_by_what_it_is_of(monkeypatch):
    run, seen = Step(right_with(), monkeypatch), []
    run.ctx = SimpleNamespace(group=lambda *axes: axes)

    def bare_step(step, interpose=None):
        mode = torch.overrides._get_current_function_mode()
        seen.append((step, type(mode).__name__, type(interpose).__name__))
        return FAILED

    run.bare_step = bare_step
    monkeypatch.undo()
    monkeypatch.setattr(trials, "names_of_modules", lambda *_: {})
    monkeypatch.setattr(trials, "seen_modules", lambda *_: [])
    asked = Asked(tier="structure", step=0, changes=(), bounds={}, seconds=1.0)
    made = Trials(run, asked, AIMS, Alone())
    over = Change(site="f.py:3", function="allreduce", way="over", axis="tp")
    for change in (None, CHANGES[0], over):
        made._steps(change)
    assert seen == [(0, "NoneType", "NoneType"), (0, "Changed", "NoneType"),
                    (0, "NoneType", "ChangedCollective")]  # fmt: skip


def right_with(*numbers):
    return lambda change, _: RIGHT if change in [CHANGES[n] for n in numbers] else FAILED


def test_which_changes_make_all_gradients_right(monkeypatch):
    told, run = found(monkeypatch, right_with(2, 4))
    assert [one.right for one in told] == [n in (2, 4) for n in range(9)]
    assert [one.change for one in told] == [*CHANGES]
    # As it is; and again after each that is right, which is made once more.
    assert run.asked.count(None) == 3
    assert [run.asked.count(change) for change in CHANGES] == [1, 1, 2, 1, 2, 1, 1, 1, 1]


def test_nothing_is_told_where_the_step_does_not_fail_as_it_did(monkeypatch):
    told, _ = found(monkeypatch, lambda change, _: {"w": FAILED["w"] + 1})
    assert told == []


@pytest.mark.parametrize(
    ("gives", "same"),
    [
        ({"w": FAILED["w"] + 5e-10}, True),  # as where a reducer sums in another order
        ({"w": FAILED["w"] + 2e-9}, False),
        ({"w": FAILED["w"][:1]}, False),
        ({"w": FAILED["w"], "b": FAILED["w"]}, False),
        ({}, False),
    ],
)
def test_a_step_fails_as_it_did_up_to_the_bounds(monkeypatch, gives, same):
    told, _ = found(monkeypatch, lambda change, _: gives)
    assert bool(told) is same


@pytest.mark.parametrize(
    ("value", "other"), [(torch.nan, 2.0), (torch.inf, -torch.inf), (1j, 2j), (2.0, torch.nan)]
)
def test_what_is_no_real_number_is_the_same_again(monkeypatch, value, other):
    run = Step(lambda change, _: {"w": torch.tensor([1.0, value])}, monkeypatch)
    asked = Asked(tier="structure", step=0, changes=(), bounds={"0/w": 1e-9}, seconds=9.0)
    for was in (value, other):
        values = Values(wanted={}, before={0: {"w": torch.tensor([1.0, was])}})
        assert Trials(run, asked, values, Alone())._is_as_it_was() is (was is value)


def test_a_step_that_remembers_tells_nothing(monkeypatch):
    """It is right from the third time on, whatever is changed."""
    told, _ = found(monkeypatch, lambda _, times: RIGHT if times > 2 else FAILED)
    assert [one.right for one in told] == [False]


def test_what_the_change_before_has_left_makes_no_change_right(monkeypatch):
    """A step that shows a change one step later."""
    past = [None]

    def gives(change, _):
        past.append(change)
        return RIGHT if past[-2] == CHANGES[0] else FAILED

    told, _ = found(monkeypatch, gives)
    assert [one.right for one in told] == [False] * 9


def test_a_change_that_cannot_begin_here_has_its_round_all_the_same(monkeypatch, tmp_path):
    """Ranks count them, and others may have the function that this one lacks."""
    (tmp_path / "f.py").write_text("def f(x):\n    return x\n")
    edit = Edit(file=str(tmp_path / "f.py"), start=(2, 11), end=(2, 12), old="x", new="-x")
    lacking = Change(site="f.py:2", function="", way="edit", edit=edit)
    begun = []

    class Counted(NoRendezvous):
        def round(self, *, as_it_is):
            begun.append(as_it_is)
            return super().round(as_it_is=as_it_is)

    monkeypatch.setattr(Alone, "rendezvous", lambda self: Counted())
    changed_as_ever = Trials._changed
    run = Step(right_with(), monkeypatch)
    monkeypatch.setattr(Trials, "_changed", changed_as_ever)
    asked = Asked(tier="structure", step=0, changes=(lacking,), bounds={"0/w": 1e-9},
                  seconds=9.0)  # fmt: skip
    (one,) = Trials(run, asked, AIMS, Alone()).found()
    assert not one.right
    assert begun == [True, False, True]  # the last, whether the step is as it was


def test_a_rendezvous_that_is_off_on_one_rank_is_so_on_all(monkeypatch):
    turned = []
    own = NoRendezvous()
    own.turn_off = lambda: turned.append(True)
    monkeypatch.setattr(Alone, "rendezvous", lambda self: own)
    monkeypatch.setattr(Alone, "of_all", lambda self, own, patience_s=0.0: [own, "yes"])
    found(monkeypatch, right_with(), changes=CHANGES[:1])
    assert turned


def test_edited_code_sums_over_the_ranks_of_an_axis(monkeypatch, tmp_path):
    file = tmp_path / "users.py"
    file.write_text("def f(x):\n    return x\n")
    users = {}
    exec(compile(file.read_text(), str(file), "exec"), users)
    edit = Edit(file=str(file), start=(2, 11), end=(2, 12), old="x", new='__summed__(x, "tp")')
    monkeypatch.setattr(trials, "summed", lambda value, group: (value, group))
    changed_as_ever = Trials._changed
    run = Step(right_with(), monkeypatch)
    monkeypatch.setattr(Trials, "_changed", changed_as_ever)
    run.ctx = SimpleNamespace(group=lambda axis: f"the group of {axis}")
    asked = Asked(tier="structure", step=0, changes=(), bounds={}, seconds=1.0)
    made = Trials(run, asked, AIMS, Alone())
    with made._changed(Change(site="f.py:2", function="", way="edit", edit=edit)):
        assert users["f"](3) == (3, "the group of tp")


def test_what_is_no_cause_ends_no_search(monkeypatch):
    """A line that is left out may make good what another does wrong."""
    skips = [Change(site=f"f.py:{n}", function="mul", way="skip") for n in range(20)]
    right = {skips[0]}
    made, _ = found(monkeypatch, lambda change, _: RIGHT if change in right else FAILED,
                    changes=tuple(skips))  # fmt: skip
    assert len(made) == len(skips)
    sums = [replace(one, way="sum") for one in skips]
    made, _ = found(monkeypatch, lambda change, _: RIGHT if change == sums[0] else FAILED,
                    changes=tuple(sums))  # fmt: skip
    assert len(made) == 1 + trials.MOST_AFTER


@pytest.mark.parametrize(("module", "mends", "tried"), [
    ("torch.nn.parallel.distributed", True, True),
    ("torch.distributed.fsdp", True, True),
    ("torch.distributed.fsdp", False, False),
    ("mine", True, False),  # it is not looked at before more have raised, and then is another
])  # fmt: skip
def test_what_a_wrapper_keeps_of_a_step_that_raised_is_distributed_anew(
    monkeypatch, module, mends, tried
):
    """After the second that raises nothing is right any more, until all is made anew."""
    broken, made = [False], []

    def gives(change, _):
        if change in CHANGES[:2] and not made:
            broken[0] = change == CHANGES[1]
            return ValueError("in the middle of a forward")
        if broken[0]:
            return {"w": FAILED["w"] + 1}
        return right_with(4)(change, 0)

    class Wrapped(nn.Module):
        __module__ = module

    def anew(*_, like):
        made.append(like)
        broken[0] = not mends
        return run

    run = Step(gives, monkeypatch)
    run.model, run.job, run.tier, run.dtype = Wrapped(), None, "structure", None
    run.close = lambda: None
    monkeypatch.setattr(trials, "TierRun", anew)
    asked = Asked(tier="structure", step=0, changes=CHANGES, bounds={"0/w": 1e-9}, seconds=99.0)
    told = [*Trials(run, asked, AIMS, Alone()).found()]
    assert any(one.right for one in told) == tried
    assert len(made) == (module != "mine")
    assert all(one is run for one in made)


def test_what_raises_is_not_right_and_the_others_are_tried(monkeypatch):
    def gives(change, _):
        return ValueError("no graph") if change == CHANGES[0] else right_with(1)(change, _)

    told, _ = found(monkeypatch, gives)
    assert [one.right for one in told] == [n == 1 for n in range(9)]

    def breaks(change, times):
        return ValueError("no graph") if change == CHANGES[0] else {"w": FAILED["w"] + times}

    told, _ = found(monkeypatch, lambda c, t: FAILED if t == 1 else breaks(c, t))
    assert told == []


def test_no_gradient_is_zero_and_one_of_another_shape_is_wrong(monkeypatch):
    told, _ = found(monkeypatch, lambda change, _: FAILED if change is None else {})
    assert not any(one.right for one in told)
    other = {"w": torch.ones(1).double()}
    told, _ = found(monkeypatch, lambda change, _: FAILED if change is None else other)
    assert not any(one.right for one in told)
    odd = {"w": torch.full((2,), torch.nan).double()}
    told, _ = found(monkeypatch, lambda change, _: FAILED if change is None else odd)
    assert not any(one.right for one in told)


def test_some_more_are_tried_after_the_first_that_is_right(monkeypatch):
    monkeypatch.setattr(trials, "MOST_AFTER", 3)
    told, _ = found(monkeypatch, right_with(2, 4))
    assert [one.right for one in told] == [False, False, True, False, True, False]
    assert len(found(monkeypatch, right_with())[0]) == 9


def test_enough_that_are_right_or_no_time_left_end_it(monkeypatch):
    monkeypatch.setattr(trials, "MOST_RIGHT", 2)
    told, _ = found(monkeypatch, right_with(*range(9)))
    assert len(told) == 2
    assert len(found(monkeypatch, right_with(), seconds=0.0)[0]) == 9
    monkeypatch.setattr(trials, "FEWEST", 3)
    assert len(found(monkeypatch, right_with(), seconds=0.0)[0]) == 3
    monkeypatch.setattr(trials, "GRACE_S", 0.0)
    assert len(found(monkeypatch, right_with(), seconds=0.0)[0]) == 1
    monkeypatch.setattr(trials, "MOST_TRIAL_S", 0.0)
    assert found(monkeypatch, right_with())[0] == []


def test_the_steps_before_are_changed_too(monkeypatch):
    _, run = found(monkeypatch, right_with(), changes=CHANGES[:1], step=1)
    assert run.asked == [None, None, CHANGES[0], CHANGES[0]]


def test_the_steps_before_have_to_stay_right(monkeypatch):
    def gives(change, times):
        first = times % 2
        return FAILED if (change is None) != bool(first) else RIGHT

    assert not any(one.right for one in found(monkeypatch, gives, step=1)[0])

    def both(change, times):
        return RIGHT if change == CHANGES[1] or times % 2 else FAILED

    assert [one.right for one in found(monkeypatch, both, step=1)[0]] == [n == 1 for n in range(9)]


def test_a_buffer_that_holds_the_next_steps_gradients_is_read_before(monkeypatch):
    """The first step is wrong, and the second writes what is right into the same memory."""
    held = torch.zeros(2).double()

    def gives(change, times):
        if change is None:
            return FAILED
        held.copy_(FAILED["w"] if times % 2 else RIGHT["w"])
        return {"w": held}

    assert not any(one.right for one in found(monkeypatch, gives, step=1)[0])


def test_changes_that_raise_take_no_more_time_either(monkeypatch):
    def gives(change, _):
        return FAILED if change is None else ValueError("no graph")

    monkeypatch.setattr(trials, "FEWEST", 2)
    assert len(found(monkeypatch, gives, seconds=0.0)[0]) == 2


def test_every_rank_has_to_be_right_with_its_own_part(monkeypatch, tmp_path):
    """Of two ranks, each of which holds one of two numbers, the second is right with another."""
    store, told = dist.HashStore(), {}
    own = {0: (1.0, 9.0), 1: (2.0, 3.0)}  # right, and as it failed
    monkeypatch.setattr(trials, "names_of_modules", lambda *_: {})
    monkeypatch.setattr(trials, "seen_modules", lambda *_: [])
    monkeypatch.setattr(Trials, "_changed", lambda _, change: contextlib.nullcontext(change))
    monkeypatch.setattr(Agreement, "rendezvous", lambda _: NoRendezvous())

    def one(rank, right_with):
        def step(_, change):
            right, wrong = own[rank]
            return {"w": torch.tensor([right if change in right_with else wrong]).double()}

        run = SimpleNamespace(
            seat=SimpleNamespace(rank=rank), model=nn.Module(), modules={}, bare_step=step,
            placement=SimpleNamespace(placed=[
                SimpleNamespace(name="w", slice=lambda full: full[rank : rank + 1]),
                SimpleNamespace(name="of no reference", slice=lambda full: full),
            ]),
        )  # fmt: skip
        before = {r: {"w": torch.tensor([own[r][1]]).double()} for r in own}
        asked = Asked(tier="structure", step=0, changes=CHANGES[:4], bounds={"0/w": 1e-9},
                      seconds=99.0)  # fmt: skip
        values = Values(wanted={"0/w": RIGHT["w"]}, before=before)
        made = Trials(run, asked, values, Agreement(store, rank, 2, tmp_path / "over")).found()
        told[rank] = [trial.right for trial in made]

    right_with = {0: CHANGES[:2], 1: CHANGES[1:3]}
    threads = [threading.Thread(target=one, args=(r, right_with[r])) for r in own]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert told == {0: [False, True, False, False], 1: [False, True, False, False]}


def test_a_step_that_is_stuck_ends_its_process(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(trials.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(trials, "LEAST_S", 0.05)

    def gives(change, _):
        if change is not None:
            assert ended.wait(10)
        return FAILED

    found(monkeypatch, gives, changes=CHANGES[:1])
    assert ended.is_set()


def test_a_step_in_which_others_wait_no_more_ends_its_process(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(trials.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(Alone, "is_over", lambda self: True)
    monkeypatch.setattr(trials, "LEAST_S", 99.0)
    monkeypatch.setattr(trials, "MOST_STUCK_S", 99.0)

    def gives(change, _):
        if change is not None:
            assert ended.wait(10)
        return FAILED

    found(monkeypatch, gives, changes=CHANGES[:1])
    assert ended.is_set()


def test_ranks_agree_over_a_store_and_wait_for_nobody_for_ever(monkeypatch, tmp_path):
    store = dist.HashStore()
    told = {}

    def one(rank, own):
        told[rank] = Agreement(store, rank, 2, tmp_path / "over").of_all(own)

    threads = [threading.Thread(target=one, args=(r, w)) for r, w in enumerate(["yes", "late"])]
    for t in threads:
        t.start()
    for t in threads:
        t.join(10)
    assert told == {0: ["yes", "late"], 1: ["yes", "late"]}
    agreement = Agreement(dist.HashStore(), 0, 2, tmp_path / "over")
    assert not agreement.is_over()
    with pytest.raises(TimeoutError):
        agreement.of_all("raised", 0.01)
    assert agreement.is_over()
    alone = Agreement(dist.HashStore(), 0, 1, tmp_path / "over")
    with pytest.raises(TimeoutError):  # all have told, and one of them is gone
        alone.of_all("raised")


def test_what_is_asked_and_found_is_read_as_it_was_written(tmp_path):
    asked = Asked(tier="structure", step=1, changes=CHANGES[:2], bounds={"w": 1e-9},
                  seconds=2.5)  # fmt: skip
    folder = tmp_path / TRIALS
    folder.mkdir()
    write_asked(folder, asked, Values(wanted=WANTED, before={0: FAILED, 3: RIGHT}))
    again, values = read_asked(folder)
    assert again == asked
    assert {*values.wanted} == {*WANTED}
    assert torch.equal(values.wanted["0/w"], WANTED["0/w"])
    assert [*values.before] == [0, 3]
    assert torch.equal(values.before[3]["w"], RIGHT["w"])
    finish_trials(folder)
    assert read_trials(tmp_path) == ()
    told = (Trial(change=CHANGES[0], right=True, avoids=("f.py:3 f",)),
            Trial(change=CHANGES[1], right=False))  # fmt: skip
    add_trial(folder, told[0])
    assert read_trials(tmp_path) == ()  # ranks try yet
    finish_trials(folder)
    assert read_trials(tmp_path) == told[:1]
    add_trial(folder, told[1])  # ranks after these
    with (folder / "made.jsonl").open("a") as file:
        file.write('{"change": {"si')  # as far as one that was killed came
    finish_trials(folder)
    assert read_trials(tmp_path) == told
    (folder / "found.jsonl").write_text('{"change": {"odd": 1}, "right": true}\n')
    assert read_trials(tmp_path) == ()


class Distributed(Step):
    """The same, distributed anew: on this rank lies of `w` what `index` says."""

    asked_whole = 0

    def __init__(self, gives, monkeypatch, index=None, whole=True):
        super().__init__(gives, monkeypatch)
        self.whole = whole
        size = FAILED["w"].numel() if index is None else len(index)
        placed = SimpleNamespace(name="w", slice=lambda full: full, index=index,
                                 local=lambda: torch.zeros(size))  # fmt: skip
        self.placement = SimpleNamespace(placed=[placed])
        self.closed, self.stepped = 0, False
        self.job, self.tier, self.dtype = "job", "structure", torch.float64

    def is_whole(self):
        assert self.seat.ledger.as_in_a_step
        self.asked_whole += 1
        return self.whole

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(("index", "whole", "right"), [
    (None, True, True),
    (torch.tensor([0]), True, False),  # of less of it than before
    (None, False, False),
])  # fmt: skip
def test_code_that_distributes_is_run_anew_and_all_of_a_parameter_must_be_there(
    monkeypatch, index, whole, right
):
    run = Distributed(lambda *_: FAILED, monkeypatch)
    made = []

    def anew(seat, job, tier, dtype, *, like):
        assert (seat, job, tier, dtype, like) == (run.seat, "job", "structure", torch.float64, run)
        assert run.seat.ledger.as_in_a_step  # ranks that part in it do not wait for each other
        change = run.seat.ledger.change
        gives = RIGHT if change is not None else FAILED
        made.append(Distributed(lambda *_: gives, monkeypatch, index if change else None,
                                whole or not change))  # fmt: skip
        made[-1].seat = run.seat
        monkeypatch.setattr(Trials, "_changed", changed)  # which another Step has put back
        return made[-1]

    @contextlib.contextmanager
    def changed(trial, change):
        run.seat.ledger.change = change
        yield None

    monkeypatch.setattr(trials, "TierRun", anew)
    monkeypatch.setattr(Trials, "_changed", changed)
    edit = Edit(file="f.py", start=(1, 0), end=(1, 1), old="a", new="b")
    change = Change(site="f.py:1", function="", way="edit", edit=edit, anew=True)
    asked = Asked(tier="structure", step=0, changes=(change,), bounds={"0/w": 1e-9}, seconds=99.0)
    (told,) = Trials(run, asked, AIMS, Alone()).found()
    assert told.right is right
    assert run.asked == []  # its own model is left alone
    assert all(one.closed == 1 and one.stepped for one in made)
    assert all(one.asked_whole == 1 for one in made)
    assert not run.seat.ledger.as_in_a_step


@pytest.mark.parametrize(("held", "unknown", "whole"), [
    ({"w": None, "b": None}, (), True),
    ({"w": torch.tensor([[0, 1]]), "b": None}, (), False),
    ({"w": torch.tensor([[3, 2], [1, 0]]), "b": None}, (), True),
    ({"w": None}, (), False),
    ({"w": None, "b": None}, ("head: nobody knows",), False),
])  # fmt: skip
def test_a_model_is_whole_where_all_of_it_is_on_some_rank(monkeypatch, held, unknown, whole):
    labels, run = [], TierRun.__new__(TierRun)
    run.base = {"w": torch.zeros(2, 2), "b": torch.zeros(())}
    placed = [SimpleNamespace(name=name, index=index) for name, index in held.items()]
    run.placement = SimpleNamespace(placed=placed, unknown=[*unknown])
    label = lambda text: contextlib.nullcontext(labels.append(text))  # noqa: E731
    run.seat = SimpleNamespace(ledger=SimpleNamespace(label=label))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: labels.append(op))
    assert run.is_whole() is whole
    assert labels == ["setup/places", dist.ReduceOp.MAX]


def helper():
    return [one for one in (1, 2)]


def unused():
    raise AssertionError


def test_functions_that_run_are_told_by_their_first_lines():
    with functions_run() as run:
        helper()
        with contextlib.suppress(AssertionError):
            unused()
        assert [*map(lambda one: torch.zeros(one).sum(), [2])] == [0]
    names = {name.rpartition(" ")[2] for name in run}
    assert {"helper", "unused"} <= names
    assert not any("<" in name for name in names)
    assert all(name.startswith(f"{__file__}:") for name in run if name.endswith(" helper"))
    assert not any("torch" in name.partition(":")[0].split("/") for name in run)


def test_what_is_not_run_where_it_is_right_is_told_of_all_ranks(monkeypatch):
    def gives(change, _):
        if change is None or change == CHANGES[3]:
            helper()
        if change == CHANGES[3]:
            unused_too()
        return RIGHT if change in CHANGES[2:4] else FAILED

    monkeypatch.setattr(Alone, "of_all", lambda self, own, patience_s=0.0: [own, '["there.py:3 f"]']
                        if own.startswith("[") else [own])  # fmt: skip
    told, _ = found(monkeypatch, gives, changes=CHANGES[:5])
    assert [one.right for one in told] == [False, False, True, True, False]
    names = [[name.rpartition(" ")[2] for name in one.avoids] for one in told]
    assert names == [[], [], ["helper", "f"], ["f"], []]


def unused_too():
    """Run by a change alone."""


def test_operations_go_by_memory_but_for_what_is_confirmed(monkeypatch):
    seen, rendezvous = [], NoRendezvous()
    rendezvous.by_memory = True
    monkeypatch.setattr(Alone, "rendezvous", lambda self: rendezvous)

    def gives(change, _):
        seen.append((change in CHANGES[:1], rendezvous.by_memory))
        return RIGHT if change in CHANGES[:1] else FAILED

    found(monkeypatch, gives, changes=CHANGES[:1])
    assert seen == [(False, True), (True, True), (False, True), (True, False)]
    assert rendezvous.by_memory
