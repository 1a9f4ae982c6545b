"""Renders a Verdict on the terminal. Judges nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.base.outcome import TRIES_ON, first_to_fail, outcome_from_json, some_of, spans
from sumgrad.base.plain_text import printable, printable_data
from sumgrad.base.verdict import Verdict
from sumgrad.report.coefficients import in_few_lines

STYLES = {"pass": "bold green", "fail": "bold red", "unknown": "bold yellow"}
MAX_TENSORS, MAX_COEFFICIENTS, MAX_RANKS_SHOWN = 12, 24, 8
MAX_STACK_LINES = 12
_FRAME = re.compile(r'^(?=  File ")', flags=re.M)
_OURS = re.compile(r'  File "[^"]*/(?:harness|sumgrad)/(?:cli|launch|ledger|record|subjects)/')
LABEL, ROOMY = 11, 100  # characters before a text; of a terminal with room for long heads
NAME = 12  # characters that a name has at least
WITH_TIER = 88  # characters, from which a tensor's tier is shown
MAX_LOSSES = 8  # steps whose losses are shown
NOT_SEEN = (
    "what the script does wrong on one process as well, as a mean of micro-batches' means: "
    "`sumgrad init` writes a step that is compared with a loss of its own"
)
STANDINGS = {
    "proved": "proved: it predicts the measured gradients, or the record itself shows it",
    "likely": "likely: the evidence points there and does not prove that this is all",
    "open": "open: where to look; no cause is proved",
}


def render(verdict: Verdict, *, width: int = 200) -> RenderableType:
    """The terminal report: status, tiers, what failed, because, who did not end, reproduce.

    width: in characters; where it is small, tables have fewer columns, and no number is cut.
    """
    data = printable_data(verdict.data)
    parts: list[RenderableType] = [_headline(data)]
    if data["tiers"]:
        parts += [Text(""), _tiers(data, width)]
    if "elements" in data["tiers"].get("bitwise", {}):
        parts += [Text(""), _labelled("bits", bits_sentence(data["tiers"]["bitwise"]))]
    if data.get("lifted"):
        parts += [Text(""), _lifted(data["lifted"])]
    losses = data.get("losses")
    if losses and any(x is not None for x in losses["ranks"]):
        parts += [Text(""), _losses(losses)]
    if losses and data["status"] == "pass":
        parts += [Text(""), _labelled("not seen", NOT_SEEN)]
    for num, diagnosis in enumerate(data["diagnoses"]):
        left = [text for text in data["warnings"] if TRIES_ON in text] if num == 0 else []
        parts += [Text(""), _diagnosis(diagnosis, left)]
    if data["coefficients"]:
        parts += [Text(""), _coefficients(data["coefficients"], width)]
    failed = [t for t in data["tensors"] if t["status"] != "pass"]
    table: list[RenderableType] = [Text(""), _tensors(failed, width)] if failed else []
    lists = _lists(data)
    # Where nothing is wrong and something is not known, the reasons are the answer.
    parts += [*lists, *table] if data["status"] == "unknown" else [*table, *lists]
    parts += _outcomes(data)
    if data.get("fault_report"):
        parts += [Text(""), _fault(data)]
    return Group(*parts)


def bits_sentence(tier: Mapping[str, Any]) -> str:
    """What a bitwise tier compared, and what differs first."""
    whole = f"{tier['elements']:,} elements of {tier['tensors']:,} tensors"
    first = tier["first"]
    if first is None:
        return f"0 of {whole} differ from one process" if tier["tensors"] else "nothing compared"
    far = "not all finite" if first["max_ulp"] is None else f"up to {first['max_ulp']:,} ULP"
    at = f", the first at {first['index']}" if first["index"] else ""
    return (
        f"{tier['differing']:,} of {whole} differ from one process; the first in a step's order is "
        f"{first['name']} on rank {first['rank']} in step {first['step']}: {first['differing']:,} "
        f"of {first['elements']:,} elements, {far}{at}"
    )


def last_line(verdict: Verdict, directory: Any) -> str:
    """`sumgrad: FAIL ... (exit 1) in DIR`: the line scripts look for."""
    place = printable(str(directory))
    return f"sumgrad: {verdict.status.upper()} (exit {verdict.exit_code}) in {place}"


def print_report(verdict: Verdict, console: Console) -> None:
    """Write the terminal report; colour only where the console is a terminal."""
    console.print(render(verdict, width=console.width), markup=False, emoji=False)
    command = printable(verdict.data["reproduce"])
    line = Text.assemble("\n", ("reproduce  ", "dim"), command)
    console.print(line, soft_wrap=True)  # wrapped by us it could not be pasted


def number(value: Any) -> str:
    """A number as reports write it."""
    if isinstance(value, int | float):
        return f"{value:.6f}" if 0.001 <= abs(value) < 1000 else f"{value:.2e}"
    return "-" if value is None else str(value)


def fault_sentence(data: Mapping[str, Any]) -> str:
    """What a planted fault should have done and did."""
    report, name, failed = data["fault_report"], data["fault"], data["status"] == "fail"
    head = f"{name}: {report['story']}. "
    agreement = ""
    prediction = report["prediction"]
    if prediction.get("agrees") is not None:
        share = number(prediction["worst_of_threshold"])
        agreement = (
            f" The plan's own prediction {'agrees' if prediction['agrees'] else 'DISAGREES'} with "
            f"the measured gradients (worst error {share} of the threshold)."
        )
    if any(o["status"] != "ok" for o in data["outcomes"]):
        return head + "A rank did not end well, so the comparison says nothing of it."
    if report["visible"]:
        what = "It was noticed." if failed else "It is visible here and was MISSED."
    elif report["breaks_law"]:
        what = "The values are right; the law sees it in the ledger."
        if not failed:
            what = "The values are right, and --law report only warns of the ledger."
    elif data["steps"] < report["min_steps"]:
        what = f"It needs {report['min_steps']} steps to show."
    elif failed:
        what = "A false alarm: it is invisible on this topology."
    else:
        what = "It is invisible on this topology and must pass here."
    return head + what + agreement


def _lifted(lifted: list[dict[str, Any]]) -> RenderableType:
    """What the structure tier computed in float64 though the step asked for less."""
    lines = [str(entry["place"]) for entry in lifted]
    times = sum(int(entry["times"]) for entry in lifted)
    casts = f"{times} cast{'s' if times > 1 else ''} of a step to fewer digits"
    return _labelled(
        "lifted", f"{casts} computed in float64: {some_of(lines)}; --no-lift leaves them"
    )


def _losses(losses: Mapping[str, Sequence[float | str | None]]) -> RenderableType:
    """The curves that people compare by eye."""

    def one(value: float | str | None) -> str:
        return "-" if value is None else f"{float(value):.4g}"  # `nan` and `inf` are words in JSON

    def curve(values: Sequence[float | str | None]) -> str:
        return " ".join(one(x) for x in values[:MAX_LOSSES])

    single, ranks = curve(losses["single"]), curve(losses["ranks"])
    return _labelled(
        "losses", f"{single} in the single run, {ranks} on the ranks, of each step's last backward"
    )


def _fault(data: Mapping[str, Any]) -> RenderableType:
    return _labelled("planted", fault_sentence(data))


def _headline(data: Mapping[str, Any]) -> Text:
    topology = data["topology"]
    pools = ", ".join(f"{n} {axes_text(p['axes'])}" for n, p in topology["pools"].items())
    ranks = f"{topology['world_size']} rank{'s'[: topology['world_size'] > 1]}"
    ranks += f" ({pools})" if {*topology["pools"]} != {"ranks"} else ""  # a script has no pools
    steps = f"{data['steps']} steps" if data["steps"] > 1 else "1 step"
    return Text.assemble(
        (f" {data['status'].upper()} ", STYLES[data["status"]] + " reverse"),
        f"  {data['workload']} on {topology['name']}: {ranks}{_seed(data)}, {steps}"
        f"{_how_many(data['tensors'])}",
    )


def _seed(data: Mapping[str, Any]) -> str:
    """Which one a Program was given; a script has its own."""
    return "" if "losses" in data else f", seed {data['seed']}"


def axes_text(axes: Mapping[str, int]) -> str:
    """`2x3` for a pool's axes."""
    return "x".join(str(size) for size in axes.values())


def _labelled(label: str, text: str, *, style: str = "", width: int = LABEL) -> RenderableType:
    """A word, and beside it a text whose further lines begin where it begins."""
    grid = Table.grid(padding=0)
    grid.add_column(width=width, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, style="dim"), Text(text, style=style))
    return grid


# Name; "left" folds, "word" and "right", for numbers, do not; the width from which it is there.
Column = tuple[str, Literal["left", "word", "right"], int]


def _table(columns: Sequence[Column], width: int, title: str | None = None) -> Table:
    """A table of the columns that there is room for: words fold, numbers stay whole."""
    table = Table(
        title=title, title_justify="left", title_style="dim", box=None, pad_edge=False,
        header_style="dim",
    )  # fmt: skip
    for name, side, least in columns:
        if width >= least:
            justify: Literal["left", "right"] = "right" if side == "right" else "left"
            table.add_column(name, justify=justify, overflow="fold", no_wrap=side != "left")
    return table


def _row(columns: Sequence[Column], width: int, values: Sequence[Any]) -> list[Any]:
    """The values of a row for which there is a column."""
    return [v for v, (_, _, least) in zip(values, columns, strict=True) if width >= least]


def _tiers(data: Mapping[str, Any], width: int) -> RenderableType:
    columns: list[Column] = [
        ("tier", "left", 0),
        ("status", "word", 0),
        ("worst relative error" if width >= ROOMY else "worst error", "right", 0),
        ("on", "left", 72),
        ("error / threshold" if width >= ROOMY else "/ threshold", "right", 0),
        ("would see a factor off by", "right", ROOMY),
    ]
    table = _table(columns, width)
    seen: list[RenderableType] = []
    for name, tier in data["tiers"].items():
        own = [t for t in data["tensors"] if t["tier"] == name]
        power = [float(t["smallest_scale_error_caught"]) for t in own if shows_factors(t)]
        caught = f"{max(power):.1e}" if power else "-"
        values = (
            f"{name} ({tier['dtype']})",
            Text(tier["status"].upper(), style=STYLES[tier["status"]]),
            number(tier["worst_rel"]),
            tier["worst_tensor"] or "-",
            number(tier["worst_of_threshold"]),
            caught,
        )
        table.add_row(*_row(columns, width, values))
        if width < ROOMY and power:
            seen.append(_labelled("would see", f"a factor off by {caught} on any tensor of {name}"))
    told = {t["name"] for t in data["tensors"] if t["status"] != "pass" or shows_factors(t)}
    faint = {t["name"] for t in data["tensors"]} - told if told else ()
    if faint:
        why = "no gradient, or no more than noise: a factor on it does not show"
        seen.append(_labelled("faint", f"{some_of(sorted(faint))}: {why}"))
    return Group(table, *([Text("")] if seen else []), *seen)


def shows_factors(tensor: Mapping[str, Any]) -> bool:
    """Whether a factor on this gradient of a verdict's would have been seen."""
    caught = tensor["smallest_scale_error_caught"]
    return isinstance(caught, float) and caught < 1


def _how_many(tensors: Sequence[Mapping[str, Any]]) -> str:
    """Gradients that were compared, each of one tensor on one rank at one step; `34 of 36` where
    some were not."""
    compared = sum(t["status"] != "unknown" for t in tensors)
    of = f" of {len(tensors):,}" if compared < len(tensors) else ""
    return f", {compared:,}{of} gradients compared" if tensors else ""


def _diagnosis(diagnosis: Mapping[str, Any], not_tried: Sequence[str]) -> RenderableType:
    """not_tried: that there was no time for all that may say more; it stands beside the standing,
    which would be another."""
    lines = [_labelled("cause", diagnosis["cause"], style="bold")]
    if "standing" in diagnosis:  # verdicts of before have none
        lines.append(_labelled("standing", STANDINGS[diagnosis["standing"]]))
    lines += [_labelled("search", text) for text in not_tried]
    factor, symbol = diagnosis["factor"], diagnosis["symbol"]
    if factor is not None:
        shown = f"{factor} = {symbol}" if symbol and symbol != factor else factor
        lines.append(_labelled("factor", shown))
    if diagnosis["ranks"]:
        lines.append(_labelled("ranks", spans(diagnosis["ranks"])))
    for head, key in (("because", "because"), ("however", "however"), ("or", "also")):
        lines += [_labelled(head, text) for text in diagnosis[key]]
    return Group(*lines)


def _coefficients(coefficients: Sequence[Mapping[str, Any]], width: int) -> RenderableType:
    """A table for each set of parameters, with their names above it."""
    columns: list[Column] = [
        ("ranks", "left", 0), ("term", "left", 0), ("computed by", "left", 96), ("rows", "left", 0),
        ("expected", "left", 72), ("recovered", "right", 0), ("fraction", "right", 0),
    ]  # fmt: skip
    lines = in_few_lines(coefficients)
    tables: list[RenderableType] = []
    for params, own in groupby(lines[:MAX_COEFFICIENTS], key=lambda c: str(c["params"])):
        names = Text(f"how often each term was counted in {params}", style="dim")
        table = _table(columns, width)
        for c in own:
            values = (spans(c["ranks"]), c["term"], c["producer"], c["rows_text"], c["expected"],
                      c["recovered_text"], c["fraction"] or "-")  # fmt: skip
            style = "" if c["fraction"] == c["expected"] else "bold"
            table.add_row(*_row(columns, width, values), style=style)
        tables += [*([Text("")] if tables else []), names, table]
    if len(lines) > MAX_COEFFICIENTS:
        tables.append(Text(f"and {len(lines) - MAX_COEFFICIENTS} more in verdict.json"))
    return Group(*tables)


def by_ranks(failed: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[int]]]:
    """Tensors that are alike on several ranks as one with its ranks, the largest error first."""
    merged: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for t in failed:
        key = (t["tier"], t["step"], t["name"], t["status"], str(t["max_abs"]))
        merged.setdefault(key, []).append(t)

    def size(group: Sequence[Mapping[str, Any]]) -> float:
        value = group[0]["max_rel"]
        return -value if isinstance(value, int | float) else float("-inf")

    return [(group[0], [t["rank"] for t in group]) for group in sorted(merged.values(), key=size)]


def _tensors(failed: Sequence[Mapping[str, Any]], width: int) -> Table:
    columns: list[Column] = [
        ("tensor", "left", 0), ("tier", "left", WITH_TIER), ("step", "right", 0),
        ("ranks", "left", 0), ("status", "word", 0), ("max abs", "right", 112),
        ("max rel", "right", 0), ("ratio", "right", 72), ("threshold", "right", 104),
        ("at", "right", 124),
    ]  # fmt: skip
    title = "tensors that did not pass, each where it is worst, largest max rel first"
    table, groups = _table(columns, width, title), _each_once(by_ranks(failed))
    rows = []
    for t, ranks in groups[:MAX_TENSORS]:
        values = (
            t["name"],
            t["tier"],
            str(t["step"]),
            spans(ranks),
            t["status"].upper(),
            number(t["max_abs"]),
            number(t["max_rel"]),
            number(t["ratio"]),
            number(t["threshold"]),
            str(t["index"]),
        )
        rows.append(_row(columns, width, values))
    heads = [column.header for column in table.columns]
    others = zip(*[[str(x) for x in row[1:]] for row in (heads, *rows)], strict=True)
    room = width - sum(max(len(x) for x in column) + 2 for column in others)
    for name, *more in rows:
        table.add_row(folded(name, max(room, NAME)), *more)
    if len(groups) > MAX_TENSORS:
        table.caption = f"and {len(groups) - MAX_TENSORS} more in verdict.json"
    return table


def _each_once(
    groups: Sequence[tuple[Mapping[str, Any], list[int]]],
) -> list[tuple[Mapping[str, Any], list[int]]]:
    """Of each tensor what comes first, with all ranks, steps and tiers in which it ends so."""
    first: dict[tuple[str, str], Mapping[str, Any]] = {}
    ranks: dict[tuple[str, str], set[int]] = {}
    for t, own in groups:
        key = t["name"], t["status"]
        first.setdefault(key, t)
        ranks.setdefault(key, set()).update(own)
    return [(t, sorted(ranks[key])) for key, t in first.items()]


def folded(name: str, room: int) -> str:
    """A parameter's name in lines of at most `room` characters, broken after a dot, or else after
    an underscore."""
    lines = [""]
    for piece in re.findall(r"[^.]*\.|[^.]+", name):
        parts = [piece] if len(piece) <= room else re.findall(r"[^_]*_|[^_]+", piece)
        for part in parts:
            if lines[-1] and len(lines[-1]) + len(part) > room:
                lines.append("")
            lines[-1] += part
    return "\n".join(lines)


def _lists(data: Mapping[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    ended = tuple(f"rank {o['rank']} (" for o in data["outcomes"] if o["status"] != "ok")
    lists = {
        "what breaks the convention, or differs between replicas": data["findings"],
        "warnings": [
            t for t in data["warnings"] if not (data["diagnoses"] and TRIES_ON in t)
        ],  # which stands beside the cause
        # ranks that did not end well have a section of their own
        "not compared": [t for t in data["not_compared"] if not t.startswith(ended or ("\0",))],
        "not known" if data["status"] == "unknown" else "could not have been seen": sorted(
            {r for tier in data["tiers"].values() for r in tier["reasons"]}
        ),
    }
    for title, items in lists.items():
        if items:
            parts += [Text(""), Text(title, style="dim")]
            parts += [_labelled("", item, width=2) for item in items[:MAX_RANKS_SHOWN]]
            if len(items) > MAX_RANKS_SHOWN:
                parts.append(Text(f"  and {len(items) - MAX_RANKS_SHOWN} more in verdict.json"))
    return parts


def _outcomes(data: Mapping[str, Any]) -> list[RenderableType]:
    """Ranks that did not end well, the one that explains the others first and with its stack."""
    bad = [outcome_from_json(o) for o in data["outcomes"] if o["status"] != "ok"]
    if not bad:
        return []
    first = first_to_fail(bad)
    lines = [
        Text(""),
        Text(
            f"{len(bad)} of {len(data['outcomes'])} ranks did not end well, so "
            f"they were not compared",
            style="dim",
        ),
    ]
    others = [o for o in bad if o is not first]
    for o in [first, *others[: MAX_RANKS_SHOWN - 1]]:
        place = f"in {o.waiting_in}" if o.waiting_in else "in no collective"
        status = o.status.replace("_", " ")
        detail = str(o.detail)
        what = detail if detail.startswith(status) else f"{status}: {detail}"
        lines.append(Text(f"  rank {o.rank} ({o.pool}) {what}; {place}"))
        text = users_frames(o.stack) if o.stack else o.output
        if o is first and text:
            lines += [Text(f"      {line}", style="dim") for line in _telling_lines(text)]
    if len(bad) > MAX_RANKS_SHOWN:
        lines.append(Text(f"  and {len(bad) - MAX_RANKS_SHOWN} more in verdict.json"))
    return list(lines)


def users_frames(stack: str) -> str:
    """A traceback without the frames of ours that it begins with; whole if it has no others."""
    head, *frames = _FRAME.split(stack)
    last = next((i for i, frame in enumerate(frames) if not _OURS.match(frame)), 0)
    return head + "".join(frames[last:])


def _telling_lines(text: str) -> list[str]:
    """The end of a traceback; of faulthandler's, which has the innermost frame first, the start."""
    lines = text.strip().splitlines()
    fatal = next((i for i, line in enumerate(lines) if "Fatal Python error" in line), None)
    if fatal is not None:
        return lines[fatal : fatal + MAX_STACK_LINES]
    return lines[-MAX_STACK_LINES:]
