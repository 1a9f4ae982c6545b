"""Fewer rows than ranks that share them: what a rank without rows does was not tried."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records_in_memory import found, program_record
from sumgrad.judge.checks.beside import rows_for_every_rank
from sumgrad.topology.pools import Pool


def said(rows: int, axes: tuple[tuple[str, int], ...]) -> list[tuple[str, str]]:
    one = program_record(tiers={"structure": "float64"}, ranks=6)
    pool = Pool(name="train", role="home", axes=axes, ranks=range(6))
    topology = replace(one.spec.topology, pools=(pool,))
    facts = replace(one.spec.facts, num_rows=rows)
    spec = replace(one.spec, topology=topology, facts=facts)
    return [(f.level, f.text) for f in found(rows_for_every_rank, replace(one, spec=spec))]


@pytest.mark.parametrize(
    ("rows", "axes", "text"),
    [
        (1, (("dp", 3), ("tp", 2)), "1 row for 3 ranks of pool train that share them"),
        (5, (("dp_replicate", 3), ("dp_shard", 2)), "5 rows for 6 ranks of pool train"),
        (5, (("replicate", 3), ("shard", 2)), "5 rows for 6 ranks of pool train"),
        (3, (("dp", 3), ("tp", 2)), None),
        (1, (("tp", 6),), None),
        (0, (("dp", 6),), None),
    ],
)
def test_rows_and_the_ranks_that_share_them(rows, axes, text):
    told = said(rows, axes)
    assert [level for level, _ in told] == (["warning"] if text else [])
    assert text is None or told[0][1].startswith(text)
