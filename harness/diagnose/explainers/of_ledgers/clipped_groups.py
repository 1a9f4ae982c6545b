"""Groups of parameters that were each clipped by the norm of the group, and not by that of all."""

from __future__ import annotations

from collections.abc import Sequence

from sumgrad.diagnose.case import Case

SAME_NORM = 1e-4  # of the norm: torch adds 1e-6 to the norm that it divides by
MOST_GROUPS = 8


def clipped_by_groups(case: Case, groups: Sequence[Sequence[str]]) -> str:
    """In words, where groups with a factor each have one norm as they are measured; else empty.

    groups: names of parameters. Every element counts once, on whatever rank it is.
    """
    if not 2 <= len(groups) <= MOST_GROUPS:
        return ""
    group_of = {name: i for i, names in enumerate(groups) for name in names}
    squares = [0.0] * len(groups)
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for cell in case.cells:
        place = () if cell.index is None else tuple(cell.index.reshape(-1).tolist())
        if cell.name in group_of and (cell.name, place) not in seen:
            seen.add((cell.name, place))
            squares[group_of[cell.name]] += float(cell.measured.square().sum())
    norms = [square**0.5 for square in squares]
    if not min(norms) or max(norms) - min(norms) > SAME_NORM * max(norms):
        return ""
    return (
        f"each of these {len(groups)} groups has the norm {norms[0]:.4g} as it is measured: that "
        f"is what clipping each by its own norm to {norms[0]:.4g} does, where one norm is of all"
    )
