"""How a rank ended, from the files it left: its end record, its ledger, its log, its exit code."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sumgrad.base.files import is_regular, read_json
from sumgrad.base.outcome import RankOutcome, Status, describe_operation

OUTPUT_TAIL = 4000
OPERATION = {"n", "label", "op", "group", "dtype", "numel", "site"}  # of every ledger event


def rank_file(directory: Path, rank: int, suffix: str) -> Path:
    """`ranks/rank_00003SUFFIX` in a run directory."""
    return directory / "ranks" / f"rank_{rank:05d}{suffix}"


def read_end_record(directory: Path, rank: int) -> dict[str, Any] | None:
    """The end record of a rank, or None where there is none that can be read."""
    try:
        data = read_json(rank_file(directory, rank, ".json"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) and "status" in data else None


def outcome_from_record(
    directory: Path, rank: int, pool: str, *, exit_code: int | None = None
) -> RankOutcome:
    """What became of a rank, from the files it left and, where known, its exit code."""
    record = read_end_record(directory, rank)
    log, ledger = _tail(directory, rank), _last_operation(directory, rank)
    stack = _read(rank_file(directory, rank, ".stack"))
    if record is not None and (exit_code in (None, 0) or record["status"] != "ok"):
        status: Status = record["status"]
        ended_badly = status != "ok"
        return RankOutcome(
            rank=rank,
            pool=pool,
            status=status,
            exit_code=exit_code if exit_code is not None else (0 if status == "ok" else 1),
            seconds=record.get("seconds"),
            detail=record.get("detail"),
            waiting_in=record.get("waiting_in"),
            stack=record.get("stack"),
            output=log if ended_badly else None,
            ended_at=record.get("ended_at"),
        )
    if exit_code is not None and exit_code < 0:
        status, detail = "killed", f"killed by {_signal_name(-exit_code)}"
    elif exit_code == 0:
        status, detail = "missing", "exited with code 0 before it had finished"
    elif exit_code is not None:
        when = "after" if record is not None else "before"
        status, detail = "raised", f"exited with code {exit_code} {when} it had finished"
    else:
        status, detail = "missing", "left no end record"
    return RankOutcome(
        rank=rank,
        pool=pool,
        status=status,
        exit_code=exit_code,
        detail=detail,
        waiting_in=ledger,
        stack=stack or None,
        output=log,
    )


def open_operation(ledger: Path) -> dict[str, Any] | None:
    """The oldest operation in a ledger file that started and is not done."""
    events = {e["n"]: e for e in read_ledger(ledger) if "n" in e}
    for event in read_ledger(ledger):
        if "done" in event:
            events.pop(event["done"], None)
    return next(iter(events.values()), None)


def stands_in_operation(ledger: Path) -> bool:
    """Whether a rank cannot go on before an operation is done: one that was asked for without
    waiting holds it up from its wait on."""
    waiting: set[int] = set()
    for event in _lines(ledger):
        if "waits" in event or ("n" in event and not event.get("async")):
            waiting.add(event["waits"] if "waits" in event else event["n"])
        elif "done" in event or "ends" in event:
            waiting.discard(event["done"] if "done" in event else event["ends"])
    return bool(waiting)


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """The operations of a ledger file, begun and done, that can be read."""
    yield from (e for e in _lines(path) if set(e) >= OPERATION or "done" in e)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those that can be read; a last line cut off by a crash is left out."""
    try:
        lines = path.read_text().splitlines() if is_regular(path) else []
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event


def _last_operation(directory: Path, rank: int) -> str | None:
    return describe_operation(open_operation(rank_file(directory, rank, ".ledger.jsonl")))


def _tail(directory: Path, rank: int) -> str | None:
    text = _read(rank_file(directory, rank, ".log"))
    return text[-OUTPUT_TAIL:] if text else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace") if is_regular(path) else None
    except OSError:
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
