"""A run once more with the same hashes of strings on all ranks: what is otherwise, and what not."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from records_in_memory import program_record, with_rank
from sumgrad.launch.again import one_hash
from sumgrad.launch.again.one_hash import try_one_hash
from sumgrad.record.one_hash import FOLDER, OneHash, read_one_hash

KEY = ("structure", 0)


@pytest.mark.parametrize("before", [None, "random"])
def test_nothing_but_the_hash_is_otherwise(tmp_path, monkeypatch, before):
    """All tiers are run: what fails in one of them alone is not made right by leaving it out."""
    if before is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", before)
    record, seen = program_record(), []
    monkeypatch.setattr(one_hash, "load_record", lambda _: record)
    monkeypatch.setattr(one_hash, "judge", lambda _: SimpleNamespace(status="pass"))
    found = try_one_hash(
        record.spec,
        tmp_path,
        lambda spec, at: seen.append((spec, at, os.environ["PYTHONHASHSEED"])),
    )
    assert seen == [(record.spec, tmp_path / FOLDER, "1")]
    assert os.environ.get("PYTHONHASHSEED") == before
    assert found == read_one_hash(tmp_path) == OneHash(passes=True, changed=())


@pytest.mark.parametrize(
    ("by", "again", "changed"), [(1e-6, 0, ()), (1e-2, 0, ("w",)), (1e-2, 1e-2, ())]
)
def test_what_is_another_by_more_than_rounding_is_named(tmp_path, monkeypatch, by, again, changed):
    """And none where the step is unlike itself in any case."""
    first = program_record(tiers={"structure": "float64"}, steps=1)
    own = first.ranks[1].grads[KEY]
    repeated = {n: g * (1 + again) for n, g in own.items()}
    first = with_rank(first, 1, again=repeated, again_tier="structure")
    then = with_rank(first, 1, grads={KEY: {**own, "w": own["w"] * (1 + by)}})
    records = iter([first, then])
    monkeypatch.setattr(one_hash, "load_record", lambda _: next(records))
    found = try_one_hash(first.spec, tmp_path, lambda *_: None)
    assert found.changed == changed
    assert torch.equal(first.ranks[0].grads[KEY]["w"], then.ranks[0].grads[KEY]["w"])


def test_a_rank_that_is_not_there_tells_nothing(tmp_path, monkeypatch):
    first = program_record(tiers={"structure": "float64"}, steps=1)
    records = iter([first, replace(first, ranks={})])
    monkeypatch.setattr(one_hash, "load_record", lambda _: next(records))
    assert try_one_hash(first.spec, tmp_path, lambda *_: None) == OneHash(passes=False, changed=())


def test_a_rank_without_an_element_of_a_parameter_tells_nothing_of_it(tmp_path, monkeypatch):
    first = program_record(tiers={"structure": "float64"}, steps=1)
    none = {name: torch.zeros(0, dtype=torch.float64) for name in first.ranks[2].grads[KEY]}
    first = with_rank(first, 2, grads={KEY: none}, again=none, again_tier="structure")
    monkeypatch.setattr(one_hash, "load_record", lambda _: first)
    assert try_one_hash(first.spec, tmp_path, lambda *_: None).changed == ()
