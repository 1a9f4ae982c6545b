"""What was kept for the backward and came back as something else, in words."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import line_from_here
from sumgrad.record.computed import Unlike

KINDS = ("backward", "own_backward", "open")  # that say no more than where


def with_what_was_kept(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause in the backward, and the tensors that its hooks for saved ones gave back wrong."""
    traces = case.traces
    if diagnosis.kind not in KINDS or traces is None:
        return diagnosis
    found: dict[tuple[str, str], dict[str, None]] = {}
    ranks = set()
    for rank, trace in traces.ranks.items():
        for one in trace.computed.unlike:
            found.setdefault(_hooks(one), {})[line_from_here(one.line)] = None
            ranks.add(rank)
    if not found:
        return diagnosis
    (pack, unpack), lines = next(iter(found.items()))
    cause = (
        f"what autograd kept for the backward at {some_of([*lines])} came back as something else "
        f"on rank {spans(sorted(ranks))}: it goes through the hooks for saved tensors at {pack} "
        f"and {unpack}"
    )
    because = (diagnosis.cause.removeprefix("open: "),)
    return replace(
        diagnosis, cause=cause, because=because, standing="likely", kind="saved_input",
        ranks=tuple(sorted(ranks)),
    )  # fmt: skip


def _hooks(one: Unlike) -> tuple[str, str]:
    return line_from_here(one.pack), line_from_here(one.unpack)
