"""A Verdict as a file for others to read: markdown, HTML, JUnit XML. Judges nothing.

Names, messages and tracebacks come from users' code, so every text is escaped by the environment
that writes it: a template cannot forget to.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from sumgrad.base.outcome import first_to_fail, outcome_from_json, spans
from sumgrad.base.plain_text import printable_data
from sumgrad.base.verdict import Verdict
from sumgrad.report.coefficients import in_few_lines
from sumgrad.report.pictures import (
    LEGEND,
    answer,
    heat_maps,
    pool_pictures,
    room_for,
    timeline_picture,
)
from sumgrad.report.terminal import (
    STANDINGS,
    axes_text,
    bits_sentence,
    by_ranks,
    number,
    users_frames,
)

MAX_TENSORS = 4000  # rows of a page's table
_MARKS = re.compile(r"[\\`*\[\]|~]|(?<![^\W_])_|_(?![^\W_])")  # an underscore within a word is none
_HEADS = re.compile(r"^(#|[-+](?=\s)|---|==)")
_NUMBERS = re.compile(r"^(\d{1,9})([.)])(?=\s|$)")


class Verbatim(str):
    """Markdown that is written as it stands."""

    __slots__ = ()


def to_markdown(verdict: Verdict) -> str:
    """The terminal's content as markdown."""
    return (
        environment(finalize=_finalized).get_template("report.md.jinja").render(_context(verdict))
    )


def to_html(verdict: Verdict) -> str:
    """One self-contained page. It runs one script, its own: the page's policy names its digest."""
    script, digest = page_script()
    context = _context(verdict)
    return (
        environment(autoescape=True)
        .get_template("report.html.jinja")
        .render(
            **context,
            script=script,
            script_hash=digest,
            answer=answer(context),
            pools=(pools := pool_pictures(context)),
            pool_left=room_for(f"{pool.name[:24]} {pool.axes}" for pool in pools),
            maps=heat_maps(context),
            line=timeline_picture(context),
            legend=LEGEND,
            all_tensors=_worst_first(context["tensors"])[:MAX_TENSORS],
        )
    )


def to_junit(verdict: Verdict) -> str:
    """JUnit XML: one test case for each tier, and one for the law and the ranks."""
    data = printable_data(verdict.data)
    name = f"sumgrad.{data['topology']['name']}"
    suite = Element("testsuite", name=name)
    for tier, entry in data["tiers"].items():
        case = SubElement(suite, "testcase", classname=name, name=tier)
        _tier_result(case, data, entry)
    case = SubElement(suite, "testcase", classname=name, name="law_and_ranks")
    findings, lost = data["findings"], data["not_compared"]
    if findings:
        _add(case, "failure", findings[0], "\n".join(findings))
    elif lost:
        _add(case, "error", f"not compared: {lost[0]}", "\n".join(lost))
    return junit_text(suite)


def junit_text(suite: Element) -> str:
    """A suite with its cases counted."""
    for count, kind in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):
        suite.set(count, str(len(list(suite.iter(kind)))))
    indent(suite)
    return tostring(suite, encoding="unicode", xml_declaration=False) + "\n"


def _tier_result(case: Element, data: Mapping[str, Any], tier: Mapping[str, Any]) -> None:
    if tier["status"] == "fail":
        cause = data["diagnoses"][0]["cause"] if data["diagnoses"] else "a tensor is off"
        error = f"worst relative error {number(tier['worst_rel'])} on {tier['worst_tensor']}"
        _add(case, "failure", cause, f"{error}; {data['reproduce']}")
    elif tier["status"] == "unknown":
        message = "unknown: not everything was compared, or could not have been seen"
        _add(case, "error", message, "\n".join([*tier["reasons"], *data["not_compared"]]))


def _add(case: Element, kind: str, message: str, text: str) -> None:
    SubElement(case, kind, message=message).text = text


def markdown(text: str) -> str:
    """Text as it stands, on one line, whatever marks of markdown or HTML it holds."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _HEADS.sub(r"\\\1", _MARKS.sub(r"\\\g<0>", text))
    return _NUMBERS.sub(r"\1\\\2", text)


def code(text: str) -> Verbatim:
    """A code span on one line, not for tables: a pipe ends a cell even there."""
    text = " ".join(text.split())
    ticks = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return Verbatim(f"{ticks}{space}{text}{space}{ticks}")


def block(text: str) -> Verbatim:
    """A fenced code block, with a fence that the text cannot close."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return Verbatim(f"{fence}\n{text.strip()}\n{fence}")


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _finalized(value: Any) -> str:
    return value if isinstance(value, Verbatim) else markdown(str(value))


def _ended_badly(outcomes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ranks that did not end well, the one that explains the others first; alike ones as one."""
    bad = [o for o in outcomes if o["status"] != "ok"]
    if not bad:
        return []
    first = first_to_fail([outcome_from_json(dict(o)) for o in bad]).rank
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for o in sorted(bad, key=lambda o: (o["rank"] != first, o["rank"])):
        key = tuple(o.get(name) for name in ("pool", "status", "detail", "waiting_in", "stack"))
        alike.setdefault(key, []).append(o)
    return [
        {
            **held[0],
            "stack": users_frames(held[0]["stack"]) if held[0].get("stack") else None,
            "ranks_text": spans([o["rank"] for o in held]),
        }
        for held in alike.values()
    ]


def page_script() -> tuple[Markup, str]:
    """The pages' own script, of which no `{{` is a template's; and what their policy calls it."""
    text = importlib.resources.files("sumgrad.report").joinpath("templates/report.js").read_text()
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(text), f"sha256-{digest}"


def _worst_first(tensors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What failed first, then what is not known; as they come among themselves."""
    order = {"fail": 0, "unknown": 1, "pass": 2}
    return sorted(tensors, key=lambda t: order.get(t["status"], 0))


@cache
def environment(**flags: Any) -> Environment:
    """Where the templates are, compiled once. flags: what escapes or finishes each value."""
    loader = PackageLoader("sumgrad.report", "templates")
    return Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **flags)


def _context(verdict: Verdict) -> dict[str, Any]:
    data = printable_data(verdict.data)
    return {
        **data,
        "failed": by_ranks([t for t in data["tensors"] if t["status"] != "pass"]),
        "ended_badly": _ended_badly(data["outcomes"]),
        "number": number,
        "ranks_text": spans,
        "axes": axes_text,
        "bits": bits_sentence,
        "coefficients": in_few_lines(data["coefficients"]),
        "standings": STANDINGS,
        "code": code,
        "block": block,
    }
