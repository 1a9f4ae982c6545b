"""What a newcomer stumbled over: wrong words, misspelled methods, a failed test."""

from __future__ import annotations

import io
from argparse import Namespace

import pytest
from records_in_memory import program_record
from sumgrad.base.errors import UserError
from sumgrad.base.verdict import Verdict
from sumgrad.cli import output
from sumgrad.cli.arguments import LATEST, make_parser
from sumgrad.cli.main import main
from sumgrad.diagnose.verdict import judge
from sumgrad.subjects.program.protocol import misspelled
from sumgrad.subjects.program.reference.compute import _draws
from torch import nn


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rnu"], "did you mean run? (see `sumgrad --help`)"),
        (["run", "t.yaml", "--worklaod", "a.py:B"],
         "run: unrecognized arguments: --worklaod; did you mean --workload? (see `sumgrad run"),
        (["diff", "--rnaks=2", "--", "a.py"], "--rnaks=2; did you mean --ranks?"),
        (["judge", "--xyzzy"], "judge: unrecognized arguments: --xyzzy (see `sumgrad jud"),
        (["run"], "run: the following arguments are required: T.yaml (see `sumgrad run --help`)"),
    ],
)  # fmt: skip
def test_wrong_words_name_the_verbs_help_and_what_was_meant(words, said):
    with pytest.raises(UserError) as found:
        make_parser().parse_args(words)
    assert said in found.value.problems[0]


def test_an_error_begins_with_the_name_once(capsys):
    assert main(["diff", "--", "a.py"]) == 2
    assert capsys.readouterr().err.startswith("sumgrad: diff: --ranks N is missing")


def test_the_last_run_is_judged_where_none_is_named():
    for verb in ("judge", "report"):
        assert make_parser().parse_args([verb]).directory == LATEST


def test_lines_elsewhere_than_on_a_terminal_end_where_their_text_ends(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(output, "_stream", lambda _: stream)
    for columns, width in (("50", 50), ("", output.WIDTH_ELSEWHERE)):
        monkeypatch.setenv("COLUMNS", columns)
        found = output.console(Namespace())
        assert found.width == width
    found.print("a table", width=20, justify="left")
    found.print("b")
    assert stream.getvalue() == "a table\nb\n"


class Step:
    def build(self): ...
    def batch(self): ...
    def loss_sum(self, model, rows): ...
    def step(self, model, batch, ctx): ...
    def distribut(self, model, ctx): ...
    def steps(self): ...


class Whole(Step):
    def distribute(self, model, ctx): ...


def test_methods_that_are_nearly_those_that_are_called():
    assert misspelled(Step()) == ["Step.distribut is not called: did you mean distribute?"]
    assert misspelled(Whole()) == []


def test_a_dropout_that_is_on_is_named():
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.25))
    assert _draws(model).startswith("1 (Dropout, p=0.25) draws random numbers: set its p to 0")
    assert _draws(model.eval()).startswith("it draws unseeded random numbers")


def test_a_failed_test_shows_the_cause_and_how_to_run_it_again():
    record = program_record(tiers={"structure": "float64"})
    verdict = judge(record)
    assert verdict.assert_pass() is verdict
    for held in record.ranks.values():
        for at, grads in held.grads.items():
            held.grads[at] = {name: 3 * grad for name, grad in grads.items()}
    with pytest.raises(AssertionError) as found:
        judge(record).assert_pass()
    lines = str(found.value).splitlines()
    assert lines[0] == "FAIL: mine"
    assert any(line.startswith("cause: ") and " 3" in line for line in lines)
    assert lines[-1] == "again: again"
    unknown = Verdict(status="unknown", tiers=(), diagnoses=(), coefficients=(), reasons=("why",))
    with pytest.raises(AssertionError, match="why"):
        unknown.assert_pass()
