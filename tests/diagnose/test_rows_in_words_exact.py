"""How the rows of a script's runs differ, in words: of all ranks only what is so of each."""

from __future__ import annotations

import pytest
from sumgrad.diagnose.of_script import which_rows
from sumgrad.judge.checks.script import OtherRows


def rows(by_rank, foreign, single=8):
    read = sum(len(numbers) for numbers in by_rank.values()) + sum(foreign.values())
    return OtherRows(
        step=0, model="Net", single=single, ranks=read, missed=(), uneven=(), foreign=foreign,
        again=0, by_rank=by_rank,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("by_rank", "foreign", "words"),
    [
        ({0: tuple(range(8)), 1: ()}, {1: 8}, "every rank reads as many rows as the single run"),
        ({0: (0, 1), 1: (2,)}, {0: 6, 1: 7}, "so the batch of all ranks is 2 times as large"),
        # As many in all, and not on each: one that reads on before it steps.
        ({0: (0, 1, 2, 3), 1: (4, 5, 6, 7)}, {1: 8}, "rank 1 reads rows that the single run"),
        ({0: (0, 1, 2, 3), 1: ()}, {1: 4}, "rank 1 reads rows that the single run does not"),
        ({0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}, {}, "rank 0-1 all read rows 0-3"),
        ({0: (), 1: ()}, {0: 4, 1: 4}, "as many, but others"),
        ({0: (), 1: ()}, {0: 4, 1: 5}, "no rank reads a row of the single run"),
        ({0: (0, 1, 2, 3), 1: (4, 5)}, {}, "some are lost or read twice"),
    ],
)
def test_how_rows_differ(by_rank, foreign, words):
    assert words in which_rows(rows(by_rank, foreign))
