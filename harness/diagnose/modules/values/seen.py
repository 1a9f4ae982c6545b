"""One tensor of one call on one rank, as far as it is the single process's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from sumgrad.diagnose.modules.values.matching import (
    SAME_FACTOR,
    Compared,
    Match,
    compare_gradient,
    has_zeros_beyond,
    match,
    vectors,
)
from sumgrad.diagnose.modules.values.order import in_order
from sumgrad.diagnose.modules.values.whole import Whole, rows_of, vectors_a_row
from sumgrad.record.trace import Call, Trace
from torch import Tensor

TOLERANCES = {"float64": 1e-8, "float32": 1e-4}
COARSE = 3e-2
FEWEST_PLACES = 4  # of a row that is told by what stands at them
FEWEST_LIVE = 3  # elements of a vector that tell which it is
MOST_MISSING = 64  # vectors of which not all elements may count
State = Literal["right", "wrong", "part", "untold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A row (P, C) of a tensor (..., P, C) of a rank, by its number. of: two rows of the single
    process's; at: the places, of P, where it has the vectors of the first, and of the second."""

    row: int
    of: tuple[int, int]
    at: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """One tensor of one call on one rank. forward: its output; backward: what reached it.

    where: which vectors it is, if all of them were found; wrong: those of its vectors that are not
    right, in the forward or else in the backward. rows: (n,) of the batch, -1 where they are not
    told. factors: (n,) of the gradient's vectors, and terms: (n, T) of each term's. axis: over the
    ranks of which the gradient, or else the output, adds up to the right one. shared: what all rows
    share. over_all: of such, what reached it on all ranks together. shifted: some of its vectors
    stand further to one side, and what reaches them was not compared. in_order: each row of a right
    output is a stretch of one of the single process's. mixed: rows of its last
    dimensions but one, which are put together of two of the single process's; wrong are those.
    """

    rank: int
    call: Call
    shape: tuple[int, ...]
    forward: State = "untold"
    backward: State = "untold"
    where: Match | None = None
    wrong: Tensor | None = None
    rows: Tensor | None = None
    factors: Tensor | None = None
    terms: Tensor | None = None
    axis: str | None = None
    shared: bool = False
    over_all: State = "untold"
    shifted: bool = False
    in_order: bool = False
    mixed: tuple[Mixed, ...] = ()
    told_by: Call | None = None
    at: int = 0


def see(
    rank: int, trace: Trace, i: int, whole: Mapping[tuple[str, int], Whole], tolerance: float
) -> Seen:
    call, output, gradient = trace.calls[i], trace.outputs[i], trace.gradients[i]
    seen = Seen(rank=rank, call=call, shape=tuple(output.shape), at=i)
    if call.module in trace.left_out:
        return seen
    wanted, got = whole.get((call.module, call.part)), vectors(output)
    where = None if wanted is None else match(got, wanted.outputs, tolerance)
    if where is None or wanted is None:
        return seen
    if not bool(where.here.all()) and has_zeros_beyond(got, wanted.outputs, tolerance):
        return seen  # as the halo of a rank at the border, whose zeros may be meant
    every = len(where.picked)
    where = _no_padding_with_a_gradient(where, got, gradient)
    where = _by_what_counts(where, got, wanted, gradient, tolerance)
    shifted = len(where.picked) < every
    where = _that_count(where, gradient)
    if not bool(where.here.all()):
        if _is_beside_the_loss(call, whole):
            return seen
        lost = (
            gradient is None and _got_elsewhere(trace, call) and bool(wanted.gradients.any(1).all())
        )
        if not lost and not seen.shape:
            return seen  # one number is no slice of another: a loss of fewer rows, a mean
        wrong = None if lost else where.picked[~where.here]
        back: State = "wrong" if lost else "untold"
        return replace(seen, forward="wrong", backward=back, wrong=wrong)
    out_of_place = _out_of_place(seen, where, wanted, gradient)
    if out_of_place is not None:
        return out_of_place
    if not bool(where.found.any()):
        return seen  # zeros may be padding, and may be what is left of anything
    rows = None if wanted.rows is None else rows_of(where, wanted.rows, seen.shape[0])
    shared = wanted.rows is None and len(got) <= wanted.each and not wanted.flat
    ordered = in_order(where, wanted, seen.shape)
    seen = replace(seen, forward="right", where=where, rows=rows, shared=shared, in_order=ordered)
    if call.recomputed and gradient is None:
        return seen
    if gradient is None:
        return replace(seen, backward="wrong" if _is_needed(where, wanted) else "untold")
    found = compare_gradient(vectors(gradient), wanted.gradients, where, tolerance, wanted.by_term)
    if not bool(found.right.all()):
        # What all rows share has the gradient of them all; a rank has that of its own.
        state: State = "untold" if seen.shared else "wrong"
        factors = found.factors.masked_fill(~found.right, float("nan"))
        return replace(seen, backward=state, wrong=where.picked[~found.right], factors=factors)
    if shifted:
        return replace(seen, shifted=True)
    telling = wanted.directions > max(1, found.terms.shape[1]) or one_factor(found)
    mixed = bool((found.factors.isnan() & ~found.terms.isnan().all(1)).any())
    factors = found.factors.masked_fill(_of_which_is_not_told(where, wanted), float("nan"))
    return replace(
        seen,
        backward="right" if telling else "untold",
        factors=factors if telling and not mixed else None,
        terms=found.terms if telling and found.terms.shape[1] else None,
    )


def _of_which_is_not_told(where: Match, wanted: Whole) -> Tensor:
    """(n,) bool: single numbers that several rows have, whose gradients differ: any may be meant,
    and any factor fits."""
    out = torch.zeros(len(where.picked), dtype=torch.bool)
    if wanted.gradients.shape[1] > 1:
        return out
    for i in (where.found.sum(1) > 1).nonzero()[:, 0].tolist():
        its = wanted.gradients[where.found[i]]
        out[i] = bool((its - its[0]).abs().max() > SAME_FACTOR * its.abs().max())
    return out


def _no_padding_with_a_gradient(where: Match, got: Tensor, gradient: Tensor | None) -> Match:
    """What stands there again and again and counts in the loss is no padding; zeros may be a part
    of a sum."""
    if gradient is None or not bool(where.empty.any()):
        return where
    counts = vectors(gradient)[where.picked].any(1) & got[where.picked].any(1)
    return replace(where, empty=where.empty & ~counts)


def _by_what_counts(
    where: Match, got: Tensor, wanted: Whole, gradient: Tensor | None, tolerance: float
) -> Match:
    """With vectors that are there in all elements with which the rank's own loss changes, as those
    of a row's positions are but for its padding; and without those that are so further to the left
    or right, as where rows are padded on one side."""
    missing = (~where.here).nonzero()[:, 0].tolist()
    if gradient is None or not missing or len(missing) > MOST_MISSING:
        return where
    live = vectors(gradient)[where.picked] != 0
    start, end = where.columns
    whole = wanted.outputs
    bound = tolerance * float(whole.abs().max())
    found, keep = where.found.clone(), torch.ones(len(live), dtype=torch.bool)
    for i in missing:
        here = live[i]
        if int(here.sum()) < FEWEST_LIVE or bool(here.all()):
            continue
        mine = got[where.picked[i]][here]
        found[i] = (mine - whole[:, start:end][:, here]).abs().amax(1) <= bound
        stretches = whole.unfold(1, len(mine), 1)  # (N, places, n)
        elsewhere = bool(((mine - stretches).abs().amax(2) <= bound).any())
        keep[i] = bool(found[i].any()) or not (_is_one_stretch(here) and elsewhere)
    return replace(where, found=found[keep], picked=where.picked[keep], empty=where.empty[keep])


def _is_one_stretch(here: Tensor) -> bool:
    at = here.nonzero()[:, 0]
    return int(at[-1]) - int(at[0]) + 1 == len(at)


def _that_count(where: Match, gradient: Tensor | None) -> Match:
    """Without vectors that are not there and with which the rank's own loss does not change, as
    with what is computed of padding, if others of the call are there."""
    missing = ~where.here
    if gradient is None or not bool(missing.any()) or not bool(where.found.any()):
        return where
    keep = where.here | vectors(gradient)[where.picked].any(1)
    return replace(
        where, found=where.found[keep], picked=where.picked[keep], empty=where.empty[keep]
    )


def _out_of_place(seen: Seen, where: Match, wanted: Whole, gradient: Tensor | None) -> Seen | None:
    """What is seen of an output whose vectors are all there, if some stand where others belong."""
    counts = ~where.empty
    if gradient is not None and bool(gradient.any()):
        # Not those that no gradient reaches, as of a table that is cut those that others hold.
        counts &= vectors(gradient)[where.picked].any(1)
    strange = _of_other_rows(where, wanted, seen.shape, counts)
    if strange is not None:
        return replace(seen, forward="wrong", wrong=where.picked[strange])
    of_two, others = _of_two_rows(where, wanted, seen.shape, counts)
    if of_two and not others:
        return seen  # of another layout: whether all is in its place, is not told
    if of_two:
        strange = torch.isin(where.picked // wanted.inner, torch.tensor([m.row for m in of_two]))
        return replace(seen, forward="wrong", wrong=where.picked[strange], mixed=of_two)
    return None


def _of_other_rows(
    where: Match, wanted: Whole, shape: tuple[int, ...], counts: Tensor
) -> Tensor | None:
    """(n,) bool: vectors that stand in a row of which others stand where they do in the single
    process, and that none of that row's own is; None where there are none. counts: (n,) bool, of
    which vectors."""
    if len(shape) != 3 or wanted.rows is None:
        return None
    theirs = vectors_a_row(wanted.rows)
    if not theirs or theirs != shape[1]:
        return None
    found = where.found.reshape(len(where.found), -1, theirs)
    own, at = where.picked // theirs, where.picked % theirs
    here = found[torch.arange(len(at)), :, at]  # (n, num_rows): at its position of which rows
    strange = torch.zeros(len(at), dtype=torch.bool)
    for row in own.unique():
        mine = (own == row) & counts
        often = here[mine].sum(0)
        best = int(often.argmax())
        if int(often[best]) < 2 or int((often == often[best]).sum()) > 1:
            continue
        strange |= mine & ~found[:, best].any(1)
    return strange if bool(strange.any()) else None


def _of_two_rows(
    where: Match, wanted: Whole, shape: tuple[int, ...], counts: Tensor
) -> tuple[tuple[Mixed, ...], bool]:
    """Rows that have at some places what one row of the single process has there, and at the others
    what another has; and whether another row of the same call is one of theirs throughout. counts:
    (n,) bool, of which vectors."""
    inner = wanted.inner
    if inner < FEWEST_PLACES or len(shape) < 3 or shape[-2] != inner:
        return (), False
    found = where.found.reshape(len(where.found), -1, inner)
    own, at = where.picked // inner, where.picked % inner
    here = found[torch.arange(len(at)), :, at]  # (n, rows): at its place of which rows
    out, whole = [], False
    for row in own.unique().tolist():
        mine = (own == row) & counts
        has = here[mine]
        if len(has) < FEWEST_PLACES or bool(has.all(0).any()):
            whole |= len(has) >= FEWEST_PLACES
            continue
        first = int(has.sum(0).argmax())
        rest = has[~has[:, first]]
        second = int(rest.sum(0).argmax())
        if min(len(has) - len(rest), len(rest)) < 2 or not bool(rest[:, second].all()):
            continue
        place, of_first = at[mine], has[:, first]
        places = tuple(place[of_first].tolist()), tuple(place[~of_first].tolist())
        out.append(Mixed(row=row, of=(first, second), at=places))
    return tuple(out), whole


def _got_elsewhere(trace: Trace, call: Call) -> bool:
    """Whether another part of the same call's output got a gradient."""
    return not call.recomputed and any(
        (other.module, other.number) == (call.module, call.number)
        and other.part != call.part
        and gradient is not None
        for other, gradient in zip(trace.calls, trace.gradients, strict=True)
    )


def one_factor(found: Compared) -> bool:
    """Of all vectors, or for each term: one number would have fitted few of them by chance."""
    if constant(found.factors) is not None:
        return True
    told = [own[~own.isnan()] for own in found.terms.unbind(1)]
    return bool(told) and all(len(own) and constant(own) is not None for own in told)


def _is_beside_the_loss(call: Call, whole: Mapping[tuple[str, int], Whole]) -> bool:
    """Whether no gradient reaches this part of an output and one does reach another, as of a state
    that is handed on."""
    live = {part: bool(held.gradients.any()) for (m, part), held in whole.items()
            if m == call.module}  # fmt: skip
    return any(live.values()) and not live.get(call.part, False)


def _is_needed(where: Match, wanted: Whole) -> bool:
    """Whether some gradient reaches these vectors in one process."""
    held = where.found.any(0)
    return bool(wanted.gradients[held].any())


def constant(factors: Tensor | None) -> float | None:
    """The one factor of all vectors that tell one."""
    if factors is None:
        return None
    told = factors[~factors.isnan()]
    if not len(told) or float((told - told[0]).abs().max()) > SAME_FACTOR * float(told[0].abs()):
        return None
    return float(told[0])
