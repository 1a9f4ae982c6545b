"""A call with what the ranks have together, in place of each's own part: ranks are threads."""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.record.trial import Change
from sumgrad.subjects.program.tried import changed, changed_collective, whole
from sumgrad.subjects.program.tried.changed import Changed
from sumgrad.subjects.program.tried.changed_collective import ChangedCollective
from sumgrad.subjects.program.watched.computations import Computations
from torch import nn
from torch.nn import functional as F

G = torch.Generator().manual_seed(4)
X = torch.randn(4, 9, 3, generator=G, dtype=torch.float64)
WEIGHTS = torch.randn(4, 9, 3, generator=G, dtype=torch.float64)
SIZES = (2, 4, 3)


class Ranks:
    """What a module may ask of torch.distributed, among threads that are ranks."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, num_ranks):
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self._held = [None] * num_ranks
        self._own = threading.local()

    def _exchanged(self, value):
        self._held[self._own.rank] = value
        self._barrier.wait()
        held = list(self._held)
        self._barrier.wait()
        return held

    def get_rank(self, group):
        return self._own.rank

    def get_world_size(self, group):
        return len(self._held)

    def all_gather_object(self, out, own, group):
        out[:] = self._exchanged(own)

    def all_gather(self, out, own, group):
        for mine, theirs in zip(out, self._exchanged(own.clone()), strict=True):
            mine.copy_(theirs)

    def broadcast(self, tensor, *, group, group_src):
        tensor.copy_(self._exchanged(tensor.clone())[group_src])

    def all_reduce(self, tensor, op, group):
        tensor.copy_(sum(self._exchanged(tensor.clone())))

    def run(self, body):
        """What body(rank) gives on each; raises what it raised on the first that did."""
        out, errors = [None] * len(self._held), []

        def one(rank):
            self._own.rank = rank
            try:
                out[rank] = body(rank)
            except Exception as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(out))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return out


@pytest.fixture
def ranks(monkeypatch):
    found = Ranks(3)
    for module in (whole, changed):
        monkeypatch.setattr(module, "dist", found)
    # Which threads change all at once, and put back in another order.
    monkeypatch.setattr(torch.autograd.Function, "apply", torch.autograd.Function.__dict__["apply"])
    return found


def cut(x, dim=1):
    return x.split(SIZES, dim)


def softly(x):
    return x.softmax(1)


def added_up(x):
    return x.logsumexp(1)


def resized(x):
    return F.interpolate(x.transpose(1, 2), size=x.shape[1], mode="linear").transpose(1, 2)


def standard(x):
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


CONVOLUTIONS = [nn.Conv1d(3, 3, 3, padding=1).double()] * 3
CONVOLUTIONS = [copy.deepcopy(one) for one in CONVOLUTIONS]


def convolved(x, rank=0):
    return CONVOLUTIONS[rank](x.transpose(1, 2)).transpose(1, 2)


def change_of(step, part, way, **more):
    with Computations(lambda: ((), 0)) as computations:
        step(cut(X)[0].clone().requires_grad_())
    c = next(c for c in computations.computed().computations if c.part == part)
    return Change(site=c.site, function=c.function, way=way, **more)


def gradients(step, xs, weights, change=None, ranks=None):
    """Of each rank's part, of what all ranks' results weigh."""

    def own(rank):
        x = xs[rank].clone().requires_grad_()
        with Changed(change, None, {"0": CONVOLUTIONS[rank]}):
            out = step(x, rank) if step is convolved else step(x)
        (out * weights[rank]).sum().backward()
        return x.grad

    return ranks.run(own)


def alone(step, weight):
    x = X.clone().requires_grad_()
    (step(x) * weight).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    ("step", "part", "dim"),
    [
        (softly, "x.softmax(1)", 1),
        (resized, 'F.interpolate(x.transpose(1, 2), size=x.shape[1], mode="linear")', 2),
    ],
)
def test_a_rank_goes_on_with_its_own_part_of_the_result(ranks, step, part, dim):
    change = change_of(step, part, "whole_both", ats=(0,), dim=dim)
    found = gradients(step, cut(X), cut(WEIGHTS), change, ranks)
    assert torch.allclose(torch.cat(found, 1), alone(step, WEIGHTS))


def test_a_modules_call_too_and_a_result_without_that_dimension_is_everybodys(ranks):
    change = Change(site="", function="module 0", way="whole_both", ats=(0,), dim=2)
    found = gradients(convolved, cut(X), cut(WEIGHTS), change, ranks)
    assert torch.allclose(torch.cat(found, 1), alone(convolved, WEIGHTS))
    change = change_of(added_up, "x.logsumexp(1)", "whole_both", ats=(0,), dim=1)
    found = gradients(added_up, cut(X), [WEIGHTS[:, 0]] * 3, change, ranks)
    assert torch.allclose(torch.cat(found, 1), 3 * alone(added_up, WEIGHTS[:, 0]))


def test_a_number_that_is_as_large_as_a_part_and_no_size(ranks):
    """The dimension, where each rank has two columns of it."""

    def of_two(x):
        return x.transpose(1, 2).contiguous().softmax(2)

    change = change_of(of_two, "x.transpose(1, 2).contiguous().softmax(2)", "whole_both",
                       ats=(0,), dim=2)  # fmt: skip
    parts, weights = X[:, :6].split(2, 1), WEIGHTS[:, :6].transpose(1, 2).split(2, 2)
    found = gradients(of_two, parts, weights, change, ranks)
    x = X[:, :6].clone().requires_grad_()
    (of_two(x) * torch.cat(weights, 2)).sum().backward()
    assert torch.allclose(torch.cat(found, 1), x.grad)


def test_what_writes_into_what_it_takes_is_given_no_whole(ranks):
    def written(x):
        y = x * 1
        y.cumsum_(1)
        return y

    change = change_of(written, "y.cumsum_(1)", "whole_both", ats=(0,), dim=1)
    with pytest.raises(ValueError, match="writes into what it takes"):
        gradients(written, cut(X), cut(WEIGHTS), change, ranks)


def test_a_forward_that_a_wrapper_has_set_is_there_again():
    module = nn.Linear(3, 3).double()
    wrapped = torch.no_grad()(module.forward)
    module.forward = wrapped
    for one in (Change(site="", function="module 0", way="detach"),) * 2:
        with Changed(one, None, {"0": module}):
            assert module.forward is not wrapped
        assert module.forward is wrapped
    plain = nn.Linear(3, 3).double()
    with Changed(one, None, {"0": plain}):
        plain(X)
    assert "forward" not in plain.__dict__


def test_with_the_own_gradient_alone(ranks):
    change = change_of(added_up, "x.logsumexp(1)", "whole", ats=(0,), dim=1)
    found = gradients(added_up, cut(X), [WEIGHTS[:, 0]] * 3, change, ranks)
    assert torch.allclose(torch.cat(found, 1), alone(added_up, WEIGHTS[:, 0]))


def test_several_lines_at_once(ranks):
    mean = change_of(standard, "x.mean(1, keepdim=True)", "whole_both", ats=(0,), dim=1)
    std = change_of(standard, "x.std(1, keepdim=True)", "whole_both", ats=(0,), dim=1)
    both = Change(site=mean.site, function="mean", way="whole_both", ats=(0,), dim=1,
                  also=((std.site, "std"),))  # fmt: skip
    found = gradients(standard, cut(X), cut(WEIGHTS), both, ranks)
    assert torch.allclose(torch.cat(found, 1), alone(standard, WEIGHTS))
    found = gradients(standard, cut(X), cut(WEIGHTS), mean, ranks)
    assert not torch.allclose(torch.cat(found, 1), alone(standard, WEIGHTS))


def test_where_no_part_of_the_result_is_a_ranks_own(ranks):
    def valid(x):
        return x.unfold(1, 2, 1)

    change = change_of(valid, "x.unfold(1, 2, 1)", "whole_both", ats=(0,), dim=1)
    with pytest.raises(ValueError, match="no part is as large as"):
        gradients(valid, cut(X), cut(WEIGHTS), change, ranks)


@pytest.mark.parametrize(("way", "wanted"), [("sum", 9), ("largest", 4)])
def test_a_number_of_all_ranks(ranks, way, wanted):
    def by_length(x):
        return x / x.shape[1]

    change = change_of(by_length, "x / x.shape[1]", way, ats=(1,))

    def own(rank):
        with Changed(change, None, {}):
            return by_length(cut(X)[rank])

    assert torch.allclose(torch.cat(ranks.run(own), 1), X / wanted)


def test_what_the_ranks_before_have(ranks):
    sizes = [2, 4, 3]
    found = ranks.run(lambda rank: changed.summed_before(sizes[rank], None))
    assert [(n, type(n)) for n in found] == [(0, int), (2, int), (6, int)]
    found = ranks.run(lambda rank: changed.summed_before(sizes[rank] / 2, None))
    assert found == [0.0, 1.0, 3.0]
    assert {*map(type, found)} == {float}
    assert ranks.run(lambda rank: changed.summed_before(torch.tensor([sizes[rank]]), None))[2] == 6
    with pytest.raises(TypeError):
        changed.summed_before(torch.ones(2), None)


def put(x):
    out = torch.ones(4, 3).double()
    out[1:3] = x[1:3]
    out = out.scatter(1, torch.tensor([[0, 0]]), x[:1, :2])
    out = out.index_put((torch.tensor([3, 3]),), x[:2])
    return out.index_copy(0, torch.tensor([2]), x[3:])


@pytest.mark.parametrize(("part", "function"), [
    ("out[1:3]", "setitem"), ("out.scatter(1, torch.tensor([[0, 0]]), x[:1, :2])", "scatter"),
    ("out.index_put((torch.tensor([3, 3]),), x[:2])", "index_put"),
    ("out.index_copy(0, torch.tensor([2]), x[3:])", "index_copy"),
])  # fmt: skip
def test_what_is_put_somewhere_is_added_there(part, function):
    x = torch.arange(12.0).reshape(4, 3).double()
    with Computations(lambda: ((), 0)) as computations:
        before = put(x)
    sites = {c.site for c in computations.computed().computations if c.function == function}
    assert len(sites) == 1
    with Changed(Change(site=sites.pop(), function=function, way="added"), None, {}):
        out = put(x)
    rows = {"setitem": 1, "scatter": 0, "index_put": 3, "index_copy": 2}
    more = {
        "setitem": torch.ones(3), "scatter": torch.tensor([1.0 + x[0, 0], 0, 0]),
        "index_put": 1 + x[0], "index_copy": x[2],
    }[function]  # fmt: skip
    row = rows[function]
    assert torch.equal(out[row], before[row] + more)
    others = [r for r in range(4) if r != row and (function, r) != ("setitem", 2)]
    assert torch.equal(out[others], before[others])


def test_what_the_first_rank_has(ranks):
    def marked(x):
        return torch.where(x.detach() > 0, x, 0.0)

    change = change_of(marked, "x.detach() > 0", "first")
    own = [part[:, :2].contiguous() for part in cut(X)]
    found = gradients(marked, own, [torch.ones(())] * 3, change, ranks)
    assert all(torch.equal(grad, (own[0] > 0).double()) for grad in found)
    assert not torch.equal((own[0] > 0), (own[1] > 0))


class Group:
    """Three ranks that have the same."""

    def size(self):
        return 3

    def issue(self, *args):
        return args


def asked(site="f.py:3", op="allreduce"):
    tensor = torch.tensor([2.0])
    issued = []

    def issue(*args):
        tensors = (args or ([tensor],))[0]
        for one in tensors:
            one.mul_(3)
        issued.append(args)
        return SimpleNamespace(wait=lambda: True)

    call = SimpleNamespace(op=op, event={"site": site}, args=([tensor], "options"), kwargs={},
                           group=Group(), issue=issue)  # fmt: skip
    return call, tensor, issued


@pytest.mark.parametrize(("way", "wanted"), [("unsummed", 2.0), ("averaged", 2.0)])
def test_a_reduction_otherwise(way, wanted):
    change = ChangedCollective(Change(site="f.py:3", function="allreduce", way=way), None)
    call, tensor, issued = asked()
    assert change(call).wait()
    assert tensor.item() == wanted
    assert len(issued) == 1
    ddps = asked()
    ddps[0].event["by"] = "nn/parallel/distributed.py"
    for other in (asked(site="f.py:4"), asked(op="reduce_scatter"), ddps):
        change(other[0])
        assert other[1].item() == 6.0


def test_a_reduction_over_another_axis(monkeypatch):
    monkeypatch.setattr(changed_collective, "RecordingProcessGroup", Group)
    call, tensor, issued = asked()
    change = Change(site="f.py:3", function="allreduce", way="over", axis="tp")
    found = ChangedCollective(change, Group())(call)
    assert found == ("allreduce", ([tensor], "options"), {}, {"site": "f.py:3"})
    assert issued == []
    both = replace(change, site="f.py:1", also=(("f.py:3", "allreduce"),))
    assert ChangedCollective(both, Group())(call) == found
    ChangedCollective(replace(both, also=()), Group())(call)
    assert len(issued) == 1
