"""Where a shard lies, in a model whose weights are their own numbers."""

from __future__ import annotations

import pytest
import torch
from sumgrad.subjects.program.placed.numbered import MOST, Numbers
from sumgrad.subjects.program.placed.placement import place
from torch import nn

SHAPES = {"w": (4, 3), "b": (4,), "v": (2,)}


@pytest.fixture
def numbers() -> tuple[Numbers, nn.ParameterDict]:
    params = nn.ParameterDict({n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()})
    out = Numbers(SHAPES)
    out.write(dict(params.items()))
    return out, params


def read(numbers: Numbers, value: torch.Tensor):
    model = nn.ParameterDict({"shown": nn.Parameter(value)})
    found = numbers.read(model).get("shown")
    return found if found is None or found[1] is None else (found[0], found[1].tolist())


def test_every_element_is_told(numbers):
    held, params = numbers
    values = torch.cat([p.detach().reshape(-1) for p in params.values()])
    assert len(values.unique()) == 12 + 4 + 2
    assert read(held, params["b"].data) == ("b", None)
    assert read(held, params["b"].data[1:3]) == ("b", [1, 2])
    assert read(held, params["b"].data.flip(0)) == ("b", [3, 2, 1, 0])
    assert read(held, params["v"].data[1:]) == ("v", [1])
    assert read(held, params["w"].data.T) == ("w", [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]])
    assert read(held, params["w"].data[::3, 1:]) == ("w", [[1, 2], [10, 11]])
    assert read(held, params["w"].data.reshape(-1)[:12]) == ("w", list(range(12)))


def test_what_is_no_copy_of_elements_is_not_told(numbers):
    held, params = numbers
    b = params["b"].data
    for value in (
        torch.zeros(3).double(),  # made anew
        b[:2] * 1.5,
        b[:2] + 0.5,
        b + 100,  # numbers that nobody has
        b[[0, 0]],  # one element twice
        torch.cat([b, params["v"].data]),  # two parameters in one
        b.float(),  # fewer digits than numbers may have
        b[:0],
    ):
        assert read(held, value) is None, value


def test_a_number_is_believed_only_where_the_weights_agree():
    full = {"w": torch.arange(12.0).view(4, 3), "b": torch.zeros(4)}
    index = torch.tensor([1, 3])

    def found(value, told):
        model = nn.ParameterDict({"own": nn.Parameter(value)})
        return place(model, {}, full, numbered={"own": told})

    (one,) = found(torch.zeros(2), ("b", index)).placed
    assert (one.name, one.index.tolist()) == ("b", [1, 3])
    assert found(torch.ones(2), ("b", index)).placed == ()
    assert found(torch.zeros(3), ("b", index)).placed == ()
    assert found(torch.zeros(2), ("b", None)).placed == ()
    (whole,) = found(torch.zeros(4), ("b", None)).placed
    assert whole.index is None


def test_there_are_no_more_numbers_than_float64_tells_apart():
    assert float(MOST) + 1 == float(MOST)
    assert float(MOST - 1) + 1 == float(MOST)
    assert float(MOST - 1) != float(MOST)
