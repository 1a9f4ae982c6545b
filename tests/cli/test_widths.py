"""The terminal's report at any width: no number is cut, a text's lines stand below each other."""

from __future__ import annotations

import io
import re

import pytest
from records_in_memory import planned_record, program_record
from rich.console import Console
from sumgrad.diagnose.verdict import judge
from sumgrad.report.files import to_markdown
from sumgrad.report.terminal import folded, number, print_report


def failed(record):
    """A verdict of a run with one wrong tensor of a long name on every rank."""
    for held in record.ranks.values():
        for grads in held.grads.values():
            name = next(iter(grads))
            grads[name] = grads[name] * 1.2345678
    return judge(record)


def lines_of(verdict, width):
    out = io.StringIO()
    print_report(verdict, Console(file=out, width=width))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("make", [planned_record, program_record])
def test_no_number_is_cut(make, width):
    verdict = failed(make())
    lines = lines_of(verdict, width)
    text = "\n".join(lines)
    assert "…" not in text
    assert all(len(line) <= width for line in lines if not line.startswith("reproduce"))
    wrong = [t for t in verdict.data["tensors"] if t["status"] == "fail"]
    worst = max(wrong, key=lambda t: t["max_rel"])
    assert number(worst["max_rel"]) in text
    for tier in verdict.data["tiers"].values():
        assert number(tier["worst_rel"]) in text
        assert number(tier["worst_of_threshold"]) in text


def test_further_lines_of_a_text_begin_below_its_first():
    verdict = failed(program_record())
    lines = lines_of(verdict, 60)
    at = next(i for i, line in enumerate(lines) if line.startswith("because    "))
    long = next(i for i in range(at, len(lines)) if lines[i + 1].startswith(" " * 11))
    assert lines[long + 1][11:].strip()


def test_the_first_line_says_how_many_gradients_were_compared():
    record = program_record()
    num = len(judge(record).data["tensors"])
    assert f"{num} gradients compared" in lines_of(judge(record), 200)[0]
    del record.ranks[1].grads["structure", 0]["w"]
    record.ranks[1].info["structure", 0]["changed_without"] = ["w"]
    assert f"{num - 1} of {num} gradients compared" in lines_of(judge(record), 200)[0]


def test_a_wide_terminal_has_every_column():
    heads = "\n".join(lines_of(failed(program_record()), 200))
    for word in ("would see a factor off by", "max abs", "ratio", "threshold", " at"):
        assert word in heads


@pytest.mark.parametrize("make", [planned_record, program_record])
def test_markdown_is_short_where_nothing_is_unfolded(make):
    text = to_markdown(failed(make()))
    assert text.count("<details>") == text.count("</details>") > 0
    shown = re.sub(r"<details>(<summary>.*?</summary>).*?</details>", r"\1", text, flags=re.S)
    assert len(shown.splitlines()) <= 60
    assert len(text.splitlines()) <= 100


@pytest.mark.parametrize("make", [planned_record, program_record])
def test_a_verdict_in_a_failed_assert_is_one_line(make):
    assert repr(judge(make())) == "<PASS>"
    verdict = failed(make())
    assert repr(verdict) == f"<FAIL: {verdict.diagnoses[0].cause}>"


@pytest.mark.parametrize(
    ("room", "lines"),
    [
        (40, ["transformer.layers.0.self_attention.bias"]),
        (30, ["transformer.layers.0.", "self_attention.bias"]),
        (12, ["transformer.", "layers.0.", "self_", "attention.", "bias"]),
    ],
)
def test_a_name_is_broken_where_its_words_end(room, lines):
    assert folded("transformer.layers.0.self_attention.bias", room).split("\n") == lines
    assert "".join(lines) == "transformer.layers.0.self_attention.bias"


def test_what_is_no_more_than_noise_is_named_and_is_no_factor_that_would_be_seen():
    verdict = judge(program_record())
    assert not any(line.startswith("faint") for line in lines_of(verdict, 200))
    worst = max(t["smallest_scale_error_caught"] for t in verdict.data["tensors"])
    for tensor in verdict.data["tensors"]:
        if tensor["name"] == "b":
            tensor["smallest_scale_error_caught"] = 3e10 if tensor["rank"] else "inf"
    (faint,) = [line for line in lines_of(verdict, 200) if line.startswith("faint")]
    assert "b: no gradient, or no more than noise" in faint
    assert "3.0e+10" not in "\n".join(lines_of(verdict, 200))
    assert worst < 1


def test_each_tensor_stands_once_where_it_is_worst_with_all_its_ranks():
    verdict = failed(program_record())
    wrong = [t for t in verdict.data["tensors"] if t["status"] == "fail"]
    (name,) = {t["name"] for t in wrong}
    assert len({(t["tier"], t["step"]) for t in wrong}) > 1
    wrong[0]["max_rel"], wrong[0]["rank"] = 7.5, 2
    rows = [line.split() for line in lines_of(verdict, 200) if line.startswith(f"{name} ")]
    ranks = sorted({t["rank"] for t in wrong})
    assert [(row[1], row[3]) for row in rows] == [(wrong[0]["tier"], f"{ranks[0]}-{ranks[-1]}")]
    assert "7.500000" in rows[0]
