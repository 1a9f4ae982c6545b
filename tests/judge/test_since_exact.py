"""A single run beside one that was kept: what is said, and how loud, on records made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from records_in_memory import compared, program_record
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.checks.since import the_single_run_as_it_was_kept
from sumgrad.record.spec import Changed, Script, Since, read_spec, write_spec


def record_since(*changed):
    one = program_record(tiers={"structure": "float64"}, steps=1, ranks=2)
    since = Since(name="monday", made="2026-01-05", tensors=4, changed=changed)
    script = Script(command="c", rows=({},), losses=((1.0,),), since=since)
    return replace(one, spec=replace(one.spec, script=script))


def change(name, off, *, bound=1e-12, size=1.0, step=1):
    return Changed(step=step, name=name, off=off, bound=bound, size=size)


def test_the_same_is_said_and_passes():
    (said,) = the_single_run_as_it_was_kept(compared(record_since()))
    assert (said.level, said.tier) == ("warning", None)
    assert "gradients of the run kept as 'monday' (2026-01-05): 4 tensors" in said.text
    assert judge(record_since()).status == "pass"


@pytest.mark.parametrize(("changed", "words"), [
    ((change("w", 0.5), change("b", 0.25, bound=1e-13)),
     "at step 1 b, w, the first by 0.25 of its size (noise allows 1.0e-13)"),
    ((change("w", 3.0, size=2.0),),
     "at step 1 w, the first by 1.5 of its size (noise allows 5.0e-13)"),
    ((change("w", 1e-3), change("b", 1e-9, bound=0.0, size=0.0)),
     "at step 1 b, w, the first from nothing (noise allows 0.0e+00)"),
    ((change("w", 1e-3), change("b", float("nan"))),
     "at step 1 b, w, the first by nan of its size"),
])  # fmt: skip
def test_a_change_fails_with_the_worst_tensor_first(changed, words):
    record = record_since(*changed)
    (said,) = the_single_run_as_it_was_kept(compared(record))
    assert said.level == "fail"
    assert words in said.text
    assert judge(record).status == "fail"
    assert judge(record).tiers[0].status == "pass", "the ranks are right"


def test_it_is_read_as_it_was_written(tmp_path):
    spec = record_since(change("w", 0.5)).spec
    write_spec(tmp_path, spec)
    assert read_spec(tmp_path).script == spec.script
