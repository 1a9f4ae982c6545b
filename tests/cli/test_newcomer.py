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
from sumgrad.cli.init import write_start
from sumgrad.cli.main import main
from sumgrad.diagnose.verdict import judge
from sumgrad.launch.script.options import fill_in
from sumgrad.report.terminal import _headline
from sumgrad.subjects.loading import find_class
from sumgrad.subjects.program.protocol import misspelled, with_place
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


STEP = "    def {}(self, *args):\n        pass\n"
FOUR = ("build", "batch", "loss_sum", "step")


def a_class(name: str, methods: tuple[str, ...]) -> str:
    return f"class {name}:\n" + "".join(STEP.format(m) for m in methods)


@pytest.mark.parametrize(
    ("methods", "workload", "said"),
    [
        (FOUR, "MyStepp", "mine.py has no MyStepp; did you mean MyStep?"),
        (FOUR, "Other", "mine.py has no Other"),
        (FOUR, "", "mine.py:Class: it has "),
        (FOUR[:2], "", "mine.py:Class"),
        ((*FOUR[:2], "step"), "MyStep", "mine.py:1) has no loss_sum(); a Program has build, batch"),
        ((*FOUR[:2], "losssum", "step"), "MyStep", "has no loss_sum() (did you mean it by losssum"),
        (FOUR[:2], "MyStep", "no loss_sum(), no step(); a Program has"),
    ],
)
def test_what_is_no_program_is_told_what_it_lacks(tmp_path, methods, workload, said):
    path = tmp_path / "mine.py"
    path.write_text(a_class("MyStep", methods))
    spec = f"{path}:{workload}" if workload else str(path)
    with pytest.raises(UserError) as found:
        find_class(spec, "--workload")
    assert said in found.value.problems[0]
    assert ("did you mean" in found.value.problems[0]) == ("did you mean" in said)


def test_a_shipped_name_that_is_nearly_one_is_told():
    with pytest.raises(UserError, match="did you mean three_pool"):
        find_class("tree_pool", "--workload")


def test_one_method_is_not_nearly_a_program(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(a_class("Planned", ("build",)))
    assert find_class(f"{path}:Planned", "--workload").__name__ == "Planned"


@pytest.mark.parametrize(
    ("word", "said"),
    [("{12/rank}", "did you mean {12/ranks}?"), ("{rank}", "did you mean {ranks}?")],
)
def test_a_placeholder_that_is_nearly_one_is_told(word, said):
    with pytest.raises(UserError) as found:
        fill_in(f"--batch={word}", 3)
    assert said in found.value.problems[0]
    assert fill_in("{12/ranks} {ranks} {x}", 3) == "4 3 {x}"


def test_flags_of_a_script_without_dashes_before_it():
    with pytest.raises(UserError) as found:
        make_parser().parse_args(["diff", "--ranks", "3", "train.py", "--data", "x"])
    assert "put -- before train.py" in found.value.problems[0]


def test_a_beginning_of_a_flag_is_none():
    with pytest.raises(UserError, match="did you mean --steps"):
        make_parser().parse_args(["run", "t.yaml", "--step", "3"])


def test_a_keyword_is_no_name(tmp_path):
    with pytest.raises(UserError, match="no keyword"):
        write_start(tmp_path, "class")


def test_where_a_method_stands_is_said_of_what_it_gave():
    text = "loss_sum() returned a number, expected (sum, count)"
    line = Step.loss_sum.__code__.co_firstlineno
    assert with_place(Step(), text) == f"{text} ({__file__}:{line})"
    assert with_place(Step(), "build() raised E at mine.py:3") == "build() raised E at mine.py:3"
    assert with_place(Step(), "no method") == "no method"


def test_the_header_of_a_script_has_no_seed():
    data = judge(program_record()).data
    assert "seed 0" in _headline(data).plain
    assert "seed" not in _headline({**data, "losses": {}}).plain
