"""The ranks' losses beside the single process's: ranks of an axis that share one count once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.by_modules.weighing.losses import losses_beside


def said(single, *ranks, ddp=0):
    traces = SimpleNamespace(
        single=SimpleNamespace(losses=single),
        ranks={i: SimpleNamespace(losses=own) for i, own in enumerate(ranks)},
    )
    held = {i: SimpleNamespace(ddp=ddp) for i in range(len(ranks))}
    return losses_beside(SimpleNamespace(traces=traces, record=SimpleNamespace(ranks=held)))


def test_losses_that_add_up():
    (text,) = said((3.0,), (1.0,), (2.0,))
    assert text.startswith("the losses that the ranks' backwards start from add up to that of the ")
    assert "times" not in text
    (text,) = said((4.5,), (1.0, 0.5), (1.0, 0.5), (2.0, 1.0), (2.0, 1.0))
    assert "start from, each 2 that are the same once, add up to that of" in text


def test_losses_that_do_not():
    (text,) = said((3.0,), (1.0,), (1.0,), (2.5,), (2.5,))
    assert "each 2 that are the same once, add up to 3.5, 1.16667 times" in text
    (text,) = said((3.0,), (1.0,), (1.0,), (2.5,))  # not all are shared by as many
    assert "start from add up to 4.5, 1.5 times" in text
    assert "DDP" not in text
    (text,) = said((3.0,), (1.0,), (1.0,), (2.5,), ddp=3)
    assert text.endswith("; divided by 3, as DDP does, 0.5 times")


@pytest.mark.parametrize("single", [(), (1.0, 2.0), (0.0,)])
def test_nothing_where_no_one_value_is_known(single):
    assert said(single, (1.0,), (2.0,)) == []
