"""A stored run judged, at once or years later: read, judge, write the verdict beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sumgrad.base.errors import UserError
from sumgrad.base.files import finite, read_json, write_bytes, write_json
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.verdict import judge
from sumgrad.judge.checks.complete import IN_NO_TIER
from sumgrad.record.directory import load_record
from sumgrad.record.manifest import find_changes, write_manifest
from sumgrad.report.files import to_markdown

SECOND_LOOKS = "second_looks.json"  # what other runs of a failed one showed, in words


def judge_directory(
    directory: Path, *, law: str | None = None, progress: Callable[[str], object] = lambda _: None
) -> Verdict:
    """Judge a stored run again. Raises UserError.

    Files that are not what the run wrote are not read; a run with such files never passes.
    """
    if not (directory / "run.json").exists():
        raise UserError(f"{directory}: no run.json; expected a run directory")
    progress("looking whether the files are what the run wrote")
    changes = find_changes(directory)
    if "run.json" in changes.files:
        raise UserError(f"{directory / 'run.json'}: {changes.files['run.json']}")
    try:
        progress("reading the ranks' records and the reference")
        record = load_record(directory, changes=changes)
        progress(f"comparing {len(record.spec.params)} gradients of {len(record.ranks)} ranks")
        verdict = judge(replace(record, spec=replace(record.spec, law=law or record.spec.law)))
        looks = directory / SECOND_LOOKS
        if verdict.status == "pass" or changes.files.get(looks.name) or not looks.is_file():
            return verdict
        return with_warnings(verdict, [str(text) for text in read_json(looks)])
    except UserError:
        raise
    except Exception as error:
        if not changes.reasons:
            raise
        text = f"damaged, cannot be judged: {type(error).__name__}: {error}"
        raise UserError([f"{directory}: {text}", *changes.reasons]) from error


def with_second_look(directory: Path, verdict: Verdict, texts: Sequence[str]) -> Verdict:
    """The verdict with what another run of a failed one showed, which is kept with the run."""
    path = directory / SECOND_LOOKS
    before = read_json(path) if path.is_file() else []
    write_json(path, [*before, *texts])
    write_manifest(directory)
    return with_warnings(verdict, texts)


def is_right_in_float64(verdict: Verdict) -> bool:
    """Whether it is a PASS, or were one but for casts that no tier has made as they are written."""
    others = [text for text in verdict.reasons if not text.startswith(IN_NO_TIER)]
    unknown = verdict.status == "unknown" and bool(verdict.reasons)
    return verdict.status == "pass" or (unknown and not others)


def with_warnings(verdict: Verdict, texts: Sequence[str]) -> Verdict:
    """The same, saying more."""
    data = {**verdict.data, "warnings": [*verdict.data["warnings"], *texts]}
    return replace(verdict, warnings=(*verdict.warnings, *texts), data=data)


def written(directory: Path, verdict: Verdict) -> Verdict:
    """The verdict, once it is in the directory: verdict.json and report.md."""
    verdict = replace(verdict, data=finite(verdict.data))
    write_json(directory / "verdict.json", verdict.data)
    write_bytes(directory / "report.md", to_markdown(verdict).encode())
    return verdict
