"""Reports of hostile names and messages: escaped in every format, in every place, to the letter."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from sumgrad.base.files import write_json
from sumgrad.base.outcome import TRIES_ON
from sumgrad.base.plain_text import printable, shown
from sumgrad.base.verdict import Verdict
from sumgrad.cli.main import main
from sumgrad.report.files import to_html, to_junit, to_markdown
from sumgrad.report.terminal import print_report, users_frames

OWNED = "document.documentElement.setAttribute('data-owned', 1)"
PAYLOADS = {
    "script": f"<script>{OWNED}</script>",
    "attribute": f'" onload=\'{OWNED}\' x="<img src=x onerror="{OWNED}">',
    "end of CDATA": "]]> <![CDATA[ <!-- --> <?x ?> &lt; &#60; &amp; & &nosuch;",
    "control": "a\0b\x07c\x1b[31mred\x1b]0;title\x07d\x85e\u2028f\x7f\r\ng\vh",
    "surrogates": "a\ud800b\udfffc\ufffed\uffffe",
    "table": "| a | b |\n|---|---|\n| c `d` ``e`` | **f** _g_ ~~h~~ [i](j) ![k](l) <m@n.o>",
    "heading": "# a\n## b\n---\n- c\n1. d\n> e\n```\nf\n````\n    g\n<b>h</b>",
    "rich": "[bold]a[/bold] [/] [link=file:///x]b[/link] :smile: \\[c] [/d",
    "bidi": "a\u202eb\u2066c",
    "jinja": "{{ 7 * 7 }} {% raw %} {# x #}",
}
FIELDS = ("fault", "workload", "reproduce")


def hostile(payload: str) -> dict[str, Any]:
    """A verdict.json with the payload in every text, each numbered, so that none can be missed."""
    numbers = iter(range(1000))

    def text() -> str:
        return f"t{next(numbers)}t{payload}"

    tier = {"dtype": text(), "worst_rel": 0.5, "worst_tensor": text(), "worst_of_threshold": 9.0}
    outcome = {"exit_code": 1, "seconds": 1.0, "ended_at": 1.0}
    tensor = {"rank": 0, "pool": text(), "step": 0, "status": "fail", "reason": text(),
              "max_abs": 1.0, "max_rel": 1.0, "ratio": 2.0, "threshold": 1e-9, "index": [0],
              "smallest_scale_error_caught": 1e-9}  # fmt: skip
    coefficient = {"ranks": [0], "rows": None, "expected": "1", "recovered": 0.5, "sigma": 0.0}
    return {
        "schema": 1,
        "status": "fail",
        "topology": {"name": text(), "world_size": 2,
                     "pools": {text(): {"role": text(), "axes": {text(): 2}, "ranks": [0, 1]}}},
        "workload": text(),
        "fault": text(),
        "seed": 0,
        "steps": 1,
        "tiers": {text(): {**tier, "status": "fail", "reasons": [text()]},
                  text(): {**tier, "status": "unknown", "reasons": [text(), text()]}},
        "tensors": [{**tensor, "name": text(), "tier": text()},
                    {**tensor, "name": text(), "tier": text(), "max_abs": 2.0}],
        "coefficients": [{**coefficient, "params": text(), "term": text(), "producer": text(),
                          "fraction": text()}],
        "diagnoses": [{"cause": text(), "kind": "avg", "factor": text(), "symbol": text(),
                       "ranks": [0], "because": [text()], "however": [text()], "also": [text()]}],
        "findings": [text(), text()],
        "warnings": [text()],
        "not_compared": [text()],
        "outcomes": [{**outcome, "rank": 0, "pool": text(), "status": "raised", "detail": text(),
                      "waiting_in": text(), "stack": text(), "output": text()},
                     {**outcome, "rank": 1, "pool": text(), "status": "killed", "detail": text(),
                      "waiting_in": None, "stack": None, "output": text()}],
        "fault_report": {"story": text(), "visible": True, "min_steps": 1, "breaks_law": False,
                         "prediction": {"agrees": None}},
        "reproduce": text(),
        "versions": {text(): text()},
    }  # fmt: skip


def verdict_of(data: dict[str, Any]) -> Verdict:
    return Verdict(status="fail", tiers=(), diagnoses=(), coefficients=(), data=data)


def squeeze(text: str) -> str:
    """Without white space, which formats may change."""
    return "".join(text.split())


def whole_texts(payload: str, content: str) -> set[int]:
    """The numbers of the texts that stand in a content to the letter, controls written out."""
    expected = squeeze(printable(payload))
    return {int(n) for n in re.findall(r"t(\d+)t" + re.escape(expected), squeeze(content))}


def all_numbers(content: str) -> set[int]:
    return {int(number) for number in re.findall(r"t(\d+)t", content)}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_junit_is_strict_xml_with_every_text_to_the_letter(payload):
    text = to_junit(verdict_of(hostile(payload)))
    suite = ElementTree.fromstring(text.encode("utf-8"))
    content = "\n".join([*suite.itertext(), *(v for e in suite.iter() for v in e.attrib.values())])
    assert whole_texts(payload, content) == all_numbers(text) != set()
    assert len(suite.findall("testcase")) == int(suite.get("tests")) == 3
    assert len(suite.findall(".//failure")) == int(suite.get("failures")) == 2
    assert len(suite.findall(".//error")) == int(suite.get("errors")) == 1
    allowed = {"testsuite", "testcase", "failure", "error"}
    assert {element.tag for element in suite.iter()} == allowed


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.texts = Counter[str](), set[str](), list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_html_has_the_tags_of_a_harmless_page_and_every_text(payload):
    text = to_html(verdict_of(hostile(payload)))
    text.encode("utf-8")
    page, harmless = Page(text), Page(to_html(verdict_of(hostile("x"))))
    assert page.tags == harmless.tags
    assert page.attributes == harmless.attributes
    assert whole_texts(payload, "".join(page.texts)) == all_numbers(text) != set()


def test_a_page_runs_its_own_script_and_nothing_else():
    page = to_html(verdict_of(hostile(PAYLOADS["script"])))
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in page
    assert f"script-src 'sha256-{digest}'" in page
    assert "t0t" not in script


def tables(tokens: list) -> list[list[int]]:
    """The cells of every row of every table."""
    found: list[list[int]] = []
    for token in tokens:
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append(0)
        elif token.type in ("td_open", "th_open"):
            found[-1][-1] += 1
    return found


def flat(tokens: list) -> list:
    return [t for token in tokens for t in (token, *flat(token.children or []))]


SUMMARIES = (
    "its traceback",
    "How often each term was counted",
    "2 tensors that did not pass, the largest error first",
    "1 tensor that did not pass, the largest error first",
)
FOLDS = {"</details>\n", *(f"<details><summary>{text}</summary>\n" for text in SUMMARIES)}


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_markdown_has_the_structure_of_a_harmless_page_and_every_text(payload):
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    text = to_markdown(verdict_of(hostile(payload)))
    text.encode("utf-8")
    tokens, harmless = (parser.parse(t) for t in (text, to_markdown(verdict_of(hostile("x")))))
    assert tables(tokens) == tables(harmless)
    assert [t.type for t in tokens] == [t.type for t in harmless]
    kinds = Counter(t.type for t in flat(tokens) if t.type not in ("text", "text_special"))
    assert kinds == Counter(t.type for t in flat(harmless) if t.type != "text")
    assert not {"html_inline", "link_open", "image"} & set(kinds)
    own = [t.content for t in tokens if t.type == "html_block"]  # what folds, and nothing else
    assert own == [t.content for t in harmless if t.type == "html_block"]
    assert set(own) <= FOLDS
    content = "\n".join(
        "".join(t.content for t in token.children) if token.children else token.content
        for token in tokens
    )
    assert whole_texts(payload, content) == all_numbers(text) != set()


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_the_terminal_shows_texts_and_obeys_none(payload):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=100_000)
    data = hostile(payload)
    print_report(verdict_of(data), console)
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert "\x1b" not in text
    assert all(c.isprintable() or c == "\n" for c in text.replace("\t", ""))
    text.encode("utf-8")
    one_line = " ".join(printable(payload).split())
    if "\n" not in payload:
        assert text.count(one_line) >= 20
    assert "[31m" not in out.getvalue().replace("\\x1b[31m", "")


BROWSER = next(
    (b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None
)


@pytest.mark.skipif(BROWSER is None, reason="no headless browser on this machine")
def test_a_browser_runs_nothing_of_a_report(tmp_path):
    payload = "".join(PAYLOADS[name] for name in ("script", "attribute", "end of CDATA"))
    hostile_page, plain = tmp_path / "report.html", tmp_path / "plain.html"
    hostile_page.write_text(to_html(verdict_of(hostile(payload))))
    plain.write_text(f"<!doctype html><html><p>{payload}</p></html>")

    def dom(path) -> str:  # type: ignore[no-untyped-def]
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
                   "--virtual-time-budget=500", f"--user-data-dir={tmp_path / 'profile'}",
                   "--dump-dom", path.as_uri()]  # fmt: skip
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert process.returncode == 0, process.stderr[-2000:]
        return process.stdout

    assert re.search(r"<html[^>]*data-owned", dom(plain)), "the payload must work where it can"
    text = dom(hostile_page)
    assert "t0t" in text
    assert not re.search(r"<html[^>]*data-owned", text)
    assert text.count("<script") == 1


FRAME = '  File "{}", line 7, in {}\n    {}\n'
HEAD, LAST = "Traceback (most recent call last):\n", "ValueError: no rows\n"
OURS = FRAME.format("/opt/venv/site-packages/sumgrad/launch/rank.py", "run", "step()")
THEIRS = FRAME.format("/home/me/step.py", "step", "raise ValueError")


@pytest.mark.parametrize(("frames", "shown"), [
    (OURS + OURS + THEIRS, THEIRS),
    (OURS + THEIRS + OURS + THEIRS, THEIRS + OURS + THEIRS),  # what they call of ours stays
    (THEIRS, THEIRS),
    (OURS + OURS, OURS + OURS),
    ("", ""),
    (FRAME.format("/home/me/sumgrad/step.py", "step", "x"),) * 2,
])  # fmt: skip
def test_a_traceback_begins_with_the_users_frames(frames, shown):
    assert users_frames(HEAD + frames + LAST) == HEAD + shown + LAST


def test_texts_in_messages_are_bounded_and_on_one_line():
    assert shown("a" * 100) == "a" * 57 + "..."
    assert shown("a\nb\x1b\ud800") == "a\\nb\\x1b\\ud800"
    assert shown(10**5000) == "a huge int"
    assert shown([10**5000]) == "a huge list"
    assert printable("é \u00a0\t\n\U0001f600") == "é \u00a0\t\n\U0001f600"


STEP = """
import torch
from torch import nn

class MyStep:
    def build(self):
        torch.manual_seed(0)
        return nn.Linear(2, 1)
    def batch(self):
        return {"x": torch.ones(4, 2)}
    def loss_sum(self, model, rows):
        return model(rows["x"]).sum(), len(rows["x"])
    def step(self, model, batch, ctx):
        raise ValueError(MESSAGE)
"""


@pytest.mark.distributed
def test_a_rank_that_raises_hostile_words(tmp_path, sumgrad_launcher):
    """From the exception on a rank to every report, also judged again from disk."""
    from sumgrad.launch.ask import CheckOptions
    from sumgrad.launch.check import run_check
    from sumgrad.launch.judging import judge_directory

    message = "".join(PAYLOADS.values())
    source, topology = tmp_path / "mine.py", tmp_path / "t.yaml"
    source.write_text(STEP.replace("MESSAGE", ascii(message)))
    topology.write_text(f"name: t\nworkload: {source}:MyStep\npools:\n  a: {{axes: {{dp: 2}}}}\n")
    options = CheckOptions(topology=topology, out=tmp_path / "run", tiers=("structure",))
    verdict, directory = run_check(options, launcher=sumgrad_launcher)
    assert verdict.status == "unknown"
    tokens = flat(MarkdownIt().parse((directory / "report.md").read_text()))
    assert not {"html_inline", "link_open", "image"} & {t.type for t in tokens}
    assert {t.content for t in tokens if t.type == "html_block"} <= FOLDS
    assert judge_directory(directory).data == verdict.data
    junit = tmp_path / "j.xml"
    assert (
        main(["report", str(directory), "--junit", str(junit), "--html", str(tmp_path / "h")]) == 3
    )
    suite = ElementTree.parse(junit).getroot()
    assert printable(PAYLOADS["script"]) in "".join(suite.itertext())
    write_json(tmp_path / "again.json", verdict.data)
    assert json.loads((tmp_path / "again.json").read_text()) == verdict.data


def test_what_was_not_tried_stands_beside_the_standing():
    """And not among the warnings again; where there is no cause it does."""
    data = hostile("x")
    left = f"3 changes were not tried: {TRIES_ON}"
    data["diagnoses"][0]["standing"] = "likely"
    data["warnings"] = ["another", left]

    def lines(data):
        console = Console(file=io.StringIO(), width=200)
        print_report(verdict_of(data), console)
        return [line.split() for line in console.file.getvalue().splitlines() if line.strip()]

    heads = [line[0] for line in lines(data)]
    assert heads[heads.index("standing") + 1] == "search"
    assert heads.count("search") == 1
    assert sum("tried:" in line for line in lines(data)) == 1
    alone = lines({**data, "diagnoses": []})
    assert sum("tried:" in line for line in alone) == 1
    assert "search" not in [line[0] for line in alone]
