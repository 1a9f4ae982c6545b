"""A factor that several sizes are is named by none of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.of_factors import uniform
from sumgrad.diagnose.row_fit import Factors, Unit


@pytest.mark.parametrize(("symbols", "symbol", "however"), [
    (["1/dp", "1/world"], "1/dp", ()),  # the one axis has all ranks
    (["1/dp", "1/world", "1/micro-batches"], None,
     ("1/dp, 1/micro-batches are all that number; unequal sizes separate them",)),
    (["1/dp", "rows/tp"], "1/dp", ()),
    ([], None, ()),
])  # fmt: skip
def test_a_factor_of_a_term_is_named_where_one_size_is_it(monkeypatch, symbols, symbol, however):
    monkeypatch.setattr(uniform, "factor_symbols", lambda *_: symbols)
    case = SimpleNamespace(record=SimpleNamespace(spec=SimpleNamespace(params={"w": 0})))
    units = (Unit(term="task", rows=None), Unit(term="drift", rows=None))
    found = Factors(level="terms", units=units, values=(1.0, 1 / 3), sigmas=(1e-12, 1e-12))
    told = uniform._factor_by_term(case, found, ["w"])
    assert (told.symbol, told.however) == (symbol, however)
    named = f" = {symbol}" if symbol else ""
    assert told.cause == f"drift is counted 1/3{named} times; the other terms are right"
