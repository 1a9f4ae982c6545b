"""What is tried in a failing step, in which order, and what is said of what makes it right."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis, Verdict
from sumgrad.diagnose import trials
from sumgrad.diagnose.explainers.by_modules import tried
from sumgrad.diagnose.explainers.by_modules.tried import with_what_was_tried
from sumgrad.diagnose.modules import changes
from sumgrad.diagnose.modules.changes import changes_of
from sumgrad.diagnose.modules.lines import Lines
from sumgrad.record.trial import Change, Trial
from sumgrad.subjects.program.computations import Computations
from torch.nn import functional as F

G = torch.Generator().manual_seed(5)
X = torch.randn(4, 6, generator=G, dtype=torch.float64)
COLUMNS = [slice(0, 2), slice(2, 4), slice(4, 6)]
AXES = {"tp": [(0, 1, 2)]}


def recorded(step, *given):
    with Computations(lambda: ((), 0)) as computations:
        step(*(t.clone().requires_grad_() for t in given)).backward()
    return computations.computed()


def whole(x):
    norm = x.square().sum(-1, keepdim=True)
    return (x / norm.sqrt()).square().sum()


def part(x):
    """The norm of its own columns."""
    own = x.square().sum(-1, keepdim=True)
    return (x / own.sqrt()).square().sum()


def lines_of(*ranks, single=None):
    traces = SimpleNamespace(
        ranks={r: SimpleNamespace(computed=own, calls=()) for r, own in enumerate(ranks)},
        single=SimpleNamespace(computed=single or recorded(whole, X), params={}),
    )
    return Lines(traces, [*AXES.items()], 1e-8)


def tried_of(lines, axes=None, pairs=frozenset()):
    """Change, and what stands at its place."""
    parts = {c.site: c.part for r in lines.states.ranks for c in lines.computed(r).computations}
    return [(c, parts[c.site]) for c in changes_of(lines, axes or AXES, pairs)]


def parts():
    return [recorded(part, X[:, columns]) for columns in COLUMNS]


def test_a_part_is_summed_first():
    found = tried_of(lines_of(*parts()))
    firsts = [(c.way, at) for c, at in found[:2]]
    assert firsts == [("sum", "x.square().sum(-1, keepdim=True)"),
                      ("sum_both", "x.square().sum(-1, keepdim=True)")]  # fmt: skip
    assert {c.axis for c, _ in found if c.way in ("sum", "sum_both", "sum_back")} == {"tp"}
    assert len({c for c, _ in found}) == len(found)


def test_what_is_right_is_not_summed_and_what_gets_what_is_right_neither():
    def same(x):
        return whole(x)

    found = tried_of(lines_of(*(recorded(same, X) for _ in range(3))))
    assert not [c for c, _ in found if c.axis]


def by_own_cost(x, cost, whole_cost=None):
    kept = x.detach().exp()
    risk = (kept * cost).sum() if whole_cost is None else whole_cost
    return (x * (cost - risk)).sum()


def in_one(x, cost):
    return (x * (cost - (x.detach().exp() * cost).sum())).sum()


def test_numbers_that_no_gradient_passes_are_summed_in_the_forward_alone():
    cost = torch.rand(4, 6, generator=G, dtype=torch.float64)
    ranks = []
    for columns in COLUMNS:
        with Computations(lambda: ((), 0)) as computations:
            by_own_cost(X[:, columns].clone().requires_grad_(), cost[:, columns]).backward()
        ranks.append(computations.computed())
    with Computations(lambda: ((), 0)) as computations:
        in_one(X.clone().requires_grad_(), cost).backward()
    found = tried_of(lines_of(*ranks, single=computations.computed()))
    ways = {c.way for c, at in found if at == "(kept * cost).sum()"}
    assert ways == {"sum"}
    assert [at for c, at in found if c.way == "attach"] == ["x.detach()"]


def test_sums_of_what_all_ranks_have_alike_are_factors():
    own = recorded(part, X[:, :2])
    found = tried_of(lines_of(own, own, own))
    assert not [c for c, _ in found if c.axis]


def test_calls_of_other_shapes_or_more_of_them_cannot_be_summed():
    ranks = [recorded(part, X[:rows, columns]) for rows, columns in
             zip((4, 4, 3), COLUMNS, strict=True)]  # fmt: skip
    assert not [c for c, at in tried_of(lines_of(*ranks)) if c.axis and "keepdim" in at]

    def twice(x):
        return part(x) + part(x * 2)

    ranks = [*parts()[:2], recorded(twice, X[:, COLUMNS[2]])]
    assert not [c for c, at in tried_of(lines_of(*ranks)) if c.axis and "keepdim" in at]


def test_a_sum_is_made_where_every_group_can():
    """The last two ranks do not run the line equally often: they would wait for each other."""

    def twice(x):
        return part(x) + part(x * 2)

    axes = {"tp": [(0, 1), (2, 3)]}
    ranks = [*parts()[:2], recorded(part, X[:, :2]), recorded(twice, X[:, 2:4])]
    lines = lines_of(*ranks)
    lines.states.sets = [group for groups in axes.values() for group in groups]
    assert not [c for c, at in tried_of(lines, axes) if c.axis and "keepdim" in at]
    ranks[3] = recorded(part, X[:, 2:4])
    lines = lines_of(*ranks)
    assert [c for c, at in tried_of(lines, axes) if c.axis and "keepdim" in at]


def test_what_comes_from_a_function_of_the_users_is_none_of_torchs():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.square().sum(-1, keepdim=True)

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(-1, 2)

    def step(x):
        return (x / Own.apply(x).sqrt()).square().sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS)))
    assert not [at for c, at in found if at == "Own.apply(x)" or "keepdim" in at]


@pytest.mark.parametrize(("peak", "way"), [("amax", "largest"), ("amin", "smallest")])
def test_of_a_largest_the_largest_over_ranks_is_tried(peak, way):
    def step(x):
        return (x / getattr(x, peak)(-1, keepdim=True)).square().sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS),
                              single=recorded(step, X)))  # fmt: skip
    assert {c.way for c, at in found if "keepdim" in at and "/" not in at and c.at < 0} == {
        way
    }  # fmt: skip


def test_where_ranks_send_each_other_something_sums_come_last():
    lines = lines_of(*parts())
    usual = [c for c, _ in tried_of(lines)]
    late = [c for c, _ in tried_of(lines, pairs={frozenset((0, 1))})]
    assert {*usual} == {*late}
    assert usual[0].axis == "tp"
    sums = [bool(c.axis) for c in late]
    assert sums == sorted(sums)
    assert [c for c, _ in tried_of(lines, pairs={frozenset((0, 7))})] == usual


def test_a_libraries_lines_are_left_alone(monkeypatch):
    monkeypatch.setattr(changes, "is_librarys", lambda line: True)
    assert tried_of(lines_of(*parts())) == []


def test_no_more_than_so_many(monkeypatch):
    lines = lines_of(*parts())
    every = [c for c, _ in tried_of(lines)]
    monkeypatch.setattr(changes, "MOST_CHANGES", 3)
    assert [c for c, _ in tried_of(lines)] == every[:3]


def normed(x, groups):
    return F.group_norm(x[:, :, None], groups, eps=1e-3)[..., 0].tanh().square().sum()


def test_numbers_times_the_size_of_an_axis_and_what_leaves_the_shape():
    single = recorded(lambda x: normed(x, 6), X)
    ranks = [recorded(lambda x: normed(x, 2), X[:, columns]) for columns in COLUMNS]
    found = tried_of(lines_of(*ranks, single=single))
    norm = "F.group_norm(x[:, :, None], groups, eps=1e-3)"
    assert {(c.at, c.by) for c, at in found if c.way == "number" and at == norm} == {
        (1, 3.0), (1, 1 / 3),
    }  # fmt: skip
    assert norm in [at for c, at in found if c.way == "skip"]


def test_what_all_ranks_add_to_their_parts_is_tried_once():
    ridge = torch.rand(4, 1, generator=G, dtype=torch.float64)

    def step(x):
        return ((x.square().sum(-1, keepdim=True) + ridge).sqrt() * x).sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS)))
    once = [c for c, _ in found if c.way == "once"]
    assert [(c.function, c.at, c.axis, c.by) for c in once] == [("add", 1, "tp", 1 / 3)]


def test_what_no_line_gives_is_summed_where_it_is_taken():
    """As what a derivative gives, or what another rank sent."""

    def step(x):
        with torch._C.DisableTorchFunction():
            slope = x.detach().cos().sum(-1, keepdim=True)
        return (slope.tanh() * x).sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS)))
    assert [(c.way, c.at) for c, at in found if at == "slope.tanh()" and c.at >= 0] == [("sum", 0)]


def test_what_keeps_its_shape_on_some_ranks_alone_is_not_left_out():
    def step(x):
        return (x @ torch.ones(x.shape[1], 2).double()).cos().tanh().square().sum()

    def other(x):
        return step(x)

    ranks = [recorded(step, X[:, :2]), recorded(other, X[:, 2:4])]
    found = [at for c, at in tried_of(lines_of(*ranks), {"tp": [(0, 1)]}) if c.way == "skip"]
    assert not any("@" in at and "cos" not in at for at in found)  # a product

    def joined(x):
        return torch.cat([x, x[:, 2:]], 1).cumsum(1).tanh().square().sum()

    ranks = [recorded(joined, X[:, :columns]) for columns in (2, 4)]
    found = [at for c, at in tried_of(lines_of(*ranks), {"tp": [(0, 1)]}) if c.way == "skip"]
    assert "torch.cat([x, x[:, 2:]], 1).cumsum(1)" in found
    assert "torch.cat([x, x[:, 2:]], 1)" not in found


def test_what_only_adds_up_to_the_loss_is_not_summed():
    """The sum would change no gradient, or all of it by a factor."""
    sites = {at for c, at in tried_of(lines_of(*parts())) if c.axis and c.at < 0}
    assert sites == {"x.square().sum(-1, keepdim=True)", "own.sqrt()",
                     "x / own.sqrt()"}  # fmt: skip


def trial(part, way, right=True, **more):
    c = next(c for c in recorded(part_of, X).computations if c.part == part)
    return Trial(change=Change(site=c.site, function=c.function, way=way, **more), right=right)


def part_of(x):
    return (x / x.square().sum(-1, keepdim=True).sqrt()).square().sum()


def case(*told):
    traces = SimpleNamespace(ranks={0: SimpleNamespace(computed=recorded(part_of, X))})
    return SimpleNamespace(traces=traces, record=SimpleNamespace(trials=told))


SUM, SQUARE = "x.square().sum(-1, keepdim=True)", "x.square()"
CAUSE = Diagnosis(cause="open: a cause", kind="open", because=("b",), standing="open")


def test_what_makes_it_right_leads_and_is_proved():
    other = trial(SQUARE, "sum_both", right=False, axis="tp")
    said = with_what_was_tried(case(other, trial(SUM, "sum_both", axis="tp")), CAUSE)
    assert said.standing == "proved"
    assert said.cause.endswith(
        "in it `x.square().sum(-1, keepdim=True)`: were what it gives summed over the ranks of tp, "
        "and its gradient, too, every gradient of every rank would be right: the step was run so"
    )
    assert said.because == (
        "of 2 such changes that were tried 1 made it right", "a cause", "b",
    )  # fmt: skip


def test_of_several_the_last_that_tells_most_leads():
    told = [trial(SQUARE, "sum", axis="tp"), trial(SUM, "number", at=1, by=0.5),
            trial(SUM, "sum", axis="tp")]  # fmt: skip
    said = with_what_was_tried(case(*told), CAUSE)
    assert f"`{SUM}`: were what it gives summed" in said.cause
    assert f"`{SQUARE}`" in said.because[0]
    assert said.because[0].endswith("in the forward, they would be, too")
    assert said.because[1] == "of 3 such changes that were tried 3 made it right"


@pytest.mark.parametrize(
    ("way", "more", "words"),
    [
        ("largest", {"axis": ""}, "were what it gives the largest over all ranks"),
        ("attach", {}, "were it not detached"),
        ("sum_back", {"at": 0, "axis": "tp"},
         "were the gradient of its argument summed over the ranks of tp"),
        ("detach", {"at": 1}, "were its second argument detached"),
        ("once", {"at": 1, "axis": "tp", "by": 1 / 3},
         "were its second argument, which all ranks add, a part of it on each, so that a sum over "
         "the ranks of tp counts it once"),
        ("skip", {}, "were it left out, and what it takes first handed on"),
        ("number", {"at": 1, "by": 1 / 3}, "were its second argument 1/3 times what it is"),
    ],
)  # fmt: skip
def test_each_way_in_words(way, more, words):
    said = with_what_was_tried(case(trial(SUM, way, **more)), CAUSE)
    assert f": {words}, every gradient" in said.cause.replace("first argument", "argument")


def test_what_is_proved_or_says_by_what_is_left_as_it_is():
    told = case(trial(SUM, "sum", axis="tp"))
    for one in (replace(CAUSE, standing="proved"), replace(CAUSE, kind="counted_again")):
        assert with_what_was_tried(told, one) == one
    assert with_what_was_tried(case(trial(SUM, "sum", right=False)), CAUSE) == CAUSE
    gone = Trial(change=Change(site="gone.py:1:2", function="sum", way="sum"), right=True)
    assert with_what_was_tried(case(gone), CAUSE) == CAUSE
    untraced = SimpleNamespace(traces=None, record=told.record)
    assert with_what_was_tried(untraced, CAUSE) == CAUSE


def verdict(status, *causes):
    return Verdict(status=status, tiers=(), diagnoses=causes, coefficients=(), findings=(),
                   warnings=(), reasons=())  # fmt: skip


@pytest.mark.parametrize(("status", "causes", "tries"), [
    ("fail", (CAUSE,), True),
    ("fail", (), True),
    ("fail", (replace(CAUSE, standing="proved"),), False),
    ("fail", (replace(CAUSE, kind="term_factor"), CAUSE), False),
    ("unknown", (CAUSE,), False),
])  # fmt: skip
def test_where_the_cause_is_known_nothing_is_tried(status, causes, tries):
    assert trials.is_to_be_tried(verdict(status, *causes)) == tries


POOL = SimpleNamespace(name="train", axes=(("tp", 3), ("dp", 1)), ranks=(0, 1, 2))


def record_of(*, pools=(POOL,), device="cpu", numel=4, ranks=3, fault=None):
    grad = torch.ones(numel).double()
    held = SimpleNamespace(grads={("structure", 0): {"w": grad}}, info={("structure", 0): {}},
                           events={("structure", 0): (SEND, SUMMED)})  # fmt: skip
    topology = SimpleNamespace(pools=pools, world_size=3)
    return SimpleNamespace(
        spec=SimpleNamespace(
            topology=topology, device=device, tiers={"structure": "float64"}, fault=fault
        ),
        references={"structure": [SimpleNamespace(grads={"w": grad})] * 2},
        ranks=dict.fromkeys(range(ranks), held),
    )


SEND = {"op": "send", "peer": 2, "group": [0, 1, 2]}
SUMMED = {"op": "allreduce", "group": [0, 1, 2]}
CHANGE = Change(site="f.py:1:2", function="sum", way="sum", axis="tp")


@pytest.fixture
def asked_of(monkeypatch):
    seen = []

    def changes_of(lines, axes, pairs):
        seen.append((lines, axes, pairs))
        return [CHANGE]

    groups = [("tp", [(0, 1, 2)]), ("train", [(0, 1, 2)]), ("0-1", [(0, 1)])]
    monkeypatch.setattr(trials, "changes_of", changes_of)
    monkeypatch.setattr(trials, "known_lines", lambda case: "lines")
    monkeypatch.setattr(trials, "axis_groups", lambda case: groups)
    monkeypatch.setattr(
        trials, "expected",
        lambda *_: SimpleNamespace(threshold=1e-9, value=torch.ones(4).double()),
    )  # fmt: skip
    return seen


def test_what_the_ranks_are_asked(asked_of):
    asked, wanted = trials.changes_to_try(record_of(), "structure", 0, seconds=99.0)
    assert asked.changes == (CHANGE,)
    assert (asked.tier, asked.step, asked.bounds) == ("structure", 0, {"0/w": 1e-9})
    assert asked.seconds == trials.MOST_S
    assert not asked.lift
    assert len({*asked.before.values()}) == 1
    assert sorted(asked.before) == [0, 1, 2]
    assert torch.equal(wanted["0/w"], torch.ones(4).double())
    later = record_of()
    for held in later.ranks.values():
        held.grads["structure", 1] = held.grads["structure", 0]
    assert [*trials.changes_to_try(later, "structure", 1, seconds=1.0)[1]] == ["0/w", "1/w"]
    (lines, axes, pairs) = asked_of[0]
    assert (lines, [*axes]) == ("lines", ["tp", ""])
    assert pairs == {frozenset((0, 2)), frozenset((1, 2)), frozenset((2,))}


def test_casts_that_were_lifted_are_lifted_again(asked_of):
    record = record_of()
    record.ranks[0].info["structure", 0]["lifted"] = {"f.py:3": 2}
    assert trials.changes_to_try(record, "structure", 0, seconds=1.5)[0].lift
    assert trials.changes_to_try(record, "structure", 0, seconds=1.5)[0].seconds == 1.5


@pytest.mark.parametrize(
    "record",
    [
        record_of(pools=(POOL, POOL)),
        record_of(device="cuda"),
        record_of(numel=(1 << 20) + 1),
        record_of(ranks=2),
        record_of(fault="avg_on_ci"),
    ],
)
def test_where_nothing_can_be_tried(asked_of, record):
    assert trials.changes_to_try(record, "structure", 0, seconds=1.0) is None


def test_without_lines_or_changes_nothing_is_tried(asked_of, monkeypatch):
    monkeypatch.setattr(trials, "changes_of", lambda *_: [])
    assert trials.changes_to_try(record_of(), "structure", 0, seconds=1.0) is None
    monkeypatch.setattr(trials, "known_lines", lambda case: None)
    assert trials.changes_to_try(record_of(), "structure", 0, seconds=1.0) is None


def test_only_where_a_place_is_all_that_is_known():
    assert tried.PLACES is trials.PLACES
