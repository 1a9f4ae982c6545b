"""An output that goes on beyond an end of the single process's, along one of its dimensions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.forwards import wrong_outputs
from sumgrad.diagnose.modules.values.beyond import Beyond, beyond_the_ends
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Call, Trace, Traces

CALL = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
WHOLE = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
MORE = torch.full((3, 2, 5), 0.25, dtype=torch.float64)


def traces_of(output, single, gradient=None):
    """Of rank 2 and of the single process, of one module."""
    gradients = (torch.ones_like(output) if gradient is None else gradient,)
    trace = Trace(calls=(CALL,), outputs=(output,), gradients=gradients, sources={})
    alone = replace(trace, outputs=(single,), gradients=(single,))
    return Traces(tier="structure", step=0, single=alone, ranks={2: trace})


def told(output, dim, gradient=None):
    """Along dimension `dim` of what is laid out with it in dimension 1."""
    turned = None if gradient is None else gradient.transpose(1, dim)
    traces = traces_of(output.transpose(1, dim), WHOLE.transpose(1, dim), turned)
    shape = tuple(traces.ranks[2].outputs[0].shape)
    seen = Seen(rank=2, call=CALL, shape=shape, forward="wrong")
    return traces, seen, [*beyond_the_ends(traces, [seen], "float64")]


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    ("parts", "before", "places"),
    [
        ([MORE[:, :1], WHOLE[:, :4]], True, 1),
        ([MORE, WHOLE[:2, :3].repeat(2, 1, 1)[:3]], True, 2),  # of any rows
        ([WHOLE[:, 6:], MORE[:, :1]], False, 1),
        ([MORE[:, :1], WHOLE], True, 1),  # all there is, and one more
        ([WHOLE, MORE], False, 2),
    ],
)
def test_what_stands_beyond_an_end(parts, before, places, dim):
    output = torch.cat(parts, dim=1)
    _, _, found = told(output, dim)
    size = output.shape[1]
    assert found == [Beyond(rank=2, call=0, dim=dim, before=before, places=places, size=size)]


@pytest.mark.parametrize(
    "parts",
    [
        [MORE[:, :1], WHOLE[:, 1:5]],  # in the middle: a neighbour's
        [WHOLE[:, 3:6], MORE[:, :1]],
        [WHOLE[:, :4]],
        [MORE[:, :1], WHOLE[:, :4] + 0.5],
        [MORE[:, :1], WHOLE[:, :1]],  # one place tells nothing
    ],
)
def test_what_does_not(parts):
    assert told(torch.cat(parts, dim=1), 2)[2] == []


def test_what_counts_for_nothing_is_none():
    output = torch.cat([MORE[:, :1], WHOLE[:, :4]], dim=1)
    gradient = torch.ones_like(output)
    gradient[:, 0] = 0
    assert told(output, 2, gradient)[2] == []


def test_calls_of_several_sizes_tell_nothing():
    output = torch.cat([MORE[:, :1], WHOLE[:, :4]], dim=1).transpose(1, 2)
    traces = traces_of(output, WHOLE.transpose(1, 2))
    other = WHOLE[:, :6].transpose(1, 2)
    single = replace(traces.single, calls=(CALL, CALL), outputs=(*traces.single.outputs, other))
    seen = Seen(rank=2, call=CALL, shape=tuple(output.shape), forward="wrong")
    assert list(beyond_the_ends(replace(traces, single=single), [seen], "float64")) == []


def test_its_words_name_each_end_of_each_rank_once(monkeypatch):
    traces, seen, _ = told(torch.cat([MORE[:, :1], WHOLE[:, :4]], dim=1), 2)
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _: traces)
    spec = SimpleNamespace(tiers={"structure": "float64"})
    case = SimpleNamespace(tier="structure", record=SimpleNamespace(spec=spec))
    found = FirstWrong(wrong="m", seen=(seen, seen))
    assert wrong_outputs.beyond_in_words(case, found) == [
        "on rank 2 in call 0 places 1-4 of 5 of dimension 2 of its output are those with which the "
        "single process's begins; what stands before them, at 0, is beyond that, and counts in the "
        "loss: look for what should cut it off or make it zero"
    ]


@pytest.mark.parametrize(("filler", "state"), [(0.0, "untold"), (0.25, "wrong")])
def test_zeros_beyond_an_end_are_not_told_and_anything_else_is_wrong(filler, state):
    output = torch.cat([torch.full_like(MORE, filler), WHOLE[:, :4]], dim=1)
    traces, _, _ = told(output, 2)
    (seen,) = look_at(traces, "float64", ()).seen["m"]
    assert seen.forward == state


@pytest.mark.parametrize("width", [2, 4])
def test_a_part_of_each_vector_is_not_known_to_be_the_wanted_one(width, monkeypatch):
    whole = torch.randn(3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    traces = traces_of(whole[:, :width], whole)
    look = look_at(traces, "float64", ())
    assert look.forward("m") == "right"
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _: traces)
    said = wrong_outputs.part_of_each_vector(None, look, ["m"])
    assert said == ([] if width == 4 else [
        "what m gives is a part of each vector, of m elements 0-1 of 4 on rank 2: whether that is "
        "the part which is wanted there is not known"
    ])  # fmt: skip
