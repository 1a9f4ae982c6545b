"""A failing step whose code goes by hashes of strings, once more with the same ones everywhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from sumgrad.base.interpreter import HASH_SEED
from sumgrad.diagnose.verdict import judge
from sumgrad.record.directory import Record, load_record
from sumgrad.record.one_hash import FOLDER, OneHash, write_one_hash
from sumgrad.record.reference import Grads
from sumgrad.record.spec import RunSpec, write_spec

RunRanks = Callable[[RunSpec, Path], object]
ROUNDING = 1e-4  # what two runs may differ by of a gradient's largest element, in any precision


def try_one_hash(spec: RunSpec, directory: Path, run_ranks: RunRanks) -> OneHash:
    """What comes of it, kept with the run. run_ranks: what is asked for, ranks and reference, into
    a directory. Nothing else than the hashes is otherwise: ranks are started in the same way."""
    place = directory / FOLDER
    place.mkdir()
    write_spec(place, spec)
    with _one_hash():
        run_ranks(spec, place)
    first, then = load_record(directory), load_record(place)
    passes = judge(then).status == "pass"
    return write_one_hash(directory, passes=passes, changed=_changed(first, then))


@contextlib.contextmanager
def _one_hash() -> Iterator[None]:
    before = os.environ.get(HASH_SEED)
    os.environ[HASH_SEED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[HASH_SEED]
        else:
            os.environ[HASH_SEED] = before


def _changed(first: Record, then: Record) -> list[str]:
    """Parameters whose gradient is another in the second run; none where the first has two that
    are unlike itself."""
    found: dict[str, None] = {}
    last = first.spec.steps - 1
    for rank, held in first.ranks.items():
        if _unlike(held.again, held.grads.get((held.again_tier, last), {})):
            return []
        other = then.ranks.get(rank)
        for at, grads in held.grads.items() if other is not None else ():
            assert other is not None
            found |= dict.fromkeys(_unlike(grads, other.grads.get(at, {})))
    return [*found]


def _unlike(some: Grads, others: Grads) -> list[str]:
    return [
        name
        for name, one in some.items()
        if (other := others.get(name)) is not None
        and one.shape == other.shape
        and one.numel()
        and not bool((one - other).abs().max() <= ROUNDING * one.abs().max())
    ]
