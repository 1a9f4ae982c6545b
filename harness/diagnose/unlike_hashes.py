"""What goes by Python's hashes of strings, which are others in each process."""

from __future__ import annotations

from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis
from sumgrad.record.directory import Record

UNLIKE_HASHES = "unlike_hashes"


def unlike_hashes(record: Record) -> Diagnosis | None:
    """Where the step gives something else once all ranks have the same ones."""
    facts, found = record.spec.facts, record.one_hash
    if facts is None or found is None or not (found.passes or found.changed):
        return None
    lines = f"{'one of ' if len(facts.hashed) > 1 else ''}{some_of(list(facts.hashed))}"
    same = "with the same hash on all ranks (PYTHONHASHSEED) and nothing else otherwise"
    became = "every gradient of every rank is right"
    if not found.passes:
        became = f"{some_of(list(found.changed))} has another gradient, and is still wrong"
    return Diagnosis(
        cause=f"{lines} goes by Python's hash of strings, or by the order of a set, which is "
        f"another one in each process: the ranks do not do the same, as they would with what is "
        f"sorted, or with a hash that is the same everywhere",
        kind=UNLIKE_HASHES,
        standing="proved" if found.passes else "likely",
        because=(f"{same}, {became}: it was run so",),
        however=() if found.passes else ("something else may be wrong beside it",),
    )
