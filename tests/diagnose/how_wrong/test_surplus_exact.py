"""What an output has too often, or lacks; a sum that a residual hides: steps that really ran."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules import looked
from sumgrad.diagnose.explainers.by_modules.backwards import missing_sum
from sumgrad.diagnose.explainers.by_modules.forwards import surplus
from sumgrad.diagnose.modules.how_wrong import counted_once as counted_once_module
from sumgrad.diagnose.modules.how_wrong import surplus as surplus_module
from sumgrad.diagnose.modules.how_wrong.counted_once import counted_once
from sumgrad.diagnose.modules.how_wrong.missing_sum import SUMMED, MissingSum, whole_but_for
from sumgrad.diagnose.modules.how_wrong.missing_sum import missing_sum as find_missing_sum
from sumgrad.diagnose.modules.how_wrong.surplus import Surplus, _times, surplus_back
from sumgrad.diagnose.modules.how_wrong.surplus import surplus as find_surplus
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import look_at, look_into
from sumgrad.record.computed import MODULE, Computation, Computed
from sumgrad.record.exchanged import Exchange
from sumgrad.record.trace import INTO, Traces
from sumgrad.subjects.program.watched.computations import Computations
from sumgrad.subjects.program.watched.watch import ModuleWatch
from torch import nn

G = torch.Generator().manual_seed(4)
X = torch.randn(6, 5, generator=G, dtype=torch.float64)
OWN = slice(0, 6)
GROUPS = [("dp", [(0,), (1,)]), ("tp", [(0, 1)])]


class Block(nn.Module):
    """A residual block of two parts, of which a rank may hold one."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.parts = nn.ParameterList(torch.randn(5, 5) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(5))
        self.residual, self.biases, self.part = 1.0, 1.0, 1.0
        self.own = None
        self.copies = True

    def forward(self, x):
        h = self.norm(x)
        parts = [(h @ w).tanh() for w in self.parts]
        if self.own is not None:  # the others' parts come without a graph, as out of a sum
            others = sum(p.detach() for i, p in enumerate(parts) if i != self.own)
            parts = [parts[self.own], others]
        x = x.detach() if self.copies is None else x
        return self.residual * x + self.part * sum(parts) + self.biases * self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.block, self.head = nn.Linear(5, 5), Block(), nn.Linear(5, 3)
        self.squash = False
        self.double()

    def forward(self, x):
        h = self.first(x)
        return self.head(self.block(h.tanh() if self.squash else h))


def traced(rows, calls, squash=False):
    """calls: of each what is set on the block then."""
    model = Net()
    model.squash = squash
    with ModuleWatch(model) as watch, Computations(watch.now) as computations:
        for number, settings in enumerate(calls):
            for name, value in settings.items():
                setattr(model.block, name, value)
            (model(rows) * (number + 1)).cos().sum().backward()
    trace = watch.trace({"x": X})
    object.__setattr__(trace, "computed", computations.computed())
    return trace


def traces_of(*ranks, squash=False):
    """Each rank: the calls with its rows."""
    calls = max(len(own) for own in ranks)
    single = traced(X, [{}] * calls, squash)
    params = {name: p.detach() for name, p in Net().named_parameters()}
    object.__setattr__(single, "params", params)
    traces = {i: traced(X[OWN], own, squash) for i, own in enumerate(ranks)}
    return Traces(tier="structure", step=0, ranks=traces, single=single)


def found_in(traces, module="block", *, back=False):
    seen = look_at(traces, "float64", ()).seen[module]
    return [s for s in seen if (s.backward if back else s.forward) == "wrong"]


def found_surplus(*ranks):
    traces = traces_of(*ranks)
    into = look_into(traces, "float64", (), "block")
    return find_surplus(traces, found_in(traces), into, 1e-8)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"biases": 2.0}, Surplus(name="block.bias", of="parameter", times=1.0)),
        ({"biases": 0.0}, Surplus(name="block.bias", of="parameter", times=-1.0)),
        ({"residual": 0.0}, Surplus(name=f"{INTO}block", of="module", times=-1.0)),
        ({"residual": 2.5}, Surplus(name=f"{INTO}block", of="module", times=1.5)),
    ],
)
def test_what_is_in_an_output_too_often_is_found_by_what_is_off(settings, wanted):
    one = found_surplus([settings], [settings])
    assert (one.name, one.of) == (wanted.name, wanted.of)
    assert one.times == pytest.approx(wanted.times, abs=1e-9)


@pytest.mark.parametrize(
    "ranks",
    [
        [[{"part": 1.5}]],  # a part of the output alone is no module's
        [[{"biases": 2.0}], [{"biases": 3.0}]],
        [[{"biases": 2.0, "residual": 2.0}]],
        [[{"biases": 2.0}], [{"residual": 2.0}]],
    ],
)
def test_what_no_one_thing_explains_is_not_told(ranks):
    assert found_surplus(*ranks) is None


def test_what_is_hardly_off_or_has_few_numbers_is_no_multiple_of_anything():
    what = torch.arange(1.0, 7.0).double().reshape(2, 3)

    def times(off, what=what):
        return [one.times for one in _times(off, what, 1e-8, "m", "module")]

    assert times(2 * what) == [2.0]
    assert times(1e-7 * what) == []  # ten times what may be off
    assert times(100 * what) == []
    assert times(2 * what + 1e-3 * what.flip(0)) == []
    assert times(torch.ones(2, 3).double(), torch.ones(2, 3).double()) == []


def test_right_outputs_have_no_surplus():
    assert found_surplus([{}], [{}]) is None


def test_a_gradient_that_a_residual_does_not_bring_is_lacking():
    traces = traces_of([{"copies": None}])
    wrong = found_in(traces, "first", back=True)
    one = surplus_back(traces, wrong, 1.0, 1e-8)
    assert one.times == pytest.approx(-1.0, abs=1e-9)
    assert one.name == "block"
    assert surplus_back(traces, wrong, 2.0, 1e-8) is None


def lacking(*ranks):
    traces = traces_of(*ranks)
    wrong = found_in(traces, "first", back=True)
    whole = by_module(traces.single, "first".__eq__)
    return traces, wrong, find_missing_sum(traces, wrong, whole, GROUPS, 1e-8)


def test_a_sum_that_is_missing_beside_a_residual_is_told_with_what_is_whole():
    _, wrong, one = lacking([{"own": 0}], [{"own": 1}])
    assert {s.rank for s in wrong} == {0, 1}
    assert one == MissingSum(axis="tp", ranks=(0, 1), kept="block", of="first")


@pytest.mark.parametrize(
    ("words", "others", "told"),
    [
        ("allreduce(SUM) of 6 float64 over ranks 0-1, at net.py:3", None, True),
        ("allreduce(AVG) of 6 float64 over ranks 0-1, at net.py:3", None, False),
        ("allreduce(SUM) of 6 float64 over ranks 0-1, at net.py:3", 2.0, False),  # not alike
    ],
)
def test_a_sum_that_is_there_beside_one_that_is_missing(words, others, told):
    """What one branch gets is summed over the ranks, what another gets is not."""
    generator = torch.Generator().manual_seed(0)
    whole, *own = torch.randn(3, 2, 3, generator=generator).double()
    ranks = {
        rank: SimpleNamespace(
            calls=(), gradients=(), operations=("barrier", words),
            exchanges=(Exchange(number=1, given=whole, got=whole * (others or 1.0) ** rank),),
        )
        for rank in (0, 1)
    }  # fmt: skip

    def is_right(total):
        return torch.allclose(total, whole + own[0] + own[1])

    terms = [whole + own[0], whole + own[1]]
    found = whole_but_for(SimpleNamespace(ranks=ranks), (0, 1), terms, is_right)
    at = SimpleNamespace(tier="structure", step=0)
    assert found == (f"{SUMMED}{words}" if told else None)
    if told:
        kept = missing_sum.gradient_of_kept(at, found.replace("0-1,", "0-1 [structure/0/step],"))
        assert kept == f"what the {words} gives"
    assert missing_sum.gradient_of_kept(at, "block") == "the gradient of what block gives"


def test_the_ways_on_which_one_gradient_is_summed_are_told():
    def taker(function, line, takes, **more):
        return Computation(function=function, line=line, code=f"{function}(x)", takes=takes,
                           made_at=(), site=line, **more)  # fmt: skip

    computed = Computed(computations=(
        taker(f"{MODULE}norm", "", (0,), gives=(1,)),
        taker("view_as", "/x/net.py:3", (1,), gives=(2,), function_of="Copy"),
        taker("Copy", "/x/net.py:9", (1,), gives=(2,)),
        taker(f"{MODULE}up", "", (2,), gives=(3,)),
        taker(f"{MODULE}gate", "", (1,), gives=(4,)),
        taker("detach", "/x/net.py:10", (1,), gives=(5,)),  # no gradient comes back from it
    ), with_graph=frozenset({1, 2, 3, 4}))  # fmt: skip
    traces = SimpleNamespace(ranks={0: SimpleNamespace(computed=computed)})
    one = MissingSum(axis="tp", ranks=(0, 1), kept=f"{SUMMED}allreduce", of="norm")
    assert [*missing_sum._ways_beside(traces, one)] == [
        "what norm gives is taken by net.py:9 `Copy(x)` and gate: the gradient that comes back "
        "from one of these is summed, that of another is not"
    ]
    assert [*missing_sum._ways_beside(traces, replace(one, kept="block"))] == []


@pytest.mark.parametrize(
    "ranks",
    [
        ([{"own": 0}], [{"own": 0}]),  # one of the parts twice: the other is lost
        ([{"own": 0}],),
        ([{"own": 0, "residual": 2.0}], [{"own": 1, "residual": 2.0}]),
    ],
)
def test_what_is_not_right_as_a_sum_lacks_none(ranks):
    assert lacking(*ranks)[2] is None


def test_sums_of_other_vectors_or_with_factors_by_vector_are_none():
    traces, wrong, one = lacking([{"own": 0}], [{"own": 1}])
    assert one is not None
    whole = by_module(traces.single, "first".__eq__)
    first, second = wrong
    moved = replace(second.where, found=second.where.found.flip(0))
    others = [first, replace(second, where=moved)]
    assert find_missing_sum(traces, others, whole, GROUPS, 1e-8) is None
    scaled = torch.linspace(0.5, 2.0, len(X)).double()[:, None]
    key = ("first", 0)
    odd = {key: replace(whole[key], gradients=scaled * whole[key].gradients)}
    assert find_missing_sum(traces, wrong, odd, GROUPS, 1e-8) is None


def test_a_sum_is_missing_in_what_goes_into_the_block_behind_an_activation(monkeypatch):
    traces = traces_of([{"own": 0}], [{"own": 1}], squash=True)
    case, found = case_of(monkeypatch, traces), found_in(traces, "first", back=True)
    found = FirstWrong(wrong="first", seen=tuple(found), beside=("head",))
    said = missing_sum.lacking_sum(case, looked.looked(case), found)
    assert (
        "summed over rank 0-1 the gradient of what goes into block.norm is right, with"
        in said.cause
    )


def case_of(monkeypatch, traces):
    spec = SimpleNamespace(tiers={"structure": "float64"}, script=None)
    record = SimpleNamespace(spec=spec, once=lambda _, make: make())
    case = SimpleNamespace(record=record, tier="structure", traces=traces,
                           known={}, step=0)  # fmt: skip
    for module in (looked, surplus, missing_sum):
        monkeypatch.setattr(module, "axis_groups", lambda _: GROUPS)
    return case


def test_the_words_say_what_and_how_often_and_where(monkeypatch):
    traces = traces_of([{"biases": 2.0}], [{"biases": 2.0}])
    case, found = (
        case_of(monkeypatch, traces),
        FirstWrong(wrong="block", seen=tuple(found_in(traces))),
    )
    issued = ["allreduce(SUM) of 15 float64 over ranks 0-1, at net.py:9"]
    monkeypatch.setattr(surplus, "issued_between", lambda *_, **__: issued)
    said = surplus.too_much(case, found)
    assert said.cause == "what block gives has block.bias once more than it should"
    assert said.because[0] == (
        "it is there once for each other rank of tp (2 in all), and in between rank 0 issues a sum "
        "over them: as where something whole is added on each before that sum"
    )
    assert said.because[1].startswith("look at tests/diagnose/how_wrong/test_surplus_exact.py:")
    assert "self.biases * self.bias" in said.because[1]
    issued[0] = "all_gather of 15 float64 over ranks 0-1, at net.py:9"
    assert len(surplus.too_much(case, found).because) == 1


def test_the_words_of_what_is_lacking(monkeypatch):
    traces = traces_of([{"residual": 0.0}])
    found = FirstWrong(wrong="block", seen=tuple(found_in(traces)))
    said = surplus.too_much(case_of(monkeypatch, traces), found)
    assert said.cause == f"{INTO}block is lacking in what block gives"
    traces = traces_of([{"copies": None}])
    case, found = case_of(monkeypatch, traces), found_in(traces, "first", back=True)
    found = FirstWrong(wrong="first", seen=tuple(found), beside=("block",))
    told = surplus.too_much_back(case, looked.looked(case), found)
    assert told == ("it lacks what reaches what block gives, as a way beside it (a residual) "
                    "brings it")  # fmt: skip


def test_the_words_of_a_missing_sum_name_the_part_and_the_line(monkeypatch):
    traces, wrong, _ = lacking([{"own": 0}], [{"own": 1}])
    case = case_of(monkeypatch, traces)
    found = FirstWrong(wrong="first", seen=tuple(wrong), beside=("block",))
    said = missing_sum.lacking_sum(case, looked.looked(case), found)
    assert said.cause == (
        "a sum over tp is missing on the way (or, where gradients are summed over it later, the "
        "gradient of what block gives is in on each rank as if it were a share): summed over rank "
        "0-1 it is right, with the gradient of what block gives counted once, which each has whole"
    )
    part, line = said.because
    assert part == ("on the way the gradient that reaches block.norm is a part on each rank, whole "
                    "only when summed over tp")  # fmt: skip
    assert "what block.norm gives is taken at" in line
    assert "(h @ w).tanh()" in line
    # Not where no gradient passes.
    for trace in traces.ranks.values():
        computed = trace.computed
        taken = {n for c in computed.computations for n in c.takes if isinstance(n, int)}
        given = {n for c in computed.computations for n in c.gives}
        object.__setattr__(computed, "with_graph", frozenset(taken - given))
    told = missing_sum.lacking_sum(case, looked.looked(case), found)
    assert told.because[1].startswith("look at what takes what block.norm gives")
    assert line.endswith("a sum of its gradient that is missing belongs before it")


class Strips(nn.Module):
    """A sum over strips, and a term of the whole that belongs in it once."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x, share=1.0):
        term = (share * self.scale * self.scale).sum()
        return (x * self.scale).sin().sum((1, 2)) + term


def strips(*shares, cuts=((0, 2), (2, 3), (3, 6))):
    """Each rank has a strip of each row, and so much of the term."""
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def own(rows, share):
        torch.manual_seed(2)
        model = Strips()
        with ModuleWatch(model) as watch, Computations(watch.now) as computations:
            model(rows, share).cos().sum().backward()
        trace = watch.trace({"x": x})
        object.__setattr__(trace, "computed", computations.computed())
        return trace

    ranks = {i: own(x[:, slice(*cuts[i])], s) for i, s in enumerate(shares)}
    traces = Traces(tier="structure", step=0, ranks=ranks, single=own(x, 1.0))
    groups = [("sp", [tuple(range(len(shares)))])]
    whole = by_module(traces.single, "".__eq__)
    return traces, counted_once(traces, found_in(traces, ""), whole, groups, 1e-8)


def test_a_term_of_the_whole_that_each_part_of_a_sum_has_is_found():
    _, one = strips(1.0, 1.0, 1.0)
    assert (one.axis, one.ranks) == ("sp", (0, 1, 2))
    assert one.line.code.startswith("term = ")


def test_a_term_is_told_where_every_group_of_the_axis_has_it_whole():
    """Two replicas of two strips each."""
    cuts = ((0, 2), (2, 6), (0, 2), (2, 6))
    groups = [("dp", [(0, 2), (1, 3)]), ("sp", [(0, 1), (2, 3)])]
    for shares, is_one in (((1.0,) * 4, True), ((1.0, 1.0, 1.0, 0.7), False)):
        traces, _ = strips(*shares, cuts=cuts)
        whole = by_module(traces.single, "".__eq__)
        one = counted_once(traces, found_in(traces, ""), whole, groups, 1e-8)
        assert (one is not None) is is_one
        assert one is None or (one.axis, one.ranks) == ("sp", (0, 1))
    # One group alone says nothing of a rank that is in none.
    traces, _ = strips(1.0, 1.0, 1.0, cuts=((0, 2), (2, 6), (0, 3)))
    whole = by_module(traces.single, "".__eq__)
    alone = [("sp", [(0, 1), (2,)])]
    assert counted_once(traces, found_in(traces, ""), whole, alone, 1e-8) is None


@pytest.mark.parametrize(
    ("shares", "cuts"),
    [
        ((1.0, 0.5, 1.5), ((0, 2), (2, 3), (3, 6))),  # no rank has what another has
        ((1 / 3, 1 / 3, 1 / 3), ((0, 2), (2, 3), (3, 6))),  # right as a sum
        ((1.0, 1.0, 0.5), ((0, 2), (2, 3), (3, 6))),
        ((1.0, 1.0, 1.0), ((0, 2), (2, 4), (3, 6))),  # a strip that overlaps another
    ],
)
def test_what_is_not_right_with_it_counted_once_is_not_told(shares, cuts):
    assert strips(*shares, cuts=cuts)[1] is None


def test_a_term_that_is_taken_off_before_the_sum_is_meant():
    traces, one = strips(1.0, 1.0, 1.0)
    assert one is not None
    whole, groups = by_module(traces.single, "".__eq__), [("sp", [(0, 1, 2)])]
    found = found_in(traces, "")
    trace = traces.ranks[0]
    term = trace.computed.values[one.line.gives[0]]
    summed = Exchange(number=0, given=trace.outputs[-1] - term)
    object.__setattr__(trace, "exchanges", (summed,))
    assert counted_once(traces, found, whole, groups, 1e-8) is None
    object.__setattr__(trace, "exchanges", (replace(summed, given=summed.given + 1),))
    assert counted_once(traces, found, whole, groups, 1e-8) is not None


def test_of_parameters_with_the_same_values_the_modules_own_is_told():
    traces = traces_of([{"biases": 2.0}])
    params = {"another.bias": traces.single.params["block.bias"], **traces.single.params}
    object.__setattr__(traces.single, "params", params)
    into = look_into(traces, "float64", (), "block")
    assert find_surplus(traces, found_in(traces), into, 1e-8).name == "block.bias"


def test_the_words_of_a_term_of_the_whole(monkeypatch):
    traces, _ = strips(1.0, 1.0, 1.0)
    case = case_of(monkeypatch, traces)
    monkeypatch.setattr(surplus, "axis_groups", lambda _: [("sp", [(0, 1, 2)])])
    said = surplus.whole_on_each(case, FirstWrong(wrong="", seen=tuple(found_in(traces, ""))))
    assert said.startswith("what it gives is a part on each rank, but for what tests/diagnose/")
    assert said.endswith("which each has whole: their sum over sp has that 3 times, and is right "
                         "with it counted once")  # fmt: skip
    traces, _ = strips(1.0, 1.0, 0.5)
    case = case_of(monkeypatch, traces)
    found = FirstWrong(wrong="", seen=tuple(found_in(traces, "")))
    assert surplus.whole_on_each(case, found) == ""


def test_an_output_that_is_all_what_a_line_gives_is_no_part_of_a_sum(monkeypatch):
    """Rows of it that stand elsewhere are vectors of the whole all the same."""
    traces, one = strips(1.0, 1.0, 1.0)
    assert one is not None
    alike = {"is_all": [], "told": counted_once_module._is_all}

    def seen(value, rest):
        alike["is_all"].append(float(rest.abs().max()))
        return True

    monkeypatch.setattr(counted_once_module, "_is_all", seen)
    whole, groups = by_module(traces.single, "".__eq__), [("sp", [(0, 1, 2)])]
    assert counted_once(traces, found_in(traces, ""), whole, groups, 1e-8) is None
    assert min(alike["is_all"]) > 0.1
    x = torch.tensor([1.0, -2.0]).double()
    assert alike["told"](x, x - x)
    assert alike["told"](x, (x * (1 + 1e-15)) - x)
    assert not alike["told"](x, x * 1e-9)


def test_a_vector_that_is_in_every_row_has_any_of_their_numbers():
    """As a class token: what comes out of it is the same."""
    found = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0]]).bool()
    outputs = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [5.0, 6.0]]).double()
    assert surplus_module._are_alike(found, outputs)
    other = outputs.clone()
    other[2, 1] = 2.5
    assert not surplus_module._are_alike(found, other)
    assert not surplus_module._are_alike(found & False, outputs)
    assert surplus_module._are_alike(found[1:2], outputs[:, :0])
    # Where the outputs are others than these, as of a pool, nothing may be there twice.
    assert not surplus_module._are_alike(found, outputs[:2])
    assert surplus_module._are_alike(found[1:2], outputs[:2])
