"""Collectives by what the ranks put in and got: real steps with one thing wrong, and its parts."""

from __future__ import annotations

import pytest
import torch
import yaml
from sumgrad.diagnose.modules.over_ranks.collectives import (
    Collective,
    mixed_with,
    segment_of,
    slices,
    untouched,
)
from sumgrad.diagnose.modules.over_ranks.fitted_parts import (
    accounts_for,
    fit_parts,
    is_whole_already,
    solve,
)
from sumgrad.diagnose.modules.over_ranks.goes_on import goes_on, goes_on_in_sum
from sumgrad.diagnose.modules.over_ranks.right_sums import Truth
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.record.exchanged import Exchange, exchanges_as_tensors, exchanges_from

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 3}}}}
STEP = '''
import torch
import torch.distributed as dist
from torch import nn


class Cut(torch.autograd.Function):
    """Into the part that is cut: the backward sums."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Together(torch.autograd.Function):
    """Out of it: the forward sums."""

    @staticmethod
    def forward(ctx, x, summed):
        return summed(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 6), nn.Linear(6, 7)

    def forward(self, x, cut=lambda x: x, summed=lambda x: x):
        hidden = torch.tanh(self.up(cut(self.norm(x))))
        return x + summed(hidden @ self.down.weight.T) + self.down.bias


class Right:
    def build(self):
        torch.manual_seed(3)
        return nn.ModuleDict({"inner": Block(), "head": nn.Linear(7, 5)})

    def batch(self):
        g = torch.Generator().manual_seed(4)
        return {"x": torch.randn(7, 4, 7, generator=g), "y": torch.randn(7, 4, 5, generator=g)}

    def loss_sum(self, model, rows):
        out = model["head"](model["inner"](rows["x"]))
        return (out - rows["y"]).square().sum(), rows["y"].numel()

    def distribute(self, model, ctx):
        size, at = 2, ctx.coords["tp"]
        block = model["inner"]
        cut = slice(size * at, size * at + size)
        block.up.weight = nn.Parameter(block.up.weight[cut].clone())
        block.up.bias = nn.Parameter(block.up.bias[cut].clone())
        block.down.weight = nn.Parameter(block.down.weight[:, cut].clone())
        return model

    def shard_of(self, name, ctx):
        size, at = 2, ctx.coords["tp"]
        cut = slice(size * at, size * at + size)
        if name.startswith("inner.up"):
            return cut
        return (slice(None), cut) if name == "inner.down.weight" else None

    def summed(self, x, ctx):
        total = x.clone()
        dist.all_reduce(total, group=ctx.group("tp"))
        return total

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        tp = ctx.group("tp")
        x = model["inner"](
            mine["x"],
            lambda x: Cut.apply(x, tp),
            lambda x: Together.apply(x, lambda t: self.summed(t, ctx)),
        )
        error = (model["head"](x) - mine["y"]).square().sum()
        (error / batch["y"].numel()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Averaged(Right):
    def summed(self, x, ctx):
        total = x.clone()
        dist.all_reduce(total, dist.ReduceOp.AVG, group=ctx.group("tp"))
        return total


class Twice(Right):
    def summed(self, x, ctx):
        return super().summed(super().summed(x, ctx), ctx)


class Temporary(Right):
    def summed(self, x, ctx):
        dist.all_reduce(x.clone(), group=ctx.group("tp"))
        return x.clone()


class Scaled(Right):
    def summed(self, x, ctx):
        return super().summed(x * (1.5 if ctx.coords["tp"] == 1 else 1), ctx)


class FewRanks(Right):
    def distribute(self, model, ctx):
        for d in range(2):
            for ranks in ([3 * d, 3 * d + 1], [3 * d + 2]):
                group = dist.new_group(ranks)
                if ctx.rank in ranks:
                    self.mine = group
        return super().distribute(model, ctx)

    def summed(self, x, ctx):
        total = x.clone()
        dist.all_reduce(total, group=self.mine)
        return total


class ReducedCopies(Right):
    def step(self, model, batch, ctx):
        own, dist.all_reduce = dist.all_reduce, self.on_a_copy(dist.all_reduce, ctx)
        try:
            super().step(model, batch, ctx)
        finally:
            dist.all_reduce = own

    def on_a_copy(self, reduce, ctx):
        def all_reduce(tensor, *args, group=None, **more):
            copied = group is ctx.group("dp") and tensor.dim() > 1
            return reduce(tensor.clone() if copied else tensor, *args, group=group, **more)

        return all_reduce


class Zeroed(Right):
    def step(self, model, batch, ctx):
        own, dist.all_reduce = dist.all_reduce, self.zeroing(dist.all_reduce, ctx)
        try:
            super().step(model, batch, ctx)
        finally:
            dist.all_reduce = own

    def zeroing(self, reduce, ctx):
        def all_reduce(tensor, *args, group=None, **more):
            if group is ctx.group("dp") and ctx.coords["dp"] == 1 and tensor.shape == (5, 7):
                tensor.zero_()
            return reduce(tensor, *args, group=group, **more)

        return all_reduce
'''


@pytest.fixture(scope="module")
def step_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchanged")
    (folder / "step.py").write_text(STEP)
    (folder / "topology.yaml").write_text(yaml.safe_dump(TOPOLOGY, sort_keys=False))
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("cls", "kind", "words"),
    [
        ("Right", None, ""),
        ("Averaged", "avg", "averages (AVG), where the sum is meant"),
        ("Twice", "double_reduction", "is whole already: it is counted 3 times"),
        ("Temporary", "unused_result", "is not used on rank 0"),
        ("Scaled", "rank_factor", "rank 1 puts 3/2 times what it should into the all-reduce"),
        ("FewRanks", "too_few_ranks", "is over too few ranks: it lacks rank 2"),
        ("ReducedCopies", "unused_result", "is right and is not used: inner.up.weight, inner.down"),
        ("Zeroed", "lost_contribution", "rank 3-5 puts zeros into the all-reduce over dp"),
    ],
)
def test_what_a_collective_does_wrong(cls, kind, words, step_file, tmp_path, sumgrad_launcher):
    options = CheckOptions(
        topology=step_file / "topology.yaml",
        workload=f"{step_file / 'step.py'}:{cls}",
        tiers=("structure",),
        out=tmp_path / "run",
        timeout_s=60,
    )
    verdict, _ = run_check(options, launcher=sumgrad_launcher)
    if kind is None:
        assert verdict.status == "pass", verdict.reasons
        return
    assert verdict.status == "fail"
    first = verdict.diagnoses[0]
    assert first.kind == kind, first
    assert words in first.cause


def numbers(seed: int, size: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64)


GIVEN = {rank: numbers(rank) for rank in range(4)}


def issued(op="allreduce", reduce="SUM", ranks=(0, 1, 2), rank=0, got=None, **given) -> Collective:
    event = {"op": op, "reduce": reduce, "site": "a.py:1", "label": "structure/0/step"}
    held = {r: given.get(f"r{r}", GIVEN[r]) for r in range(4)}
    before = {r: numbers(90 + r) for r in range(4)}
    by_rank = {
        r: Exchange(number=5, given=held[r], before=before[r], got=got if r == rank else None)
        for r in range(4)
    }
    return Collective(rank=rank, event=event, ranks=tuple(ranks), by_rank=by_rank)


def truth(target: torch.Tensor) -> Truth:
    return Truth(module="inner", target=target, columns=slice(0, 5))


def fitted(target, ranks=(0, 1, 2), *, with_before=False, **changed):
    found = fit_parts(issued(**changed), ranks, truth(target), 1e-8, with_before=with_before)
    return None if found is None else (found.all_once, found.factors, found.before)


def test_parts_that_add_up():
    once, factors, before = fitted(sum(GIVEN[r] for r in range(3)))
    assert once
    assert before == {}
    assert factors == pytest.approx({0: 1, 1: 1, 2: 1})


def test_a_part_that_enters_otherwise():
    once, factors, _ = fitted(GIVEN[0] + 2 * GIVEN[1] + GIVEN[2])
    assert not once
    assert factors == pytest.approx({0: 1, 1: 2, 2: 1})


def test_the_step_before_is_found_where_it_is_asked_for():
    target = GIVEN[0] + GIVEN[1] + GIVEN[2] - numbers(91)
    assert fitted(target) is None
    _, factors, before = fitted(target, with_before=True)
    assert factors == pytest.approx({0: 1, 1: 1, 2: 1})
    assert before == pytest.approx({1: -1})


def test_other_numbers_are_no_sum():
    assert fitted(numbers(50)) is None
    assert fitted(numbers(50, 39)) is None  # of another size


def test_ranks_that_put_in_the_same_are_not_told_apart():
    assert fitted(2 * GIVEN[0] + GIVEN[2], r1=GIVEN[0]) is None


def test_few_numbers_are_fitted_with_one_unknown_only():
    parts = torch.stack([numbers(r, 5) for r in range(4)], 1)
    ones = torch.ones(4, dtype=torch.float64)
    assert solve(parts, parts @ ones, 1e-8, 4).tolist() == [1, 1, 1, 1]
    other = torch.tensor([1, 1, 3, 1.0], dtype=torch.float64)
    assert solve(parts, parts @ other, 1e-8, 4).tolist() == pytest.approx(other.tolist())
    assert solve(parts, parts @ torch.tensor([2, 1, 3, 1.0], dtype=torch.float64), 1e-8, 4) is None
    assert solve(torch.zeros(5, 2, dtype=torch.float64), numbers(1, 5), 1e-8, 2) is None


@pytest.mark.parametrize("off", [float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_fitted(off, capfd):
    """As scores behind a mask; the library would print that its arguments are wrong."""
    parts = torch.stack([numbers(r, 50) for r in range(3)], 1)
    parts[7, 1] = off
    assert solve(parts, parts.sum(1), 1e-8, 3) is None
    assert capfd.readouterr() == ("", "")


def test_what_is_whole_already():
    same = dict.fromkeys(("r0", "r1", "r2"), GIVEN[3])
    assert is_whole_already(issued(**same), truth(GIVEN[3]), 1e-8)
    assert not is_whole_already(issued(**same), truth(2 * GIVEN[3]), 1e-8)
    assert not is_whole_already(issued(), truth(GIVEN[0]), 1e-8)


def test_what_a_buffer_has_where_nothing_came():
    assert torch.equal(untouched(issued(got=GIVEN[3])), GIVEN[0])
    scattered = issued(op="reduce_scatter", rank=1, ranks=(0, 1), got=numbers(7, 20))
    assert torch.equal(untouched(scattered), GIVEN[1][20:])
    gathered = untouched(issued(op="allgather", rank=1, got=numbers(7, 120)))
    assert torch.equal(gathered[40:80], GIVEN[1])
    assert not bool(gathered[:40].any() | gathered[80:].any())


@pytest.mark.parametrize(
    ("value", "own", "times"),
    [("own", 40, 1), ("half", 20, 1), ("thrice", 0, 3), ("got", None, 1), ("other", None, 1)],
)
def test_what_goes_on_in_place_of_a_sum(value, own, times):
    got = GIVEN[0] + GIVEN[1] + GIVEN[2]
    held = {
        "own": GIVEN[0],
        "half": torch.cat([got[:20], GIVEN[0][20:]]),
        "thrice": 3 * got,
        "got": got,
        "other": numbers(60),
    }[value]
    told = goes_on_in_sum(issued(got=got), held - got)
    if own is None:
        assert told is None
    else:
        assert (told.own, told.numel, told.times) == (own, 40, pytest.approx(times))


def test_a_tensor_that_is_off_by_the_collective_and_by_nothing_else():
    got, right = GIVEN[0] + GIVEN[1], GIVEN[0] + GIVEN[1] + GIVEN[2]
    one = issued(got=got)
    assert accounts_for(-GIVEN[2], one, right, 1e-8)
    assert not accounts_for(-GIVEN[2] * 2, one, right, 1e-8)
    assert not accounts_for(torch.zeros(40, dtype=torch.float64), one, got, 1e-8)  # not off at all
    assert not accounts_for(None, one, right, 1e-8)


def test_a_gather_with_nothing_of_others():
    got = numbers(7, 120)
    own = torch.zeros(120, dtype=torch.float64)
    own[40:80] = got[40:80]
    gathered = issued(op="allgather", rank=1, got=got, r1=got[40:80].clone())
    told = goes_on(gathered, [("right", got), ("it", own.reshape(4, 30).T)])
    assert (told.where, told.own, told.numel) == ("it", 80, 80)
    own[0] = 5.0  # none of its numbers
    assert goes_on(gathered, [("it", own)]) is None


def test_a_gather_that_has_come_in_part_and_one_that_is_masked():
    got = numbers(7, 120)
    gathered = issued(op="allgather", rank=1, got=got, r1=got[40:80].clone())
    late = got.clone()
    late[90:] = 0
    told = goes_on(gathered, [("it", late)])
    assert (told.own, told.numel) == (30, 80)
    masked = got.clone().reshape(12, 10)
    masked[:, 8:] = 0
    assert goes_on(gathered, [("it", masked)]) is None


def test_segments_and_mixtures():
    buffer = numbers(1, 50)
    assert segment_of(buffer, buffer[13:33].clone(), 1e-9) == 13
    assert segment_of(buffer, buffer[13:33] * 2, 1e-9) is None
    assert segment_of(buffer, torch.zeros(3, dtype=torch.float64), 1e-9) is None

    assert segment_of(buffer, torch.cat([buffer[-5:], buffer[:5]]), 1e-9) is None
    assert mixed_with(buffer, buffer, numbers(2, 50)) == 0
    assert mixed_with(numbers(3, 50), buffer, numbers(2, 50)) == 0


@pytest.mark.parametrize(
    ("shape", "numel", "found"), [((0, 4), 4, 0), ((2, 4), 8, 1), ((2, 4), 4, 2), ((2, 3), 4, 0)]
)
def test_slices_of_a_tensor_that_may_be_what_went_in(shape, numel, found):
    assert len(list(slices(torch.ones(shape), numel))) == found


def test_exchanges_are_read_as_they_were_written():
    written = (
        Exchange(number=3, given=numbers(1), got=numbers(2)),
        Exchange(number=11, given=numbers(3), before=numbers(4)),
    )
    held = exchanges_as_tensors(written)
    assert set(held) == {"given/3", "got/3", "given/11", "before/11"}
    read = exchanges_from({**held, "output/0": numbers(9)})
    assert [one.number for one in read] == [3, 11]
    assert torch.equal(read[0].got, written[0].got)
    assert read[0].before is None
    assert torch.equal(read[1].before, written[1].before)
    assert read[1].got is None
