"""Which sum of parts is missing in a forward, and which only comes later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.by_modules import between, forward
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.paths import paths_of

SUM = "allreduce(SUM) of 12 float64 over ranks 0-2, at net.py:9"
GATHER = "all_gather of 12 float64 over ranks 0-2, at net.py:7"
MODULES = ("up", "down", "bias", "head")


def seen(state, operation, axis=None):
    call = SimpleNamespace(number=0, operation=operation, operation_back=None, recomputed=False)
    return [SimpleNamespace(rank=0, call=call, forward=state, axis=axis, shape=(2, 3))]


def parts_below(operations, monkeypatch, *, at_head, at_down=0):
    """down gives a part, bias is wrong; what its rank issues: until then, and until head."""
    look = SimpleNamespace(
        modules=MODULES, sources={},
        seen={
            "up": seen("right", 0), "down": seen("part", at_down, "tp"),
            "bias": seen("wrong", at_down), "head": seen("wrong", at_head),
        },
        paths=paths_of(MODULES, {"down": ("up",), "bias": ("down",), "head": ("bias",)}),
    )  # fmt: skip
    look.forward = lambda m: look.seen[m][0].forward
    traces = SimpleNamespace(ranks={0: SimpleNamespace(operations=tuple(operations))})
    case = SimpleNamespace(traces=traces, tier="structure", step=0)
    monkeypatch.setattr(between, "looked", lambda _: look)
    found = FirstWrong(wrong="bias", seen=tuple(look.seen["bias"]), beside=("up",))
    return forward._parts_below(case, look, found)


PART = "what down gives is a part on each rank, whole only when summed over tp"


@pytest.mark.parametrize(("operations", "at_head"), [([], 0), ([GATHER], 1), ([GATHER, SUM], 1)])
def test_a_sum_that_nobody_issues_is_missing(monkeypatch, operations, at_head):
    words, missing = parts_below(operations, monkeypatch, at_head=at_head)
    assert words[0] == PART
    assert "issues no collective in between" in words[1]
    assert missing == "the sum over tp of what down gives is missing"


def test_a_sum_that_comes_after_what_is_wrong_is_none_that_is_missing(monkeypatch):
    words, missing = parts_below([GATHER, SUM], monkeypatch, at_head=2)
    assert missing == ""
    assert words[-1].startswith(f"only after it rank 0 issues {SUM}: what is added to a part")


def test_a_sum_that_is_issued_is_looked_at(monkeypatch):
    words, missing = parts_below([SUM], monkeypatch, at_head=1, at_down=1)
    assert (words[0], missing) == (PART, "")
    assert words[1] == f"in between rank 0 issues {SUM}"
    assert "whether something whole, as a bias, is added to the parts before" in words[-1]
