"""A layer that is called where the single process calls another one like it."""

from __future__ import annotations

import pytest
import torch
from sumgrad.diagnose.modules.where.in_place_of import in_place_of
from sumgrad.record.trace import INTO, Call, Trace, Traces

G = torch.Generator().manual_seed(2)
ALL = {f"layers.{i}.norm": torch.randn(6, 5, generator=G, dtype=torch.float64) for i in range(4)}
ALL |= {"layers.1.linear": ALL["layers.1.norm"], "norm": ALL["layers.3.norm"]}


def trace(given, classes=None):
    """given: (module, what goes into it), in order."""
    numbers: dict[str, int] = {}
    calls = []
    for name, _ in given:
        number = numbers[name] = numbers.get(name, -1) + 1
        calls.append(Call(module=f"{INTO}{name}", number=number, part=0, operation=0,
                          operation_back=None, recomputed=False))  # fmt: skip
    outputs = tuple(value for _, value in given)
    return Trace(calls=tuple(calls), outputs=outputs, gradients=(None,) * len(calls), sources={},
                 classes=classes or {})  # fmt: skip


def other(*ranks, module="layers.0.norm", classes=None):
    held = classes or {name: name.rpartition(".")[2] for name in ALL}
    traces = {rank: trace(given) for rank, given in enumerate(ranks)}
    whole = Traces(tier="structure", step=0, ranks=traces, single=trace([*ALL.items()], held))
    return in_place_of(whole, module, [*traces], 1e-8)


def handed(name, rows=slice(None), to="layers.0.norm"):
    return to, ALL[name][rows]


def test_what_goes_into_another_layer_in_the_single_process():
    assert other([handed("layers.2.norm", slice(1, 4))]) == "layers.2.norm"
    assert other([handed("layers.2.norm")], [handed("layers.2.norm", [4, 1])]) == "layers.2.norm"


@pytest.mark.parametrize(
    "ranks",
    [
        [[("layers.0.norm", ALL["layers.2.norm"] + 1)]],  # nobody's
        [[handed("layers.2.norm"), handed("layers.1.norm")]],  # one call each
        [[handed("layers.2.norm")], []],  # not called on a rank
        [[handed("layers.3.norm", to="other")]],
    ],
)
def test_nothing_where_it_is_not_all_of_one_others(ranks):
    assert other(*ranks) is None


def test_only_of_one_that_is_like_it():
    names = {name: name.rpartition(".")[2] for name in ALL} | {"layers.2.norm": "another"}
    assert other([handed("layers.2.norm")], classes=names) is None
    assert other([handed("layers.1.norm", to="layers.0.linear")], module="layers.0.linear") is None


def test_nothing_where_two_are_handed_the_same():
    held = {**ALL, "layers.3.norm": ALL["layers.2.norm"]}
    names = {name: name.rpartition(".")[2] for name in held}
    single = trace([*held.items()], names)
    mine = trace([handed("layers.2.norm")])
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    assert in_place_of(traces, "layers.0.norm", [0], 1e-8) is None


def test_what_a_layer_is_handed_in_the_single_process_too_tells_nothing():
    """As the input that all layers of a cross network take."""
    alike = {**ALL, "layers.2.norm": ALL["layers.0.norm"]}
    held = {name: name.rpartition(".")[2] for name in alike}
    ranks = {0: trace([("layers.0.norm", ALL["layers.0.norm"])])}
    whole = Traces(tier="structure", step=0, ranks=ranks, single=trace([*alike.items()], held))
    assert in_place_of(whole, "layers.0.norm", [0], 1e-8) is None
