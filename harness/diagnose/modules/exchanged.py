"""Collectives of a failing step by value: what each rank put in, beside what is right there.

Where something is wrong after a collective and right before it, the single process has what its
result should be. What the ranks put in is fitted to that, each rank's part with a factor: all 1
where the sum is right, other numbers, other ranks or the step before where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.look import Look, Seen
from sumgrad.diagnose.modules.matching import vectors
from sumgrad.diagnose.modules.whole import Whole
from sumgrad.ledger.operations import FAMILIES, REDUCTIONS, members
from sumgrad.record.exchanged import Exchange
from sumgrad.record.trace import INTO, Trace, Traces
from torch import Tensor

MAX_SLICES = 8  # of a module's features that a collective's tensor may be
MAX_ORDERS = 32  # orders of vectors that are tried
SAME = 1e-6  # a factor closer to another than this is the same


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joint:
    """One collective as a rank's group issued it, and the like one of every other rank.

    event: the rank's, of its ledger. ranks: the group's, in its order. by_rank: the exchange of
    every rank that issued the same line's operation as often before.
    """

    rank: int
    event: Mapping[str, object]
    ranks: tuple[int, ...]
    by_rank: Mapping[int, Exchange]

    @property
    def own(self) -> Exchange:
        return self.by_rank[self.rank]

    @property
    def family(self) -> str:
        return FAMILIES.get(str(self.event["op"]), str(self.event["op"]))

    @property
    def is_sum(self) -> bool:
        return self.family in REDUCTIONS and self.event.get("reduce") in ("SUM", "AVG")

    def given(self, ranks: Sequence[int]) -> list[Tensor] | None:
        """What these ranks put in, as float64; None unless all did, each as much."""
        found = [self.by_rank[r].given for r in ranks if r in self.by_rank]
        if len(found) < len(ranks) or len({t.numel() for t in found}) > 1:
            return None
        return [t.double().reshape(-1) for t in found]


def joints(traces: Traces, rank: int, start: int, end: int) -> list[Joint]:
    """The collectives of floating numbers that a rank issues from one number to another."""
    mine = traces.ranks[rank]
    known = {one.number for one in mine.exchanges}
    out = []
    for number in range(start, end):
        if number not in known or number >= len(mine.events):
            continue
        event = mine.events[number]
        ranks = members(event)
        if len(ranks) < 2:
            continue
        nth = sum(_alike(e, event) for e in mine.events[:number])
        by_rank = {}
        for other, trace in traces.ranks.items():
            numbers = [n for n, e in enumerate(trace.events) if _alike(e, event)]
            held = {one.number: one for one in trace.exchanges}
            if nth < len(numbers) and numbers[nth] in held:
                by_rank[other] = held[numbers[nth]]
        out.append(Joint(rank=rank, event=event, ranks=ranks, by_rank=by_rank))
    return out


def _alike(event: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return (event["op"], event["site"], event["label"]) == (
        other["op"], other["site"], other["label"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truth:
    """What a collective's sum should be: `module`'s output, or its gradient, in one process.

    target: (n,) as the tensor that goes in, of these columns of the module's. beside: (n,) each,
    what may be in it besides the sum: a bias, what goes around it.
    """

    module: str
    target: Tensor
    columns: slice
    beside: tuple[Tensor, ...] = ()


def truths(
    joint: Joint,
    look: Look,
    single: Trace,
    whole: Mapping[tuple[str, int], Whole],
    *,
    back: bool,
    factor: float,
) -> Iterator[Truth]:
    """What may be right there: every module's values, in the order of vectors of some tensor that
    is known to be right on this rank, or on all of its group one after the other."""
    numel = joint.own.given.numel()
    for order in _orders(joint, look, len(next(iter((single.batch or {}).values()), ()))):
        if not len(order) or numel % len(order):
            continue
        width = numel // len(order)
        for (module, _), held in whole.items():
            values = held.gradients if back else held.outputs
            if (
                width > values.shape[1]
                or values.shape[1] % width
                or int(order.max()) >= len(values)
            ):
                continue
            for start in range(0, values.shape[1], width)[:MAX_SLICES]:
                target = values[order, start : start + width] * factor
                if not bool(target.any()):
                    continue
                columns = slice(start, start + width)
                around = _around(module, whole, single, order, columns, back)
                beside = tuple(t.reshape(-1) * factor for t in around)
                yield Truth(
                    module=module, target=target.reshape(-1), columns=columns, beside=beside
                )


def _around(
    module: str,
    whole: Mapping[tuple[str, int], Whole],
    single: Trace,
    order: Tensor,
    columns: slice,
    back: bool,
) -> Iterator[Tensor]:
    """What is added to a sum: in the forward what goes into the module, as a residual, and its
    biases; in the backward, of what goes into it, the gradient of its output."""
    other = module.removeprefix(INTO) if back else f"{INTO}{module}"
    held = whole.get((other, 0))
    if other != module and held is not None and int(order.max()) < len(held.outputs):
        values = held.gradients if back else held.outputs
        if columns.stop <= values.shape[1]:
            yield values[order, columns]
    for name, param in () if back else single.params.items():
        inside = not module or name.startswith(f"{module}.")
        if inside and param.dim() == 1 and param.numel() >= columns.stop:
            yield param.double()[columns].expand(len(order), -1)


def _orders(joint: Joint, look: Look, num_rows: int) -> list[Tensor]:
    """Which of the single process's vectors stand where: each order once."""
    seen = {
        rank: {
            (m, s.call.number, s.call.part): s
            for m in look.modules
            for s in look.seen[m]
            if s.rank == rank and s.forward == "right" and s.where is not None
        }
        for rank in joint.ranks
    }
    found: list[Tensor | None] = []
    if joint.family == "reduce_scatter":
        for key in seen[joint.ranks[0]]:
            parts = [_order([own[key]], num_rows) for own in seen.values() if key in own]
            known = [part for part in parts if part is not None]
            if len(known) == len(seen):
                found.append(torch.cat(known))
    for key, s in seen[joint.rank].items():
        own = _order([s], num_rows)
        if own is None:  # what one rank has not, as of a table that is cut, another has
            together = [o[key] for o in seen.values() if key in o and o[key].shape == s.shape]
            own = _order(together, num_rows)
        found.append(own)
    found += _stretches(joint.own.given, look, num_rows)
    out: list[Tensor] = []
    for order in found:
        if order is not None and not any(torch.equal(order, known) for known in out):
            out.append(order)
    return out[:MAX_ORDERS]


def _stretches(given: Tensor, look: Look, num_rows: int) -> Iterator[Tensor]:
    """Rows one after the other, whole: what a rank reads where nobody tells its rows."""
    widths = {s.shape[1] for m in look.modules for s in look.seen[m] if len(s.shape) == 3}
    for each in sorted({1, *widths}):
        for num in range(1, num_rows + 1):
            if num * each > given.numel() or given.numel() % (num * each):
                continue
            if given.dim() > 1 and num * each != given.numel() // given.shape[-1]:
                continue
            for first in range(num_rows - num + 1):
                yield torch.arange(first * each, (first + num) * each)


def _order(seen: Sequence[Seen], num_rows: int) -> Tensor | None:
    """(n,) the single process's vector for each of a tensor that these ranks have: the one that it
    is, or that it must be as a stretch of its row. None where several may be."""
    held = [s.where for s in seen if s.where is not None]
    if any(len(w.picked) != len(w.found) or len(w.found) != len(held[0].found) for w in held):
        return None
    found = torch.ones_like(held[0].found)
    for w in held:
        found &= w.found | ~w.found.any(1, keepdim=True)
    if bool((found.sum(1) == 1).all()):
        return found.long().argmax(1)
    shape, theirs = seen[0].shape, found.shape[1] // num_rows if num_rows else 0
    num = shape[0] if len(shape) > 2 else 0
    if not num or not theirs or found.shape[1] % num_rows or len(found) % num:
        return None
    each = len(found) // num
    at, by_row = torch.arange(each), found.reshape(num, each, num_rows, theirs)
    orders = []
    for start in range(theirs - each + 1):
        fits = by_row[:, at, :, at + start].all(0)
        if bool((fits.sum(1) == 1).all()):
            rows = fits.long().argmax(1)
            orders.append((rows[:, None] * theirs + start + at).reshape(-1))
    return orders[0] if len(orders) == 1 else None


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
    joint: Joint, ranks: Sequence[int], truth: Truth, tolerance: float, *, with_before: bool
) -> Fitted | None:
    """None where no factors leave less than the tolerance."""
    given = joint.given(ranks)
    if given is None or given[0].numel() != truth.target.numel():
        return None
    columns = list(given)
    earlier = [r for r in ranks if with_before and joint.by_rank[r].before is not None]
    for rank in earlier:
        held = joint.by_rank[rank].before
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
    if not bool(live[:told].any()):
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


def is_whole_already(joint: Joint, truth: Truth, tolerance: float) -> bool:
    """Whether every rank puts in the same, which is the right result as it is."""
    given = joint.given(joint.ranks)
    if given is None or len(given) < 2 or given[0].numel() != truth.target.numel():
        return False
    if not all(torch.equal(given[0], other) for other in given[1:]):
        return False
    columns = [given[0], *(t for t in truth.beside if t.numel() == truth.target.numel())]
    found = solve(torch.stack(columns, 1), truth.target, tolerance, 1, told=1)
    return found is not None and abs(float(found[0]) - 1) <= SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a rank put in is `factor` times what `module` gave it."""

    module: str
    factor: float


def sources(traces: Traces, joint: Joint, rank: int, *, back: bool) -> list[Source]:
    """Of a module's last tensor before it, or of a slice of its features; the nearest first."""
    trace, one = traces.ranks[rank], joint.by_rank[rank]
    given = one.given.double().reshape(-1)
    out: list[Source] = []
    for call, output, gradient in reversed(
        list(zip(trace.calls, trace.outputs, trace.gradients, strict=True))
    ):
        at, value = (call.operation_back, gradient) if back else (call.operation, output)
        if at is None or value is None or at > one.number or call.module in trace.left_out:
            continue
        for part in _slices(value, given.numel()):
            factor = _times(given, part)
            if factor is not None:
                out.append(Source(module=call.module, factor=factor))
    return out


def _slices(value: Tensor, numel: int) -> Iterator[Tensor]:
    """A tensor as so many numbers: all of it, or its features in equal parts."""
    flat = value.double()
    if flat.numel() == numel:
        yield flat.reshape(-1)
    elif value.dim() and numel and flat.numel() % numel == 0:
        times = flat.numel() // numel
        if times <= MAX_SLICES and value.shape[-1] % times == 0:
            for part in flat.split(value.shape[-1] // times, dim=-1):
                yield part.reshape(-1)


def _times(given: Tensor, value: Tensor) -> float | None:
    """c with given = c value, c not 0."""
    square = float((value * value).sum())
    if not square:
        return None
    c = float((given * value).sum()) / square
    if abs(c) < SAME or float((given - c * value).abs().max()) > 1e-12 * float(given.abs().max()):
        return None
    return 1.0 if abs(c - 1) < 1e-12 else c


@dataclass(frozen=True, slots=True, kw_only=True)
class GoesOn:
    """What stands where a collective's result belongs: in `where`, in words.

    own: elements that are what the rank had before; of `numel`. times: all of it is so many times
    the result.
    """

    where: str
    own: int
    numel: int
    times: float = 1.0


def goes_on(joint: Joint, tensors: Sequence[tuple[str, Tensor]]) -> GoesOn | None:
    """Where the result of a gather should stand: the first of these tensors that has zeros, or
    nothing but the rank's own, in place of others' numbers. tensors: what came after it, with what
    it is in words.
    """
    one = joint.own
    if one.got is None or joint.family not in ("all_gather", "all_to_all"):
        return None
    got, own = one.got.double().reshape(-1), untouched(joint)
    if own is None or torch.equal(got, own) or got.numel() < 2:
        return None
    numel = int((got != own).sum())
    for where, tensor in tensors:
        for part in _slices(tensor, got.numel()):
            found = mixed_with(part, got, own)
            if found and _is_one_stretch(part != got, got == own):
                return GoesOn(where=where, own=found, numel=numel)
        if tensor.numel() == got.numel() and _has_only(tensor.double().reshape(-1), own, got):
            return GoesOn(where=where, own=numel, numel=numel)
    return None


def _is_one_stretch(lacks: Tensor, own: Tensor) -> bool:
    """Whether elements follow one another, but for the rank's own, as what has not come yet does: a
    mask leaves out some of each row."""
    at = lacks.nonzero()[:, 0]
    return len(at) > 0 and bool((lacks | own)[at[0] : at[-1] + 1].all())


def _has_only(value: Tensor, own: Tensor, got: Tensor) -> bool:
    """Whether a tensor has the rank's own numbers and zeros, in whatever order."""
    live, mine = value[value != 0], own[own != 0]
    if not len(mine) or len(live) != len(mine) or len(mine) >= int(got.count_nonzero()):
        return False
    return torch.equal(live.sort().values, mine.sort().values)


def off_by(traces: Traces, joint: Joint, truth: Truth, *, back: bool) -> Tensor | None:
    """(m,) what the rank's first tensor after a collective, that should be the truth's target, is
    too much in each element of its result; None where it has none of that size."""
    trace, number = traces.ranks[joint.rank], joint.own.number
    for call, output, gradient in zip(trace.calls, trace.outputs, trace.gradients, strict=True):
        at, value = (call.operation_back, gradient) if back else (call.operation, output)
        if call.module == truth.module and at is not None and value is not None and at > number:
            held = vectors(value)
            if held.shape[1] < truth.columns.stop:
                return None
            mine, wanted = held[:, truth.columns].reshape(-1), part_of_rank(joint, truth.target)
            return mine - wanted if mine.shape == wanted.shape else None
    return None


def part_of_rank(joint: Joint, whole: Tensor) -> Tensor:
    """Of something as it goes into a collective, what the rank has of it afterwards."""
    if joint.family != "reduce_scatter":
        return whole
    size, place = len(whole) // len(joint.ranks), joint.ranks.index(joint.rank)
    return whole[place * size : (place + 1) * size]


def accounts_for(off: Tensor | None, joint: Joint, right: Tensor, tolerance: float) -> bool:
    """Whether a tensor is off by what the collective's result is, were `right` right; and is off.

    right: (n,) as what goes in.
    """
    got = joint.own.got
    if off is None or got is None or got.numel() != len(off):
        return False
    wanted = part_of_rank(joint, right)
    lacks = got.double().reshape(-1) - wanted
    size = tolerance * max(float(wanted.abs().max()), float(got.abs().max()))
    return bool((off.abs() > size).any()) and float((off - lacks).abs().max()) <= size


def goes_on_in_sum(joint: Joint, off: Tensor | None) -> GoesOn | None:
    """What stands in place of a right result, by what a tensor that has it in it is off: the
    rank's own numbers, or so many times the result; None where it is off otherwise."""
    one, own = joint.own, untouched(joint)
    if off is None or one.got is None or own is None or one.got.numel() != len(off):
        return None
    got = one.got.double().reshape(-1)
    lacks, size = own - got, float(got.abs().max()) * 1e-9
    is_right, is_own = off.abs() <= size, (off - lacks).abs() <= size
    found = int((is_own & ~is_right).sum()) if bool((is_right | is_own).all()) else 0
    if found:
        return GoesOn(where="", own=found, numel=int((lacks.abs() > size).sum()))
    more = _times(off, got)
    return None if more is None else GoesOn(where="", own=0, numel=len(off), times=1 + more)


def untouched(joint: Joint) -> Tensor | None:
    """What the buffer has where nothing has come: what went in, its own part of it, or zeros."""
    one = joint.own
    assert one.got is not None
    given, numel = one.given.double().reshape(-1), one.got.numel()
    if joint.family in ("allreduce", "reduce", "broadcast"):
        return given
    place = joint.ranks.index(joint.rank)
    if joint.family == "reduce_scatter":
        return given[place * numel : (place + 1) * numel] if len(given) >= numel else None
    out = torch.zeros(numel, dtype=torch.float64)
    if joint.family == "all_gather":
        start = place * given.numel()
        room = out[start : start + given.numel()]
        room.copy_(given[: len(room)])
        return out
    if joint.family == "all_to_all":
        out[: given.numel()] = given[:numel]
        return out
    return None


def mixed_with(value: Tensor, got: Tensor, own: Tensor, close: float = 1e-12) -> int:
    """How many elements are the rank's own and not the result's, if each is one of the two."""
    size = float(got.abs().max()) * close
    is_got, is_own = (value - got).abs() <= size, (value - own).abs() <= size
    return int((is_own & ~is_got).sum()) if bool((is_got | is_own).all()) else 0


def segment_of(buffer: Tensor, part: Tensor, close: float) -> int | None:
    """Where these numbers stand one after the other in a flat buffer."""
    size = float(part.abs().max())
    if not size or len(part) > len(buffer):
        return None
    first = int(part.abs().argmax())
    for at in ((buffer - part[first]).abs() <= close * size).nonzero()[:, 0].tolist():
        start = at - first
        held = buffer[max(start, 0) : start + len(part)]
        fits = start >= 0 and len(held) == len(part)
        if fits and bool(((held - part).abs() <= close * size).all()):
            return int(start)
    return None
