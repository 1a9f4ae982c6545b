"""Rows put together of several; padding that counts; what right vectors alone can vouch for."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from sumgrad.diagnose.explainers.by_modules.forwards import wrong_outputs
from sumgrad.diagnose.modules.inputs.sequences import Joined, joined_rows
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong, first_wrong_forward
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import LOSS, Traces
from traces_in_memory import trace

ROWS, PLACES, WIDTH = 3, 4, 5
BATCH = {"x": torch.arange(ROWS * PLACES).reshape(ROWS, PLACES)}
G = torch.Generator().manual_seed(7)
X = torch.randn(ROWS, PLACES, WIDTH, generator=G, dtype=torch.float64)
LIVE = torch.ones_like(X)


def looked(single, mine):
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    return look_at(traces, "float64", ()), single


def joined(given, single=None):
    look, whole = looked(
        single or trace([("m", X, LIVE)], batch=BATCH),
        trace([("m", given, torch.ones_like(given))]),
    )
    return joined_rows(whole, look.seen["m"])


def test_a_row_that_has_vectors_of_two():
    mixed = torch.cat([X[0, 3:], X[1, :2]])[None]
    found = joined(torch.cat([X[:1, :3], mixed]))
    assert found == [Joined(rank=0, call=0, row=1, places=((0,), (1, 2)))]


def test_rows_behind_vectors_that_do_not_count_are_looked_at_too():
    """Of row 0 nothing counts, and is not compared: row 1 is the last one all the same."""
    given = torch.stack([X[0, :3] + 9, torch.stack([X[0, 3], X[1, 0], X[1, 1]])])
    masked = torch.ones_like(given)
    masked[0] = 0
    look, whole = looked(trace([("m", X, LIVE)], batch=BATCH), trace([("m", given, masked)]))
    (one,) = joined_rows(whole, look.seen["m"])
    assert (one.row, one.places) == (1, ((0,), (1, 2)))


def test_rows_as_they_are_or_cut_are_not_put_together():
    assert joined(X[1:]) == []
    assert joined(X[1:, 1:3]) == []
    each = trace([("m", X[i : i + 1], LIVE[:1]) for i in range(ROWS)], batch=BATCH)
    assert joined(X[:2], each) == []


def test_rows_of_single_calls_are_apart():
    each = trace([("m", X[i : i + 1, : 2 + i], LIVE[:1, : 2 + i]) for i in range(2)], batch=BATCH)
    (one,) = joined(torch.stack([torch.stack([X[0, 1], X[1, 2]])]), each)
    assert one.places == ((0,), (1,))


def test_vectors_that_several_rows_have_tell_nothing():
    same = X.clone()
    same[1, 0] = same[0, 0]
    single = trace([("m", same, LIVE)], batch=BATCH)
    assert joined(torch.stack([torch.stack([same[0, 0], same[2, 1]])]), single) == []


def state(given, gradient):
    look, _ = looked(trace([("m", X, LIVE)], batch=BATCH), trace([("m", given, gradient)]))
    return look.forward("m")


def test_what_stands_there_again_and_again_is_padding_unless_it_counts():
    given = X[:2].clone()
    given[1, 2:] = 0.5
    masked = LIVE[:2].clone()
    masked[1, 2:] = 0
    assert state(given, masked) == "right"
    assert state(given, LIVE[:2]) == "wrong"
    assert state(given, None) == "right"  # nobody knows what counts
    given[1, 2:] = 0
    assert state(given, LIVE[:2]) == "right"  # zeros may be a part of a sum


def test_padding_that_does_not_count_is_compared_as_padding():
    given, counts = X[:2].clone(), LIVE[:2].clone()
    given[1, 2:], counts[1, 2:] = 0.5, 0
    look, _ = looked(trace([("m", X, LIVE)], batch=BATCH), trace([("m", given, counts)]))
    assert len(look.seen["m"][0].where.picked) == 2 * PLACES


def vouched(query_gradient):
    """`keys` and `query` are made from `body`, which is wrong in its last place."""
    body, keys, query = X, X * 2, X * 3
    takes = {"keys": ("body",), "query": ("body",), "last": ("keys", "query"), LOSS: ("last",)}
    held = [("body", body), ("keys", keys), ("query", query), ("last", X * 5)]
    single = trace([(n, v, LIVE) for n, v in held], batch=BATCH)
    single = replace(single, takes=takes)

    def off(value):
        out = value.clone()
        out[:, -1] += 1
        return out

    gradients = [LIVE, LIVE, query_gradient, LIVE]
    mine = trace([(n, off(v), g) for (n, v), g in zip(held, gradients, strict=True)])
    look, _ = looked(single, mine)
    found = first_wrong_forward(look)
    return look.forward("query"), found and found.wrong


def test_what_is_right_where_it_counts_does_not_clear_what_leads_elsewhere():
    masked = LIVE.clone()
    masked[:, -1] = 0
    assert vouched(masked) == ("right", "body")
    assert vouched(LIVE) == ("wrong", "body")


def test_what_is_right_in_full_clears_what_it_is_made_from():
    """Computed in another way: `body` differs, and all that is made from it is right again."""
    single = replace(
        trace([("body", X, LIVE), ("last", X * 2, LIVE)], batch=BATCH),
        takes={"last": ("body",), LOSS: ("last",)},
    )
    other, cut = X + 1, LIVE.clone()
    cut[:, -1] = 0
    for given, gradient in ((X * 2, LIVE), (X * 2, cut)):
        look, _ = looked(single, trace([("body", other, LIVE), ("last", given, gradient)]))
        assert look.forward("last") == "right"
        assert first_wrong_forward(look) is None


def test_what_is_right_where_it_counts_clears_what_leads_nowhere_else():
    single = replace(
        trace([("body", X, LIVE), ("last", X * 2, LIVE)], batch=BATCH),
        takes={"last": ("body",), LOSS: ("last",)},
    )
    given, cut = X * 2, LIVE.clone()
    given[:, -1] += 1
    cut[:, -1] = 0
    look, _ = looked(single, trace([("body", X + 1, LIVE), ("last", given, cut)]))
    assert (look.forward("body"), look.forward("last")) == ("wrong", "right")
    assert first_wrong_forward(look) is None


def test_in_words_which_row_is_put_together(monkeypatch):
    mixed = torch.cat([X[0, 3:], X[1, :2]])[None]
    given = torch.cat([X[:1, :3], mixed])
    look, whole = looked(
        trace([("m", X, LIVE)], batch=BATCH), trace([("m", given, torch.ones_like(given))])
    )
    monkeypatch.setattr(wrong_outputs, "into_the_calls", lambda *_: look.seen["m"])
    looked_at = SimpleNamespace(single=whole)
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _: looked_at)
    case = SimpleNamespace()
    found = FirstWrong(wrong="m", seen=tuple(look.seen["m"]))
    for state, said in (
        ("right", ["on rank 0 in call 0 row 1 of what goes into it is put together of vectors that "
                   "stand in 2 rows of the single process: places 0 and places 1-2: look at how "
                   "rows are cut, packed or folded"]),
        ("wrong", []),
    ):  # fmt: skip
        monkeypatch.setattr(wrong_outputs, "what_goes_into", lambda *_, state=state: state)
        assert wrong_outputs.joined_in_words(case, look, found) == said


def test_the_first_module_that_such_a_row_goes_into_and_what_made_it(monkeypatch):
    mixed = torch.cat([X[0, 3:], X[1, :2]])[None]
    given = torch.cat([X[:1, :3], mixed])
    names = ("first", "near", "m")
    look, whole = looked(
        trace([(name, X, LIVE) for name in names], batch=BATCH),
        trace([("first", X[:2, :3], LIVE[:2, :3]),
               *((name, given, torch.ones_like(given)) for name in names[1:])]),
    )  # fmt: skip
    stack = SimpleNamespace(made=("/x/fold.py:8", "x.reshape(2, 3, 5)"))
    ranks = {0: SimpleNamespace(stack=lambda _: stack)}
    looked_at = SimpleNamespace(single=whole, ranks=ranks)
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _: looked_at)
    monkeypatch.setattr(wrong_outputs, "gone_into", lambda _, module: look.seen[module])
    found = FirstWrong(wrong="m", seen=tuple(look.seen["m"]))
    told = wrong_outputs._first_joined(SimpleNamespace(), look, found, 0)
    assert told == [
        "the first module that such a row goes into there is near, made at fold.py:8 "
        "`x.reshape(2, 3, 5)`"
    ]
    assert wrong_outputs._first_joined(SimpleNamespace(), look, found, 1) == []
    stack.made = ("", "")
    (told,) = wrong_outputs._first_joined(SimpleNamespace(), look, found, 0)
    assert told == "the first module that such a row goes into there is near"


def test_numbers_that_two_rows_have_tell_no_factor():
    """One number for each row: any factor fits, of whichever row it is."""
    out = torch.tensor([[1.0], [2.0], [2.0]]).double()
    for second, told in ((3.0, False), (5.0, True)):
        gradients = torch.tensor([[4.0], [5.0], [second]]).double()
        look, _ = looked(
            trace([("m", out, gradients)], batch={"x": torch.arange(3)}),
            trace([("m", out[:2], 2 * gradients[:2])]),
        )
        (seen,) = look.seen["m"]
        assert seen.backward == "right"
        assert [bool(f == 2) for f in seen.factors] == [True, told]


def backward_of(*calls):
    """Of the last call of `m`; the single process passes X once with a gradient, once without."""
    single = trace([("m", X, LIVE), ("m", X, None)], batch=BATCH)
    look, _ = looked(single, trace([("m", *one) for one in calls]))
    return look.seen["m"][-1].backward


def test_a_pass_without_a_gradient_beside_one_with_it_is_meant():
    """Also where it has more, which gets no gradient in the single process: the next observation
    of what is looked at, say."""
    assert backward_of((X[:2], LIVE[:2]), (X[:2], None)) == "untold"
    single = trace([("m", X[:, :-1], LIVE[:, :-1]), ("m", X[:, 1:], None)], batch=BATCH)
    calls = [("m", X[:2, :-1], LIVE[:2, :-1]), ("m", X[:2, 1:], None)]
    assert looked(single, trace(calls))[0].backward("m") == "right"
    lost = [calls[0], ("m", X[2:, :-1], None)]
    assert looked(single, trace(lost))[0].backward("m") == "wrong"


def test_a_pass_that_lost_its_gradient_is_wrong():
    assert backward_of((X[:2], None)) == "wrong"
    assert backward_of((X[:2], LIVE[:2]), (X[2:], None)) == "wrong"  # another micro-batch's
