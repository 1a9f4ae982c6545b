"""What the ranks put into a collective, fitted to what its sum should be.

Each rank's part has a factor: all 1 where the sum is right; other numbers, other ranks, or the step
before where it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.over_ranks.collectives import SAME, Collective, part_of_rank
from sumgrad.diagnose.modules.over_ranks.right_sums import Truth
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fitted:
    """The right sum as factors times what ranks put in, now and in the step before."""

    truth: Truth
    factors: Mapping[int, float]
    before: Mapping[int, float]

    @property
    def all_once(self) -> bool:
        return not self.before and all(abs(c - 1) <= SAME for c in self.factors.values())


def fit_parts(
    op: Collective, ranks: Sequence[int], truth: Truth, tolerance: float, *, with_before: bool
) -> Fitted | None:
    """None where no factors leave less than the tolerance."""
    given = op.given(ranks)
    if given is None or given[0].numel() != truth.target.numel():
        return None
    columns = list(given)
    earlier = [r for r in ranks if with_before and op.by_rank[r].before is not None]
    for rank in earlier:
        held = op.by_rank[rank].before
        assert held is not None
        columns.append(held.double().reshape(-1))
    if with_before and not earlier:
        return None
    num = len(columns)
    columns += [t for t in truth.beside if t.numel() == truth.target.numel()]
    solved = solve(torch.stack(columns, 1), truth.target, tolerance, len(ranks), told=num)
    if solved is None:
        return None
    own = dict(zip(ranks, solved[: len(ranks)].tolist(), strict=True))
    old = dict(zip(earlier, solved[len(ranks) : len(ranks) + len(earlier)].tolist(), strict=True))
    old = {rank: c for rank, c in old.items() if abs(c) > SAME}
    return Fitted(truth=truth, factors=own, before=old)


def solve(
    columns: Tensor, target: Tensor, tolerance: float, num: int, told: int | None = None
) -> Tensor | None:
    """Factors of columns that are the target; None where there are none.

    columns: (n, k), target: (n,). num: how many of the columns, the first, should enter once. told:
    of how many, the first, the factor must be told by the target; all by default.
    """
    told = columns.shape[1] if told is None else told
    live = columns.abs().amax(0) > 0
    if not bool(live[:told].any()) or not bool(columns.isfinite().all() & target.isfinite().all()):
        return None
    if len(target) < 2 * columns.shape[1]:
        return _once_but_one(columns[:, :told], target, tolerance, num)
    parts, others = columns[:, :told][:, live[:told]], columns[:, told:][:, live[told:]]
    both = torch.cat([parts, others], 1)
    if _rank(both) < parts.shape[1] + _rank(others):
        return None
    found = torch.linalg.lstsq(both, target[:, None], driver="gelsd").solution[:, 0]
    bound = tolerance * float(target.abs().max()) * max(1.0, float(found.abs().max()))
    if not float((both @ found - target).abs().max()) <= bound:
        return None
    out = torch.ones(told, dtype=torch.float64)
    out[live[:told]] = found[: parts.shape[1]]
    return out


def _rank(columns: Tensor) -> int:
    if not columns.shape[1]:
        return 0
    unit = columns / columns.norm(dim=0, keepdim=True)
    return int(torch.linalg.matrix_rank(unit, rtol=1e-9))


def _once_but_one(columns: Tensor, target: Tensor, tolerance: float, num: int) -> Tensor | None:
    """The same of few numbers: the first columns once, the others not, or one of all otherwise."""
    bound = tolerance * float(target.abs().max())
    usual = torch.zeros(columns.shape[1], dtype=torch.float64)
    usual[:num] = 1
    left = target - columns @ usual
    if float(left.abs().max()) <= bound:
        return usual
    for i in range(columns.shape[1]) if len(target) > 2 else ():
        square = float(columns[:, i].square().sum())
        more = float(left @ columns[:, i]) / square if square else 0.0
        if more and float((left - more * columns[:, i]).abs().max()) <= bound:
            usual[i] += more
            return usual
    return None


def is_whole_already(op: Collective, truth: Truth, tolerance: float) -> bool:
    """Whether every rank puts in the same, which is the right result as it is."""
    given = op.given(op.ranks)
    if given is None or len(given) < 2 or given[0].numel() != truth.target.numel():
        return False
    if not all(torch.equal(given[0], other) for other in given[1:]):
        return False
    columns = [given[0], *(t for t in truth.beside if t.numel() == truth.target.numel())]
    found = solve(torch.stack(columns, 1), truth.target, tolerance, 1, told=1)
    return found is not None and abs(float(found[0]) - 1) <= SAME


def accounts_for(off: Tensor | None, op: Collective, right: Tensor, tolerance: float) -> bool:
    """Whether a tensor is off by what the collective's result is, were `right` right; and is off.

    right: (n,) as what goes in.
    """
    got = op.own.got
    if off is None or got is None or got.numel() != len(off):
        return False
    wanted = part_of_rank(op, right)
    lacks = got.double().reshape(-1) - wanted
    size = tolerance * max(float(wanted.abs().max()), float(got.abs().max()))
    return bool((off.abs() > size).any()) and float((off - lacks).abs().max()) <= size
