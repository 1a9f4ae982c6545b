"""A script's buffers: which changed between two forwards, here or in the single run; and the
reference that is made of them."""

from __future__ import annotations

import pytest
import torch
from sumgrad.launch.script.watched.buffers import MOST, Buffers
from sumgrad.launch.script.watched.kept import Kept
from sumgrad.launch.script.watched.weights import Begun, Weights
from sumgrad.record.ranks import BUFFER_NAMED
from sumgrad.subjects.script.asked import START, Asked
from sumgrad.subjects.script.models import Held, Models
from sumgrad.subjects.script.reference import _buffers
from torch import nn


def asked(directory, start=None):
    return Asked(directory=str(directory), steps=3, tier="structure", lift=True, start=start,
                 jitter=0, seconds=1.0)  # fmt: skip


@pytest.fixture
def single(tmp_path):
    return Buffers(asked(tmp_path), tmp_path)


def other(single_directory, tmp_path):
    return Buffers(asked(tmp_path, str(single_directory)), tmp_path)


def test_only_what_a_step_changed_is_left(single):
    a, b = torch.zeros(3), torch.ones(2)
    single.begin({"a": a, "b": b})
    assert single.after({"a": a, "b": b}, 0) == ({}, [])
    a[1] = 5.0
    left, changed = single.after({"a": a, "b": b}, 1)
    assert changed == ["a"]
    assert left["a"].tolist() == [0.0, 5.0, 0.0]
    a[1] = 7.0
    assert left["a"].tolist() == [0.0, 5.0, 0.0]  # a copy
    assert single.after({"a": a, "b": b}, 2)[1] == ["a"]


def test_the_sign_of_zero_and_another_tensor_are_changes(single):
    single.begin({"a": torch.zeros(2)})
    assert single.after({"a": -torch.zeros(2)}, 0)[1] == ["a"]
    assert single.after({"a": torch.zeros(3)}, 1)[1] == ["a"]
    assert single.after({"a": torch.zeros(3), "new": torch.ones(1)}, 2)[1] == ["new"]


def test_what_the_single_run_changed_is_left_too(single, tmp_path):
    a = torch.zeros(2)
    single.begin({"a": a})
    single.after({"a": a + 1}, 0)
    mine = other(tmp_path, tmp_path)
    mine.begin({"a": a})
    left, changed = mine.after({"a": a}, 0)
    assert changed == []
    assert left["a"].tolist() == [0.0, 0.0]


def test_a_large_one_is_not_looked_at(single):
    exact, large = torch.zeros(MOST), torch.zeros(MOST + 1)
    single.begin({"exact": exact, "large": large})
    left, changed = single.after({"exact": exact + 1, "large": large + 1}, 0)
    assert changed == list(left) == ["exact"]


def test_the_reference_has_every_buffer_as_each_step_leaves_it(single, tmp_path):
    kept = Kept(asked(tmp_path), tmp_path)
    kept.keep(
        f"{START}_0_buffers",
        {f"{BUFFER_NAMED}a": torch.zeros(1), f"{BUFFER_NAMED}b": torch.ones(1)},
    )
    kept.keep(f"{START}_0", {"weight": torch.ones(1)})
    single.begin({"a": torch.zeros(1), "b": torch.ones(1)})
    single.after({"a": torch.zeros(1), "b": torch.ones(1)}, 0)
    single.after({"a": torch.full((1,), 3.0), "b": torch.ones(1)}, 1)
    found = [({n: t.item() for n, t in now.items()}, names)
             for now, names in _buffers(tmp_path, range(3))]  # fmt: skip
    assert found == [({"a": 0.0, "b": 1.0}, ()), ({"a": 3.0, "b": 1.0}, ("a",)),
                     ({"a": 3.0, "b": 1.0}, ())]  # fmt: skip


def test_a_buffer_that_is_put_in_place_of_another_is_seen():
    model = nn.BatchNorm1d(2)
    models = Models()
    models.meet(model, lambda: None)
    model.running_mean = torch.full((2,), 4.0)
    assert models.buffers["running_mean"].tolist() == [4.0, 4.0]
    assert set(models.buffers) == {"running_mean", "running_var", "num_batches_tracked"}


def of_ranks(tmp_path, single, own, *, trained=True):
    """A weight and a buffer of the single run's, and what a rank with others has, and tells."""
    told = []
    for start, value in ((None, single), (str(tmp_path), own)):
        weights = Weights(asked(tmp_path, start), tmp_path)
        param = nn.Parameter(torch.tensor([value["weight"]]))
        frozen = nn.Parameter(torch.tensor([value["frozen"]]), requires_grad=False)
        buffer = torch.tensor([value["buffer"]])
        held = [held_as(param, "w"), held_as(frozen, "f")] if trained else [held_as(frozen, "f")]
        begun = weights.begin(held, {"b": buffer}, 0)
        told = [begun, param.item(), frozen.item(), buffer.item()]
    return told


def held_as(param, name):
    return Held(name=name, param=param, index=None, shape=tuple(param.shape))


SINGLE = {"weight": 1.0, "frozen": 2.0, "buffer": 3.0}


def test_what_is_not_trained_is_left_where_the_weights_are_the_single_runs(tmp_path):
    begun, *values = of_ranks(tmp_path, SINGLE, {**SINGLE, "frozen": 5.0, "buffer": 7.0})
    assert values == [1.0, 5.0, 7.0]
    assert begun == Begun(left=("buffer:b", "f"))
    begun, *values = of_ranks(tmp_path, SINGLE, SINGLE)
    assert begun == Begun()
    nearly = {**SINGLE, "frozen": 2.000001, "buffer": 3.0000005}  # as of a sum in another order
    begun, *values = of_ranks(tmp_path, SINGLE, nearly)
    assert begun == Begun()
    assert values == [1.0, 2.0, 3.0]
    begun, *values = of_ranks(tmp_path, SINGLE, {**SINGLE, "buffer": 3.0001})
    assert begun == Begun(left=("buffer:b",))
    begun, *values = of_ranks(tmp_path, {**SINGLE, "buffer": 3}, {**SINGLE, "buffer": 4})
    assert begun == Begun(left=("buffer:b",))
    begun, *values = of_ranks(tmp_path, SINGLE, {**SINGLE, "buffer": 7.0}, trained=False)
    assert values == [1.0, 2.0, 7.0]
    assert begun == Begun(left=("buffer:b",))


def test_what_is_not_trained_is_made_equal_where_the_weights_were_drawn_otherwise(tmp_path):
    begun, *values = of_ranks(tmp_path, SINGLE, {"weight": 4.0, "frozen": 5.0, "buffer": 7.0})
    assert values == [1.0, 2.0, 3.0]
    assert begun == Begun(trained=("w",), made_equal=("buffer:b", "f"), drawn=True)
    begun, *values = of_ranks(tmp_path, SINGLE, {**SINGLE, "weight": 4.0})
    assert begun == Begun(trained=("w",), drawn=True)
    # A whole number is not drawn; and a rounding of a weight is no other draw.
    begun, *values = of_ranks(
        tmp_path, {**SINGLE, "buffer": 3}, {**SINGLE, "weight": 4.0, "buffer": 7}
    )
    assert values == [1.0, 2.0, 7]
    assert begun == Begun(trained=("w",), left=("buffer:b",), drawn=True)
    begun, *values = of_ranks(tmp_path, SINGLE, {**SINGLE, "weight": 1.0000002, "buffer": 7.0})
    assert begun == Begun(trained=("w",), left=("buffer:b",))
    assert values == [1.0, 2.0, 7.0]


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(("own", "single", "is_left"), [
    ([0.0, -torch.inf], [0.0, -torch.inf], False),
    ([0.0, 0.0], [0.0, -torch.inf], True),  # a mask that is forgotten, or turned
    ([-torch.inf, 0.0], [0.0, -torch.inf], True),
    ([torch.inf, 0.0], [-torch.inf, 0.0], True),
    ([0.5, LEAST], [0.25, LEAST], True),  # hidden by nothing that is larger
    ([0.5, -1e9], [0.25, -1e9], True),
    ([0.5, -1e9], [0.5000001, -1e9], False),
    ([torch.nan, 1.0], [torch.nan, 1.0], False), ([torch.nan, 1.0], [0.0, 1.0], True),
    ([0.0, 1.0], [torch.nan, 1.0], True), ([torch.nan, 1.5], [torch.nan, 1.0], True),
    ([1.0, 1e-30], [1.0, 0.0], False), ([1.0, 1e-3], [1.0, 0.0], True),
    ([1 + 2j, 0], [1 + 2j, 0], False), ([1 + 2j, 0], [1 - 2j, 0], True),
    ([True, False], [True, True], True), ([3, 4], [3, 4], False), ([], [], False),
])  # fmt: skip
def test_each_number_of_a_buffer_counts(tmp_path, own, single, is_left):
    for start, value in ((None, single), (str(tmp_path), own)):
        begun = Weights(asked(tmp_path, start), tmp_path).begin([], {"b": torch.tensor(value)}, 0)
    assert begun.left == (("buffer:b",) if is_left else ())


def test_few_digits_hide_no_half_of_a_buffer(tmp_path):
    for start, value in ((None, 1.0), (str(tmp_path), 1.4)):
        held = torch.full((3,), value, dtype=torch.bfloat16)
        begun = Weights(asked(tmp_path, start), tmp_path).begin([], {"b": held}, 0)
    assert begun.left == ("buffer:b",)


def test_a_stages_buffers_have_the_names_of_the_whole_model():
    whole = nn.ModuleDict({"layers": nn.ModuleList([Gained(i) for i in range(4)])})
    stage = nn.ModuleDict({"layers": nn.ModuleList([Gained(i) for i in (2, 3)])})
    models = Models()
    models.meet(stage, lambda: {n: p.detach() for n, p in whole.named_parameters()})
    assert [h.name for h in models.held.values()] == ["layers.2.w", "layers.3.w"]
    assert {name: b.item() for name, b in models.buffers.items()} == {
        "layers.2.gain": 2.0, "layers.3.gain": 3.0
    }  # fmt: skip


class Gained(nn.Module):
    def __init__(self, number):
        super().__init__()
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(number))
        self.w = nn.Parameter(drawn)
        self.register_buffer("gain", torch.tensor(float(number)))


def test_each_buffer_is_looked_at_once_as_it_was_when_its_model_was_met(tmp_path):
    def run(start, directory):
        weights = Weights(asked(directory, start), directory)
        first, second = torch.zeros(2), torch.full((2,), float(start is None))
        begun = [weights.begin([], {"first": first}, 0)]
        first += 5  # running statistics of its forward
        begun.append(weights.begin([], {"first": first, "second": second}, 1))
        return begun

    single, ranks = tmp_path / "single", tmp_path / "ranks"
    single.mkdir()
    ranks.mkdir()
    assert run(None, single) == [Begun(), Begun()]
    assert run(str(single), ranks) == [Begun(), Begun(left=("buffer:second",))]


def test_few_digits_hide_no_change_of_a_weight_between_steps(tmp_path):
    moved = []
    for start, by in ((None, 0.0), (str(tmp_path), 0.1)):
        weights = Weights(asked(tmp_path, start), tmp_path)
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        held = {"w": held_as(param, "w")}
        weights.begin([*held.values()], {}, 0)
        with torch.no_grad():
            param += by
        moved.append(weights.moved(held, 0))
    assert moved == [[], ["w"]]
