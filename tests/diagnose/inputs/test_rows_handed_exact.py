"""What is handed otherwise for just the rows that come out wrong; vectors off by one factor."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.forwards import wrong_outputs
from sumgrad.diagnose.explainers.by_modules.rows import handed
from sumgrad.diagnose.modules.inputs.rows_handed import handed_for_wrong_rows, wrong_and_right_rows
from sumgrad.diagnose.modules.values.scaled import _factors, one_factor
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Call, Trace, Traces

ROWS, PLACES, WIDTH = 4, 3, 5
G = torch.Generator().manual_seed(3)
X = torch.randn(ROWS, PLACES, WIDTH, generator=G, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]])
MADE = ("/x/step.py:9", "mask = mask.repeat(1, 3)")


def trace(*calls, masks, made=MADE, batch=None):
    """calls: of each the outputs of `near` and of `m`; masks: what `m` is handed in each."""
    kept, outputs = [], []
    for number, pair in enumerate(calls):
        for module, output in zip(("near", "m"), pair, strict=True):
            kept.append(Call(module=module, number=number, part=0, operation=0, operation_back=0,
                             recomputed=False))  # fmt: skip
            outputs.append(output)
    return Trace(
        calls=tuple(kept), outputs=tuple(outputs), gradients=(None,) * len(kept),
        sources={}, data=tuple(masks), entered=("m",) * len(masks), batch=batch,
        entered_as=tuple((i, "mask") for i in range(len(masks))),
        entered_at=(made,) * len(masks),
    )  # fmt: skip


SINGLE = trace((X, X.sin()), masks=[MASK], batch={"x": X})


def found_in(*ranks):
    traces = Traces(tier="structure", step=0, ranks=dict(enumerate(ranks)), single=SINGLE)
    look = look_at(traces, "float64", ())
    wrong = tuple(s for s in look.seen["m"] if s.forward == "wrong")
    return traces, look, FirstWrong(wrong="m", seen=wrong, beside=("near",))


def one(rows, *, spoil=(), mask=()):
    """A call of these rows; of `m` those of `spoil` are wrong, of the mask those of `mask`."""
    out, held = X[rows].sin(), MASK[rows].clone()
    for i in spoil:
        out[i, 1] += 0.5
    for i in mask:
        held[i] = 1 - held[i]
    return (X[rows], out), held


def rank(*calls):
    return trace(*(pair for pair, _ in calls), masks=[held for _, held in calls])


def told(*ranks):
    traces, look, found = found_in(*ranks)
    return handed_for_wrong_rows(traces, look, found, ["m"])


def test_rows_with_another_mask_that_come_out_wrong():
    mine = rank(one([0, 1], spoil=[1], mask=[1]), one([2]))
    traces, look, found = found_in(mine, rank(one([3])))
    assert wrong_and_right_rows(look, found) == ({(0, 0, 1)}, {(0, 0, 0), (0, 1, 0), (1, 0, 0)})
    held = handed_for_wrong_rows(traces, look, found, ["m"])
    assert (held.module, held.name, held.places, held.made) == ("m", "mask", ((0, 0, 1),), MADE)
    case = SimpleNamespace(traces=traces)
    assert handed.handed_for_wrong_rows_in_words(case, look, found) == [
        "what m is handed as mask, made at step.py:9 `mask = mask.repeat(1, 3)`, is another than "
        "in the single process for rows that come out wrong, and for none that comes out right: "
        "row 1 on rank 0 in call 0"
    ]


def test_more_rows_are_counted():
    mine = rank(one([0, 1], spoil=[0, 1], mask=[0, 1]), one([2]))
    traces, look, found = found_in(mine)
    (text,) = handed.handed_for_wrong_rows_in_words(SimpleNamespace(traces=traces), look, found)
    assert text.endswith("row 0 on rank 0 in call 0, and so in 1 more")


@pytest.mark.parametrize(
    "ranks",
    [
        [rank(one([0, 1], spoil=[1]), one([2]))],  # all masks are right
        [rank(one([0, 1], spoil=[1], mask=[1]), one([2], mask=[0]))],  # one is not, and is right
        [rank(one([0, 1], spoil=[0, 1], mask=[0, 1]))],  # nothing right to tell it from
    ],
)
def test_only_what_goes_with_the_wrong_rows_is_told(ranks):
    assert told(*ranks) is None


def test_a_wrong_row_may_have_another_cause_beside():
    assert told(rank(one([0, 1], spoil=[0, 1], mask=[1]), one([2]))).places == ((0, 0, 1),)


def test_several_tensors_under_one_name_are_not_told_apart():
    """As of a dictionary: which of them it was, is not known."""
    mine = rank(one([0, 1], spoil=[1], mask=[1]), one([2]))
    twice = replace(
        mine, data=mine.data * 2, entered=mine.entered * 2, entered_as=mine.entered_as * 2,
        entered_at=mine.entered_at * 2,
    )  # fmt: skip
    assert told(mine) is not None
    assert told(twice) is None


def test_a_stretch_of_the_mask_is_the_same():
    (pair, held) = one([0, 1], spoil=[1])
    short = trace(pair, one([2])[0], masks=[held[:, 1:], MASK[2:3, :2]])
    assert told(short) is None


def scaled(*factors):
    out = X[:2].sin().reshape(-1, WIDTH).clone()
    for i, c in factors:
        out[i] *= c
    mine = trace((X[:2], out.reshape(2, PLACES, WIDTH)), masks=[])
    traces, _, found = found_in(mine)
    return one_factor(traces, found.seen, 1e-9), traces, found


@pytest.mark.parametrize(
    ("factors", "expected"),
    [([(1, 3.0), (4, 3.0)], 3.0), ([(1, 3.0), (4, 2.0)], None), ([(2, -0.5)], -0.5)],
)
def test_vectors_that_are_off_by_one_factor(factors, expected):
    found, _, _ = scaled(*factors)
    assert found is None if expected is None else found == pytest.approx(expected, rel=1e-12)


def test_of_two_numbers_or_of_two_rows_no_factor_is_told():
    traces, _, found = found_in(trace((X[:2], X[:2].sin() * 2), masks=[]))
    assert one_factor(traces, found.seen, 1e-9) == pytest.approx(2)
    mixed = tuple(replace(s, mixed=("of two",)) for s in found.seen)
    assert one_factor(traces, mixed, 1e-9) is None
    assert _factors(torch.ones(1, 2).double(), torch.ones(3, 2).double() * 2, 1e-9) is None
    assert _factors(torch.ones(1, 3).double(), torch.ones(3, 3).double() * 2, 1e-9) is not None


def test_only_calls_that_go_together_are_told_of():
    mine = rank(one([0, 1], spoil=[1], mask=[1]), one([2]))
    more = replace(mine.calls[0], module="outer")
    odd = replace(
        mine, calls=(*mine.calls, more), outputs=(*mine.outputs, X[:2]),
        gradients=(*mine.gradients, None), entered=("outer",) * 2,
    )  # fmt: skip
    traces, look, found = found_in(odd)
    traces = replace(traces, single=replace(traces.single, entered=("outer",)))
    assert handed_for_wrong_rows(traces, look, found, ["outer"]) is None


def test_a_wrong_row_of_which_nothing_is_known_is_not_passed_over():
    mine = rank(one([0, 1], spoil=[0, 1], mask=[0, 1]), one([2]))
    assert told(mine) is not None
    short = replace(mine, data=(mine.data[0][:1], mine.data[1]))
    assert told(short) is None


def test_what_is_off_by_more_than_a_factor_has_none():
    out = X[:2].sin()
    out[0, 1, 2] += 0.5
    traces, _, found = found_in(trace((X[:2], out), masks=[]))
    assert one_factor(traces, found.seen, 1e-9) is None


@pytest.mark.parametrize(
    ("factor", "shown"),
    [(6**0.5, "2.44949 (the square root of 6)"), (0.5, "1/2"), (1.2345678901, "1.23457")],
)
def test_the_factor_in_words(factor, shown, monkeypatch):
    _, traces, found = scaled((1, factor))
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _: traces)
    monkeypatch.setattr(wrong_outputs, "entered_wrong", lambda *_: ())
    tiers = {"structure": "float64"}
    spec = SimpleNamespace(tiers=tiers)
    case = SimpleNamespace(record=SimpleNamespace(spec=spec), tier="structure")
    assert wrong_outputs.scaled_in_words(case, found) == [
        f"each such vector of its output is {shown} times one that is there in the single process: "
        f"look for a factor that is missing, or one more"
    ]
    tiers["structure"] = "bfloat16"
    assert wrong_outputs.scaled_in_words(case, found) == []


def test_what_stands_elsewhere_as_it_is_has_no_factor(monkeypatch):
    case = SimpleNamespace(
        record=SimpleNamespace(spec=SimpleNamespace(tiers={"s": "float64"})), tier="s"
    )
    found = FirstWrong(wrong="m", seen=(SimpleNamespace(call=SimpleNamespace(module="m")),))
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _: "traces")
    monkeypatch.setattr(wrong_outputs, "entered_wrong", lambda *_: ())
    for factor, lines in ((1 + 1e-12, 0), (1.001, 1)):
        monkeypatch.setattr(wrong_outputs, "one_factor", lambda *_, factor=factor: factor)
        assert len(wrong_outputs.scaled_in_words(case, found)) == lines
