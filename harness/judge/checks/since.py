"""The single run of now beside one that was kept as projections: does it still do the same?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sumgrad.base.outcome import some_of
from sumgrad.judge.finding import Compared, Finding
from sumgrad.record.spec import Changed


def the_single_run_as_it_was_kept(compared: Compared) -> Iterator[Finding]:
    """A gradient of one process that is another than it was, though it started alike."""
    script = compared.record.spec.script
    since = script.since if script else None
    if since is None:
        return
    kept = f"the run kept as {since.name!r} ({since.made})"
    if since.changed:
        worst = max(since.changed, key=_times_the_bound)
        names = some_of([worst.name, *(c.name for c in since.changed if c is not worst)])
        share = f"by {worst.off / worst.size:.2g} of its size" if worst.size else "from nothing"
        yield Finding(
            level="fail",
            text=f"one process alone computes other gradients than {kept}: at step {worst.step} "
            f"{names}, the first {share} (noise allows {worst.bound / (worst.size or 1.0):.1e}); "
            f"the code, a library or the data changed what it computes",
        )
    else:
        text = (
            f"the single run gives the gradients of {kept}: {since.tensors} tensors, compared by "
            f"random projections"
        )
        yield Finding(level="warning", text=text)


def _times_the_bound(changed: Changed) -> float:
    over = changed.off / changed.bound if changed.bound else math.inf
    return math.inf if math.isnan(over) else over
