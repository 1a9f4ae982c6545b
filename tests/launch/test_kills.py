"""A slice of scripts/kills.py: drawn kills and signals, and the script's own judgement of them."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat

import pytest
from conftest import ROOT

spec = importlib.util.spec_from_file_location("kills", ROOT / "scripts" / "kills.py")
assert spec is not None
kills = importlib.util.module_from_spec(spec)
sys.modules["kills"] = kills
spec.loader.exec_module(kills)

CASES = [
    ("three_pool", "main", "import", "INT"),
    ("three_pool", "main", "exit", "HUP"),
    ("three_pool", "group", "step", "KILL"),
    ("three_pool", "server", "writes", "KILL"),
    ("three_pool", "helper", "exit", "SEGV"),
    ("ddp", "rank", "exit", "stop"),
]


def struck_at_last(case, tmp_path):
    """A signal that comes too late, on a busy machine, has tried nothing: three times at most."""
    for attempt in range(3):
        place = tmp_path / f"{case.number}-{attempt}"
        place.mkdir()
        seen = kills.run_case(case, place)
        if seen.struck or seen.problems:
            break
    return seen


@pytest.mark.distributed
def test_a_slice_of_the_drawn_kills(tmp_path):
    cases = [
        kills.Case(
            number=i, subject=subject, who=who, when=when, signal=number, rank=1, delay=0.5
        )
        for i, (subject, who, when, number) in enumerate(CASES)
    ]  # fmt: skip
    with ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(struck_at_last, cases, repeat(tmp_path)))
    assert [s.problems for s in seen] == [()] * len(cases)
    assert [s for s in seen if not s.struck] == []
    assert [s.exit_code for s in seen] == [130, 129, -9, 3, 3, 3]


def test_the_draw_is_the_seeds_and_reaches_everybody():
    cases = kills.draw(0, 200)
    assert cases == kills.draw(0, 200) != kills.draw(1, 200)
    for names, field in (
        (kills.WHO_WHEN["run"], "who"),
        (kills.SIGNALS, "signal"),
        (kills.RANKS, "subject"),
        (("import", "start", *kills.PLACES, "judging"), "when"),
    ):
        assert {getattr(case, field) for case in cases} == set(names)


PASSED = "sumgrad: PASS (exit 0)"
SEEN = kills.Seen(
    case=kills.Case(
        number=0, subject="ddp", who="rank", when="exit", signal="KILL", rank=0, delay=0.0
    ),
    struck=True, said="", exit_code=0, last_line=PASSED, seconds=1.0, problems=(),
)  # fmt: skip


def case(**more):
    return {"case": replace(SEEN.case, **more)}


@pytest.mark.parametrize(
    ("changes", "text", "errors", "found"),
    [
        ({}, PASSED, "", ["passed"]),
        ({"struck": False}, PASSED, "", []),
        (case(signal="INT"), PASSED, "", []),
        (case(who="server", when="judging"), PASSED, "", []),
        (case(who="server", when="step"), PASSED, "", ["passed"]),
        (case(who="main", signal="TERM"), PASSED, "", ["passed"]),
        ({**case(who="main", signal="TERM"), "said": PASSED}, PASSED, "", []),
        ({**case(who="main", signal="TERM"), "exit_code": 143}, "", "", []),
        ({"exit_code": 143}, "", "", ["exit code 143"]),
        ({"exit_code": 3}, "", "Traceback (most recent call last)\n", ["traceback"]),
        ({"exit_code": 1}, "sumgrad: FAIL (exit 1)", "", ["failed", "exit code 1"]),
    ],
)
def test_the_script_sees_what_is_wrong(changes, text, errors, found):
    problems = kills.wrong(replace(SEEN, **changes), text, errors)
    assert len(problems) == len(found)
    assert all(problem.startswith(words) for problem, words in zip(problems, found, strict=True))
