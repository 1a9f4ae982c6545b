"""What is tried in a failing step, in which order, and what is said of what makes it right."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis, Verdict
from sumgrad.diagnose import trials
from sumgrad.diagnose.explainers.by_modules.in_code.left_undone import HAS_NO_RANK
from sumgrad.diagnose.explainers.by_modules.rows.rows_used import ROWS_ARE_TOLD
from sumgrad.diagnose.explainers.by_modules.tried import _place, with_what_was_tried
from sumgrad.diagnose.explanation import NOT_PROVED
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.trying import changes
from sumgrad.diagnose.modules.trying.changes import changes_of
from sumgrad.diagnose.modules.trying.edits import order
from sumgrad.diagnose.modules.trying.edits.order import feeding_what_is_named, suspicion_of
from sumgrad.record.computed import MODULE
from sumgrad.record.trial import Change, Edit, Trial
from sumgrad.subjects.program.watched.computations import Computations
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
    return [(c, parts[c.site]) for c in changes_of(lines, axes or AXES, pairs, {}, {})]


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
    assert ways == {"sum", "first"}
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


def test_of_each_kind_some_and_then_the_next():
    ways = ["sum_back"] * 6 + ["sum"] * 5 + ["number"] + ["whole"]
    given = [Change(site=str(i), function="f", way=way) for i, way in enumerate(ways)]
    found = [change.way for change in changes._in_turns(given)]
    assert found == [*["sum_back"] * 4, *["sum"] * 4, "number", "whole", *["sum_back"] * 2, "sum"]
    sites = [int(change.site) for change in changes._in_turns(given) if change.way == "sum_back"]
    assert sites == sorted(sites)


def test_lines_that_the_cause_names_come_first():
    """By their numbers, where their file is named, too."""
    lines = lines_of(*parts())
    usual = tried_of(lines)
    last = usual[-1][1]
    (line,) = {c.line for c in lines.computed(0).computations if c.part == last}
    name, _, number = line.rpartition("/")[2].rpartition(":")
    elsewhere = changes_of(lines, AXES, frozenset(), {}, {}, f"other.py:{number} `x`")
    assert elsewhere == [c for c, _ in usual]
    first = changes_of(lines, AXES, frozenset(), {}, {}, f"{name}:7 `y`, :{number} `x`")
    sites = {c.site for c in lines.computed(0).computations if c.line == line}
    assert {*first} == {c for c, _ in usual}
    of_line = [c.site in sites for c in first if c.way != "detach"]  # which come after all else
    assert of_line == sorted(of_line, reverse=True)


def test_what_picks_of_what_it_takes_looks_right_and_may_want_a_whole():
    def step(x):
        return (x.flip(-1) * x.topk(1, dim=1).values).square().sum()

    def hands_on(x):
        return (x.narrow(1, 0, 1) * x).square().sum()

    for body, functions in ((step, {"flip", "topk"}), (hands_on, set())):
        ranks = [recorded(body, X[:, columns]) for columns in COLUMNS]
        found = tried_of(lines_of(*ranks, single=recorded(body, X)))
        wholes = [c for c, _ in found if c.way == "whole_both" and c.dim == 1]
        assert {c.function for c in wholes} == functions


def test_what_a_function_of_the_users_gives_is_summed_and_nothing_inside_of_it():
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
    assert not [at for c, at in found if "keepdim" in at]
    ways = {c.way for c, at in found if at == "Own.apply(x)" and not c.ats}
    assert ways == {"sum", "sum_both"}


@pytest.mark.parametrize(("peak", "way"), [("amax", "largest"), ("amin", "smallest")])
def test_of_a_largest_the_largest_over_ranks_is_tried(peak, way):
    def step(x):
        return (x / getattr(x, peak)(-1, keepdim=True)).square().sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS),
                              single=recorded(step, X)))  # fmt: skip
    assert {c.way for c, at in found if "keepdim" in at and "/" not in at and not c.ats} == {
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
    assert {(c.ats, c.by) for c, at in found if c.way == "number" and at == norm} == {
        ((1,), 3.0), ((1,), 1 / 3),
    }  # fmt: skip
    assert norm in [at for c, at in found if c.way == "skip"]


def test_what_all_ranks_add_to_their_parts_is_tried_once():
    ridge = torch.rand(4, 1, generator=G, dtype=torch.float64)

    def step(x):
        return ((x.square().sum(-1, keepdim=True) + ridge).sqrt() * x).sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS)))
    once = [c for c, _ in found if c.way == "once"]
    assert [(c.function, c.ats, c.axis, c.by) for c in once] == [("add", (1,), "tp", 1 / 3)]


def test_a_bias_that_all_ranks_add_to_their_parts_is_tried_once():
    weight, bias = torch.randn(5, 6, generator=G).double(), torch.randn(5, generator=G).double()

    def step(x, weight):
        return F.linear(x, weight, bias).tanh().square().sum()

    ranks = [recorded(lambda x, at=at: step(x, weight[:, at]), X[:, at]) for at in COLUMNS]
    found = tried_of(lines_of(*ranks, single=recorded(lambda x: step(x, weight), X)))
    once = [c for c, _ in found if c.way == "once"]
    assert [(c.function, c.ats, c.axis, c.by) for c in once] == [("linear", (2,), "tp", 1 / 3)]


def test_of_what_no_gradient_passes_what_the_first_rank_has_is_tried():
    def step(x, rank):
        drawn = torch.tensor([1.0, -1.0 if rank else 1.0], dtype=torch.float64)
        return (x * (x.detach().sum(0) * 0 + drawn)).exp().sum()

    ranks = [recorded(lambda x, r=r: step(x, r), X[:, :2]) for r in range(3)]
    found = tried_of(lines_of(*ranks, single=recorded(lambda x: step(x, 0), X[:, :2])))
    firsts = {(c.function, c.axis) for c, _ in found if c.way == "first"}
    assert firsts == {("add", "tp")}


def test_what_is_put_in_place_of_what_is_there_may_be_added():
    def step(x):
        out = torch.zeros(4, 2).double()
        out[:, :2] = x.detach()
        kept = torch.zeros(4, 2).double().scatter(1, torch.zeros(4, 2).long(), x)
        return (kept * out).sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS)))
    assert sorted(c.function for c, _ in found if c.way == "added") == ["scatter", "setitem"]


def test_a_largest_by_name_is_one_too():
    def step(x):
        top = torch.zeros(4).double().scatter_reduce(0, torch.arange(4), x[:, 0], "amax")
        return (x - top[:, None]).exp().sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS),
                              single=recorded(step, X)))  # fmt: skip
    ways = {c.way for c, _ in found if c.function == "scatter_reduce" and c.axis and not c.ats}
    assert ways == {"largest"}


def test_what_no_line_gives_is_summed_where_it_is_taken():
    """As what a derivative gives, or what another rank sent."""

    def step(x):
        with torch._C.DisableTorchFunction():
            slope = x.detach().cos().sum(-1, keepdim=True)
        return (slope.tanh() * x).sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS)))
    assert [(c.way, c.ats) for c, at in found if at == "slope.tanh()" and c.ats] == [("sum", (0,))]


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
    sites = {at for c, at in tried_of(lines_of(*parts())) if c.axis and not c.ats}
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
CAUSE = Diagnosis(cause=f"open: a cause{NOT_PROVED}", kind="open", because=("b",), standing="open")


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


@pytest.mark.parametrize(("own", "standing"), [
    (trial(SUM, "sum", axis="tp"), "proved"), (trial(SUM, "skip"), "likely"),
    (trial(SUM, "detach", ats=(0,)), "likely"), (trial(SUM, "number", ats=(1,), by=3.0), "proved"),
])  # fmt: skip
def test_what_is_left_out_may_make_good_what_another_line_does(own, standing):
    assert with_what_was_tried(case(own), CAUSE).standing == standing
    square = trial(SQUARE, "sum").change
    several = replace(own.change, also=((square.site, square.function),))
    said = with_what_was_tried(case(replace(own, change=several)), CAUSE)
    assert said.standing == "likely"
    one = trial(SQUARE, "number", ats=(1,), by=2.0)  # one line before several
    said = with_what_was_tried(case(replace(own, change=several), one), CAUSE)
    assert f"in it `{SQUARE}`: were its second argument 2 times" in said.cause


def test_of_several_the_last_that_tells_most_leads():
    told = [trial(SQUARE, "sum", axis="tp"), trial(SUM, "number", ats=(1,), by=0.5),
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
        ("sum_back", {"ats": (0,), "axis": "tp"},
         "were the gradient of its argument summed over the ranks of tp"),
        ("detach", {"ats": (1,)}, "were its second argument detached"),
        ("once", {"ats": (1,), "axis": "tp", "by": 1 / 3},
         "were its second argument, which all ranks add, a part of it on each, so that a sum over "
         "the ranks of tp counts it once"),
        ("first", {"axis": "tp"},
         "were what it gives on each what the first of the ranks of tp has there"),
        ("added", {}, "were it added to what is there, and not put in its place"),
        ("skip", {}, "were it left out, and what it takes first handed on"),
        ("number", {"ats": (1,), "by": 1 / 3}, "were its second argument 1/3 times what it is"),
    ],
)  # fmt: skip
def test_each_way_in_words(way, more, words):
    said = with_what_was_tried(case(trial(SUM, way, **more)), CAUSE)
    assert f": {words}, every gradient" in said.cause.replace("first argument", "argument")


def test_what_is_proved_is_left_as_it_is():
    told = case(trial(SUM, "sum", axis="tp"))
    proved = replace(CAUSE, standing="proved")
    assert with_what_was_tried(told, proved) == proved
    assert with_what_was_tried(case(trial(SUM, "sum", right=False)), CAUSE) == CAUSE
    gone = Trial(change=Change(site="gone.py:1:2", function="sum", way="sum"), right=True)
    assert with_what_was_tried(case(gone), CAUSE) == CAUSE
    untraced = SimpleNamespace(traces=None, record=told.record)
    assert with_what_was_tried(untraced, CAUSE) == CAUSE


@pytest.mark.parametrize(("anew", "how"), [(False, "run"), (True, "distributed and run")])
def test_an_edit_says_where_behind_what_is_proved(anew, how):
    edit = Edit(file="f.py", start=(3, 0), end=(3, 1), old="a", new="b", was="a", becomes="b")
    change = Change(site="f.py:3", function="", way="edit", edit=edit, anew=anew)
    proved = replace(CAUSE, standing="proved", because=("seen",))
    said = with_what_was_tried(case(Trial(change=change, right=True)), proved)
    assert (said.cause, said.kind, said.standing) == (CAUSE.cause, CAUSE.kind, "proved")
    assert said.because[0].endswith(f"would be right: the step was {how} so")
    assert said.because[-1] == "seen"


def verdict(status, *causes):
    return Verdict(status=status, tiers=(), diagnoses=causes, coefficients=(), findings=(),
                   warnings=(), reasons=())  # fmt: skip


@pytest.mark.parametrize(("status", "causes", "tries"), [
    ("fail", (CAUSE,), True),
    ("fail", (), True),
    ("fail", (replace(CAUSE, standing="proved"),), False),
    ("fail", (replace(CAUSE, kind="term_factor"), CAUSE), True),
    ("fail", (replace(CAUSE, standing="proved"), CAUSE), False),
    ("fail", (replace(CAUSE, standing="proved", kind="skipped_collective"),), True),
    ("fail", (replace(CAUSE, standing="proved", kind="factor"),), True),
    ("fail", (replace(CAUSE, standing="proved", kind="run_to_run"),), True),
    ("fail", (replace(CAUSE, standing="proved", kind="rows_read"),), True),
    ("fail", (replace(CAUSE, standing="proved", kind="rows_read",
                      because=("seen", f"{ROWS_ARE_TOLD} a.py:3 `x[i]`")),), False),
    ("unknown", (CAUSE,), False),
])  # fmt: skip
def test_where_the_cause_is_known_nothing_is_tried(status, causes, tries):
    assert trials.is_to_be_tried(verdict(status, *causes)) == tries
    proved = bool(causes) and causes[0].standing == "proved"
    assert trials.are_only_edits(verdict(status, *causes)) == proved


POOL = SimpleNamespace(name="train", axes=(("tp", 3), ("dp", 1)), ranks=(0, 1, 2))


def record_of(*, pools=(POOL,), device="cpu", numel=4, ranks=3, fault=None):
    grad = torch.ones(numel).double()
    held = SimpleNamespace(grads={("structure", 0): {"w": grad}}, info={("structure", 0): {}},
                           events={("structure", 0): (SEND, SUMMED)})  # fmt: skip
    topology = SimpleNamespace(pools=pools, world_size=3)
    single = SimpleNamespace(classes={"0": "Linear"})
    return SimpleNamespace(
        spec=SimpleNamespace(
            topology=topology, device=device, tiers={"structure": "float64"}, fault=fault
        ),
        references={"structure": [SimpleNamespace(grads={"w": grad})] * 2},
        ranks=dict.fromkeys(range(ranks), held),
        traces=SimpleNamespace(tier="structure", step=0, single=single),
    )


SEND = {"op": "send", "peer": 2, "group": [0, 1, 2]}
SUMMED = {"op": "allreduce", "group": [0, 1, 2]}
CHANGE = Change(site="f.py:1:2", function="sum", way="sum", axis="tp")


@pytest.fixture
def asked_of(monkeypatch):
    seen = []

    def changes_of(lines, axes, pairs, kinds, events, said):
        seen.append((lines, axes, pairs, kinds, events, said))
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
    record = record_of()
    asked, values = trials.changes_to_try(record, "structure", 0, seconds=99.0)
    assert asked.changes == (CHANGE,)
    assert (asked.tier, asked.step, asked.bounds) == ("structure", 0, {"0/w": 1e-9})
    assert asked.seconds == trials.MOST_S
    assert not asked.lift
    assert values.before == {r: record.ranks[r].grads["structure", 0] for r in range(3)}
    assert torch.equal(values.wanted["0/w"], torch.ones(4).double())
    later = record_of()
    later.traces.step = 1
    for held in later.ranks.values():
        held.grads["structure", 1] = held.grads["structure", 0]
    aims = trials.changes_to_try(later, "structure", 1, seconds=1.0)[1]
    assert [*aims.wanted] == ["0/w", "1/w"]
    (lines, axes, pairs, kinds, events, said) = asked_of[0]
    assert said == ""
    assert events == dict.fromkeys(range(3), (SEND, SUMMED))
    assert kinds == {"0": "Linear"}
    assert (lines, [*axes]) == ("lines", ["tp", ""])
    assert pairs == {frozenset((0, 2)), frozenset((1, 2)), frozenset((2,))}


@pytest.mark.parametrize(("drawn", "lift"), [(True, True), (False, False)])
def test_numbers_are_drawn_as_they_were(drawn, lift, asked_of):
    """In float64 they would be others without the Lift."""
    record = record_of()
    record.ranks[0].info["structure", 0]["drawn"] = drawn
    assert trials.changes_to_try(record, "structure", 0, seconds=1.5)[0].lift is lift


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


@pytest.mark.parametrize(("way", "more", "leads"), [
    ("sum", {"axis": "tp"}, True), ("number", {"ats": (1,), "by": 0.5}, False), ("skip", {}, False),
])  # fmt: skip
def test_a_cause_that_says_by_what_is_not_led_by_a_factor(way, more, leads):
    says = replace(CAUSE, kind="counted_again", factor="2", standing="likely",
                   cause="b counts twice")  # fmt: skip
    found = with_what_was_tried(case(trial(SUM, way, **more)), says)
    led = "every gradient of every rank would be right" in found.cause
    assert (led, found.standing) == (leads, "proved" if leads else "likely")
    assert leads or "every gradient of every rank would be right" in found.because[0]
    assert leads or found.cause == "b counts twice"
    assert (found.kind, found.factor) == (("forward", None) if leads else ("counted_again", "2"))


@pytest.mark.parametrize(
    ("kind", "sure", "leads"),
    [
        ("loss_at_tokens", False, False),  # it may go round, as other parts of the batch do
        ("row_factors", False, False),
        ("loss_weights", True, True),
        ("forward", False, True),
        ("open", False, True),
        ("counted_again", True, False),
    ],
)
def test_an_edit_that_may_go_round_leads_only_what_says_where(kind, sure, leads):
    edit = Edit(file="f.py", start=(3, 0), end=(3, 1), old="1", new="0", was="x.chunk(2, 1)",
                becomes="x.chunk(2, 0)", sure=sure)  # fmt: skip
    told = Trial(change=Change(site="f.py:3", function="", way="edit", edit=edit), right=True)
    says = replace(CAUSE, kind=kind, standing="likely", cause="rows 1-2 weigh twice")
    found = with_what_was_tried(case(told), says)
    assert ("were it `x.chunk(2, 0)`" in found.cause) is leads
    if not leads:
        assert (found.cause, found.kind, found.standing) == (says.cause, kind, "likely")
        assert "were it `x.chunk(2, 0)`" in found.because[0]


def test_a_count_that_is_another_stays_ahead_of_what_makes_a_factor_good():
    says = replace(
        CAUSE, kind="wrong_count", factor="1/2", cause="it divides by 58", because=("a",)
    )
    for way in ("sum", "number"):
        found = with_what_was_tried(case(trial(SUM, way, axis="tp")), says)
        assert (found.cause, found.kind, found.because[0]) == (
            "it divides by 58",
            "wrong_count",
            "a",
        )
        assert any("every gradient of every rank would be right" in said for said in found.because)


@pytest.mark.parametrize(
    ("kind", "way", "leads"),
    [("avg", "sum", False), ("unused_result", "sum_both", False), ("avg", "largest", True),
     ("double_reduction", "sum", True)],
)  # fmt: skip
def test_a_collective_that_a_sum_makes_good_leads_and_is_proved(kind, way, leads):
    says = replace(CAUSE, kind=kind, cause="the all-reduce is not what it should be")
    found = with_what_was_tried(case(trial(SUM, way, axis="tp")), says)
    assert (found.cause != says.cause, found.standing) == (leads, "proved")
    one, square = trial(SUM, way, axis="tp"), trial(SQUARE, way).change
    several = replace(one, change=replace(one.change, also=((square.site, square.function),)))
    assert with_what_was_tried(case(several), says).standing == "likely"


def own_shares(x):
    """Of each row among its own columns; of the single process among all."""
    return (x.softmax(1) * torch.arange(1.0, 5.0).double()[:, None]).square().sum()


def unevenly():
    return [X[:, columns] for columns in (slice(0, 1), slice(1, 3), slice(3, 6))]


def test_what_looks_at_a_part_is_given_the_whole():
    ranks = [recorded(own_shares, own) for own in unevenly()]
    found = tried_of(lines_of(*ranks, single=recorded(own_shares, X)))
    wholes = [(c.way, c.axis, c.ats, c.dim, at) for c, at in found if c.way.startswith("whole")]
    assert wholes == [("whole_both", "tp", (0,), 1, "x.softmax(1)"),
                      ("whole", "tp", (0,), 1, "x.softmax(1)")]  # fmt: skip
    assert not [at for c, at in found if c.way == "sum" and at == "x.softmax(1)"]  # other shapes


def test_along_which_dimension_the_parts_are():
    """Where they are as large one as the other, along the one that is looked along, or so that the
    single process has such a whole, before the others; not where all ranks have the same."""
    evenly = [recorded(own_shares, X[:, columns]) for columns in COLUMNS]
    found = tried_of(lines_of(*evenly, single=recorded(own_shares, X)))
    dims = [c.dim for c, _ in found if c.way == "whole_both"]
    assert dims == [1, 0]
    late = [(c.way, c.dim) for c, _ in found]
    assert late.index(("whole_both", 1)) <= changes.TURN < late.index(("whole_both", 0))
    same = [recorded(own_shares, X[:, :2])] * 3
    found = tried_of(lines_of(*same, single=recorded(own_shares, X)))
    assert not [c for c, _ in found if c.way.startswith("whole")]


def test_arguments_that_are_cut_alike_are_put_together_alike():
    marks = torch.randn(4, 6, generator=G, dtype=torch.float64)
    table = torch.randn(4, 6, generator=G, dtype=torch.float64)

    def step(x, marks, table):
        near = F.cosine_similarity(x, marks, 1, eps=1e-9)
        return near.square().sum() + F.cosine_similarity(table, table * 2, 1).sum()

    ranks = []
    for columns in (slice(0, 1), slice(1, 3), slice(3, 6)):
        with Computations(lambda: ((), 0)) as computations:
            own = X[:, columns].clone().requires_grad_()
            step(own, marks[:, columns], table).backward()
        ranks.append(computations.computed())
    with Computations(lambda: ((), 0)) as computations:
        step(X.clone().requires_grad_(), marks, table).backward()
    found = tried_of(lines_of(*ranks, single=computations.computed()))
    wholes = {(c.ats, c.dim) for c, at in found if c.way == "whole" and "cosine" in at}
    assert wholes == {((0, 1), 1)}


def test_a_product_and_what_gives_each_number_by_itself_want_no_whole():
    def step(x):
        return (x.exp() @ torch.ones(x.shape[1], 2).double()).tanh().square().sum()

    found = tried_of(lines_of(*(recorded(step, own) for own in unevenly()),
                              single=recorded(step, X)))  # fmt: skip
    assert not [c for c, _ in found if c.way.startswith("whole")]


def standard(x):
    mean, std = x.mean(1, keepdim=True), x.std(1, keepdim=True)
    return ((x - mean) / std).tanh().square().sum()


def test_lines_of_one_function_that_want_a_whole_are_changed_at_once():
    ranks = [recorded(standard, X[:, columns]) for columns in COLUMNS]
    found = tried_of(lines_of(*ranks, single=recorded(standard, X)))
    together = [c for c, _ in found if c.also and c.way == "whole_both" and c.dim == 1]
    assert [sorted([c.function, *(f for _, f in c.also)]) for c in together] == [["mean", "std"]]
    alone = [c for c, _ in found if not c.also and c.way == "whole_both" and c.dim == 1]
    assert {c.function for c in alone} == {"mean", "std"}


def test_modules_of_all_layers_are_changed_at_once():
    """Which a line of theirs calls in turn."""
    layers = torch.nn.ModuleList(torch.nn.Linear(2, 2).double() for _ in range(2))

    def step(x, computations):
        for i, layer in enumerate(layers):
            with torch._C.DisableTorchFunction():
                out = layer(x)
            computations.of_module(f"layers.{i}.gate", (x,), {}, out)
            x = out.tanh()
        return x.square().sum()

    ranks = []
    for columns in COLUMNS:
        with Computations(lambda: ((), 0)) as computations:
            step(X[:, columns].clone().requires_grad_(), computations).backward()
        ranks.append(computations.computed())
    found = [c for c in changes_of(lines_of(*ranks), AXES, frozenset(), {}, {})
             if c.function.startswith("module")]  # fmt: skip
    together = {(c.function, c.also) for c in found if c.way == "sum"}
    names = ("module layers.0.gate", "module layers.1.gate")
    assert {function for function, also in together if not also} == {*names}
    assert {frozenset((function, *(f for _, f in also))) for function, also in together if also} \
        == {frozenset(names)}  # fmt: skip


def test_both_sums_of_a_ratio_are_summed_at_once():
    def step(x):
        return (x.square().sum(1) / x.exp().sum(1)).tanh().sum()

    found = tried_of(lines_of(*(recorded(step, X[:, columns]) for columns in COLUMNS),
                              single=recorded(step, X)))  # fmt: skip
    both = [(c.way, c.ats) for c, _ in found if c.function == "div" and len(c.ats) == 2]
    assert both == [("sum", (0, 1)), ("sum_both", (0, 1))]
    lines = [c for c, _ in found if c.also]
    assert {(c.way, c.function, *(f for _, f in c.also)) for c in lines} == {
        ("sum", "sum", "sum"), ("sum_both", "sum", "sum"),
    }  # fmt: skip


def test_a_number_that_ranks_have_unlike_may_be_that_of_all():
    def step(x):
        return (x.square().sum(1) / x.shape[1]).tanh().sum()

    found = tried_of(lines_of(*(recorded(step, own) for own in unevenly()),
                              single=recorded(step, X)))  # fmt: skip
    numbers = [(c.way, c.axis, c.ats) for c, at in found if c.function == "div" and c.axis]
    assert [n for n in numbers if n[2] == (1,)] == [("sum", "tp", (1,)), ("largest", "tp", (1,))]
    alike = tried_of(
        lines_of(*(recorded(step, X[:, c]) for c in COLUMNS), single=recorded(step, X))
    )
    assert not [c for c, _ in alike if c.function == "div" and c.ats == (1,) and c.axis]


def event(at, ranks, **more):
    return {"op": "allreduce", "site": at, "group": list(ranks), "dtype": "float64", "numel": 6,
            **more}  # fmt: skip


FOUR = {"tp": [(0, 1), (2, 3)], "": [(0, 1, 2, 3)]}


def of_four(**more):
    """What each of four ranks sums up over its pair, and over all."""
    pair = {rank: (0, 1) if rank < 2 else (2, 3) for rank in range(4)}
    return {
        rank: [event("f.py:3", pair[rank], **more), event("f.py:9", (0, 1, 2, 3))] for rank in pair
    }


def test_reductions_come_after_the_first_of_the_lines_and_over_others_last():
    lines = lines_of(*[*parts(), parts()[0]])
    of_lines = changes_of(lines, FOUR, frozenset(), {}, {})
    found = changes_of(lines, FOUR, frozenset(), {}, of_four())
    first = found.index(Change(site="f.py:3", function="allreduce", way="unsummed"))
    assert first == min(len(of_lines), changes.FIRST_OF_LINES)
    assert [(c.site, c.way) for c in found[first : first + 4]] == [
        ("f.py:3", "unsummed"), ("f.py:3", "averaged"),
        ("f.py:9", "unsummed"), ("f.py:9", "averaged"),
    ]  # fmt: skip
    assert [(c.site, c.way, c.axis) for c in found[-2:]] == [
        ("f.py:3", "over", ""), ("f.py:9", "over", "tp"),
    ]  # fmt: skip
    assert [c for c in found if c.function != "allreduce"] == of_lines[: len(found) - 6]


def test_over_others_where_what_they_hold_is_a_match():
    lines, events = lines_of(*[*parts(), parts()[0]]), of_four()
    events[2] = [event("f.py:3", (2, 3), numel=5), *events[2][1:]]
    found = changes_of(lines, FOUR, frozenset(), {}, events)
    assert [(c.site, c.axis) for c in found if c.way == "over"] == [("f.py:9", "tp")]
    events = of_four()
    del events[3][1]
    found = changes_of(lines, FOUR, frozenset(), {}, events)
    assert [(c.site, c.axis) for c in found if c.way == "over"] == [("f.py:3", "")]


def test_all_that_reduce_over_the_same_ranks_are_changed_together_first():
    """As of a norm that is given no group, which takes that of all ranks for its sums."""
    events = of_four()
    for rank, own in events.items():
        events[rank] = [*own, event("f.py:8", (0, 1, 2, 3))]
    found = changes_of(lines_of(*[*parts(), parts()[0]]), FOUR, frozenset(), {}, events)
    over = [c for c in found if c.way == "over"]
    assert [(c.site, c.axis, c.also) for c in over] == [
        ("f.py:9", "tp", (("f.py:8", "allreduce"),)), ("f.py:3", "", ()), ("f.py:9", "tp", ()),
        ("f.py:8", "tp", ()),
    ]  # fmt: skip
    said = with_what_was_tried(case(Trial(change=over[0], right=True)), CAUSE)
    assert said.standing == "proved"
    assert said.cause.startswith("the allreduce at f.py:9 and the allreduce at f.py:8: were they "
                                 "over the ranks of tp, every gradient")  # fmt: skip


@pytest.mark.parametrize("more", [
    {"by": "nn/parallel/distributed.py"}, {"reduce": "MAX"}, {"dtype": "int64"},
    {"op": "all_gather"}, {"group": [0]},
])  # fmt: skip
def test_reductions_that_are_left_as_they_are(more):
    found = changes_of(lines_of(*parts()), AXES, frozenset(), {}, of_four(**more))
    assert not [c for c in found if c.site == "f.py:3"]


@pytest.mark.parametrize(("way", "axis", "words"), [
    ("unsummed", "", "were it left out, and did each rank go on with its own"),
    ("averaged", "", "were it an average, not a sum"),
    ("over", "tp", "were it over the ranks of tp"),
])  # fmt: skip
def test_a_reduction_in_words(way, axis, words):
    told = Trial(change=Change(site="f.py:3", function="allreduce", way=way, axis=axis), right=True)
    said = with_what_was_tried(case(told), CAUSE)
    assert said.cause == f"the allreduce at f.py:3: {words}, every gradient of every rank would " \
        "be right: the step was run so"  # fmt: skip


def test_a_whole_and_several_lines_in_words():
    own = trial(SQUARE, "whole_both", axis="tp", ats=(0,), dim=1)
    said = with_what_was_tried(case(own), CAUSE)
    words = said.cause.replace("first argument", "argument")
    assert f"`{SQUARE}`: were it given not the own part of its argument but what the ranks" in words
    assert "of tp have together, gathered along dimension 1, sizes with it, and the own" in words
    also = trial(SUM, "sum", axis="tp").change
    both = replace(own, change=replace(own.change, also=((also.site, also.function),)))
    said = with_what_was_tried(case(both), CAUSE)
    assert f"`{SUM}`: at each of these, were it given" in said.cause
    assert f"`{SQUARE}`, and " in said.cause
    said = with_what_was_tried(case(both, own), CAUSE)
    assert "at each of these" not in said.cause


def edited(sure=True, right=True):
    piece = Edit(file="f.py", start=(3, 4), end=(3, 5), old="a", new="b", was="x = a",
                 becomes="x = b", sure=sure)  # fmt: skip
    return Trial(change=Change(site="f.py:3", function="", way="edit", edit=piece), right=right)


@pytest.mark.parametrize(("sure", "standing"), [(True, "proved"), (False, "likely")])
def test_an_edit_leads_a_cause_that_only_says_where(sure, standing):
    said = with_what_was_tried(case(edited(sure), edited(right=False)), CAUSE)
    assert said.cause.endswith(
        "f.py:3 `x = a`: were it `x = b`, every gradient of every rank would be right: the step "
        "was run so"
    )
    assert (said.kind, said.standing) == ("code", standing)
    undone = replace(CAUSE, because=(f"f.py:9 `y * 2` {HAS_NO_RANK}", "b"))
    beside = with_what_was_tried(case(edited(sure)), undone).because
    assert any(line.endswith(HAS_NO_RANK) for line in beside) is not sure
    assert beside[-1] == "b"
    left_out = edited()
    piece = replace(left_out.change.edit, new="pass\n")
    left_out = replace(left_out, change=replace(left_out.change, edit=piece))
    assert "f.py:3 `x = a`: were it left out" in with_what_was_tried(case(left_out), CAUSE).cause


def test_an_edit_with_what_the_ranks_before_have_says_of_what():
    one = edited()
    piece = replace(one.change.edit, over="cp", before="len(\n x)",
                    becomes='n = __before__(len(x), "cp")')  # fmt: skip
    one = replace(one, change=replace(one.change, edit=piece))
    assert (
        'were it `n = sum_before(len(x), "cp")`, where sum_before adds up `len( x)` over the ranks '
        "of cp before this one, every" in with_what_was_tried(case(one), CAUSE).cause
    )


def test_an_edit_stands_behind_a_cause_that_says_by_what():
    says = replace(CAUSE, kind="other_parameters", cause="a sum of others", standing="likely")
    said = with_what_was_tried(case(edited()), says)
    assert (said.cause, said.kind, said.standing) == (says.cause, says.kind, says.standing)
    assert "were it `x = b`" in said.because[0]


def test_an_edit_that_may_make_good_another_line_comes_after_a_change():
    said = with_what_was_tried(case(edited(sure=False), trial(SUM, "sum", axis="tp")), CAUSE)
    assert (said.kind, said.standing) == ("forward", "proved")
    said = with_what_was_tried(case(edited(), trial(SUM, "sum", axis="tp")), CAUSE)
    assert said.kind == "code"


def masked(x):
    return x > 0


def weighed(x):
    keep = masked(x)
    return (x * keep).sum() + 0 * x.exp().sum()


def test_functions_that_made_what_a_named_line_takes():
    lines = lines_of(recorded(weighed, X))
    (product,) = [c for c in lines.computed(0).computations if c.part == "x * keep"]
    (made,) = [c for c in lines.computed(0).computations if c.part == "x > 0"]
    file, _, number = product.line.rpartition(":")
    found = feeding_what_is_named(lines, f"it is wrong at {file}:{number} `x`")
    assert found == {made.within}
    assert found.pop().endswith(" masked")
    assert feeding_what_is_named(lines, f"at {file}:{int(number) + 1}") == set()
    assert feeding_what_is_named(lines, f"at other.py:{number}") == set()


def test_lines_are_looked_at_no_longer_than_so(monkeypatch):
    lines = lines_of(*parts())
    usual = suspicion_of(lines)
    wrong = next(c for c in lines.computed(0).computations if c.part == SUM)
    assert usual[wrong.line][0] == min(soon for soon, _ in usual.values())
    monkeypatch.setattr(order, "MOST_LOOKING_S", -1.0)
    assert suspicion_of(lines) == {}
    monkeypatch.setattr(changes, "MOST_LOOKING_S", -1.0)
    assert tried_of(lines) == []


@pytest.mark.parametrize(("name", "words"), [("0.up", "the module 0.up"), ("", "the model itself")])
def test_a_module_that_is_changed_is_called_one(name, words):
    assert _place(SimpleNamespace(function=f"{MODULE}{name}")) == words


AROUND = Edit(file="f.py", start=(3, 0), end=(3, 1), old="f()", new="pass", was="x = f(x)",
              becomes="pass")  # fmt: skip
OWN, SHARED, PLAIN_ONE = "f.py:7 Clean.f.<locals>.own", "f.py:8 shared", "f.py:9 says"


def around(*told, cause=CAUSE):
    """What is said of a cause. told: what edits leave not run."""
    trials = [
        Trial(right=True, avoids=avoids, change=Change(
            site=f"f.py:{3 + at}", function="", way="edit",
            edit=replace(AROUND, start=(3 + at, 0))))
        for at, avoids in enumerate(told)
    ]  # fmt: skip
    held = case(*trials)
    names = SimpleNamespace(computed=SimpleNamespace(names={SHARED: {}}))
    held.traces.single = names
    own = SimpleNamespace(computed=SimpleNamespace(names={OWN: {}, SHARED: {}}, computations=()))
    held.traces.ranks = {0: own}
    return with_what_was_tried(held, cause)


def test_an_edit_with_which_what_the_ranks_run_is_not_run_says_where_to_look():
    says = replace(CAUSE, kind="backward", standing="likely", cause="the backward of own is wrong")
    found = around((OWN, SHARED, PLAIN_ONE), cause=says)
    assert (found.cause, found.standing) == (says.cause, "likely")
    assert found.because[:2] == (
        "f.py:3 `x = f(x)`: were it left out, every gradient of every rank would be right: the "
        "step was run so",
        "own at f.py:7 is not run then, and what is wrong may be in there",
    )
    leads = around(
        (SHARED, PLAIN_ONE), cause=says
    )  # the single process runs it, or it computes nothing
    assert leads.cause.startswith("f.py:3 `x = f(x)`")
    assert not any("not run" in line for line in leads.because)


def test_one_that_goes_round_nothing_comes_first():
    found = around((OWN,), ())
    assert found.cause.startswith("f.py:4 `x = f(x)`: were it left out")
    assert not any("not run" in line for line in found.because)


def test_one_that_goes_round_leads_where_nothing_is_known():
    found = around((OWN,))
    assert found.cause.startswith("f.py:3 `x = f(x)`: were it left out")
    assert found.because[0].startswith("own at f.py:7 is not run then")
