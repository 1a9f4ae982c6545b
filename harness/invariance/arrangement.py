"""Ways to lay the same samples out: the columns of the invariance matrix, as data.

An Arrangement says which positions of which samples stand in which physical rows of which call, in
what order the calls are made, and which rank makes them. It knows no operator and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

PROPERTIES = {
    "batch": "each sample in a call of its own",
    "order": "samples in another order",
    "pad left": "padding before the samples",
    "pad right": "more padding behind the samples",
    "packed": "no padding, and padding only between samples",
    "chunked": "samples cut into chunks, prefilled one after another",
    "micro": "several micro-batches of different sizes",
    "dp 1": "one rank",
    "dp 2": "two ranks",
    "dp 3": "three ranks",
    "dp 5": "five ranks",
    "misaligned": "every tensor begins one element into its storage",
    "repeat": "the same call again",
}
RANK_COUNTS = (1, 2, 3, 5)
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Positions [start, stop) of a sample, in rows from `row` on; ends: `stop` is its end."""

    sample: int
    start: int
    stop: int
    row: int
    ends: bool

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The physical rows of one call. width: rows of each sample where all are padded alike."""

    segments: tuple[Segment, ...]
    num_rows: int
    width: int | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """One configuration. chunked: later calls see earlier ones' positions through a cache.

    offset: elements by which every tensor is moved in its storage. nan_padding: padding holds NaN,
    not other numbers. num_ranks: 0 is no group.
    """

    prop: str
    name: str
    calls: tuple[Call, ...]
    chunked: bool = False
    offset: int = 0
    nan_padding: bool = False
    num_ranks: int = 0

    @property
    def differs(self) -> bool:
        """Whether it must differ from the base; a repeat must not."""
        return self.prop != "repeat"


def padded(
    lengths: Sequence[int], samples: Sequence[int], *, width: int, left: bool = False
) -> Call:
    """Whole samples, `width` rows each."""
    segments = tuple(
        Segment(
            sample=s,
            start=0,
            stop=lengths[s],
            row=i * width + (width - lengths[s] if left else 0),
            ends=True,
        )
        for i, s in enumerate(samples)
    )
    return Call(segments=segments, num_rows=len(samples) * width, width=width)


def packed(parts: Sequence[tuple[int, int, int, bool]], *, gap: int = 0, rank: int = 0) -> Call:
    """Parts (sample, start, stop, ends) one after another, `gap` rows before each."""
    segments, row = [], 0
    for sample, start, stop, ends in parts:
        row += gap
        segments.append(Segment(sample=sample, start=start, stop=stop, row=row, ends=ends))
        row += stop - start
    return Call(segments=tuple(segments), num_rows=row, rank=rank)


def base(lengths: Sequence[int]) -> Arrangement:
    """What all others are compared with: one call, in order, padded right to the longest."""
    call = padded(lengths, range(len(lengths)), width=max(lengths))
    return Arrangement(prop="base", name="padded right, in order, one call", calls=(call,))


def arrangements(
    lengths: Sequence[int], *, cut: int, rows_alone: bool, num_ranks: Sequence[int] = RANK_COUNTS
) -> Iterator[Arrangement]:
    """Every configuration of a batch.

    cut: a sample may be cut at its multiples. rows_alone: positions need nothing of earlier ones,
    so micro-batches and ranks may cut inside a sample too.
    """
    everyone, longest = list(range(len(lengths))), max(lengths)
    singles = tuple(padded(lengths, [s], width=max(lengths[s], 1)) for s in everyone)
    yield Arrangement(prop="batch", name="one sample a call", calls=singles)
    middle = everyone[len(everyone) // 2 :] + everyone[: len(everyone) // 2]
    for name, order in (
        ("reversed", everyone[::-1]),
        ("odd samples first", everyone[1::2] + everyone[::2]),
        ("second half first", middle),
    ):
        yield Arrangement(prop="order", name=name, calls=(padded(lengths, order, width=longest),))
    left = padded(lengths, everyone, width=longest, left=True)
    yield Arrangement(prop="pad left", name="padded left", calls=(left,))
    far = padded(lengths, everyone, width=longest + 7, left=True)
    yield Arrangement(prop="pad left", name="padded left by 7 more", calls=(far,))
    for more in (1, 13):
        wider = padded(lengths, everyone, width=longest + more)
        name = f"padded right by {more} more"
        yield Arrangement(prop="pad right", name=name, calls=(wider,))
    name = "padded right, NaN in the padding"
    wider = padded(lengths, everyone, width=longest + 1)
    yield Arrangement(prop="pad right", name=name, calls=(wider,), nan_padding=True)
    for gap in (0, 3):
        name = f"packed, {gap} rows between" if gap else "packed"
        call = packed(_whole(lengths, everyone), gap=gap)
        yield Arrangement(prop="packed", name=name, calls=(call,))
    for size in (cut, 2 * cut):
        yield _chunked(lengths, size)
    yield from _micro(lengths, cut, rows_alone)
    for count in num_ranks:
        yield ranked(lengths, count, cut=cut, rows_alone=rows_alone)
    for offset in (1, 3):
        yield replace(
            base(lengths), prop="misaligned", name=f"moved by {offset} elements", offset=offset
        )
    for i in range(1, REPEATS):
        yield replace(base(lengths), prop="repeat", name=f"run {i + 1}")


def _whole(lengths: Sequence[int], samples: Sequence[int]) -> list[tuple[int, int, int, bool]]:
    return [(s, 0, lengths[s], True) for s in samples]


def _chunked(lengths: Sequence[int], size: int) -> Arrangement:
    """Chunk c holds positions [c size, (c + 1) size) of every sample that has them."""
    calls = []
    for start in range(0, max(lengths), size):
        parts = [
            (s, start, min(start + size, n), start + size >= n)
            for s, n in enumerate(lengths)
            if n > start or (n == 0 == start)
        ]
        calls.append(packed(parts))
    return Arrangement(prop="chunked", name=f"chunks of {size}", calls=tuple(calls), chunked=True)


def _micro(lengths: Sequence[int], cut: int, rows_alone: bool) -> Iterator[Arrangement]:
    """Micro-batches of 1, 2, 3, ... samples, of two, and (rows_alone) cut inside samples."""
    growing, start, size = [], 0, 1
    while start < len(lengths):
        growing.append(list(range(start, min(start + size, len(lengths)))))
        start, size = start + size, size + 1
    pairs = [list(range(s, min(s + 2, len(lengths)))) for s in range(0, len(lengths), 2)]
    for name, groups in (("1, 2, 3, ... samples", growing), ("2 samples each", pairs[::-1])):
        calls = tuple(padded(lengths, g, width=max(1, *(lengths[s] for s in g))) for g in groups)
        yield Arrangement(prop="micro", name=f"micro-batches of {name}", calls=calls)
    if rows_alone:
        first = [(s, 0, *_head(n, cut)) for s, n in enumerate(lengths)]
        second = [(s, stop, lengths[s], True) for s, _, stop, ends in first if not ends]
        calls = (packed(second), packed(first))
        name = "micro-batches that cut samples, the tails first"
        yield Arrangement(prop="micro", name=name, calls=calls)


def _head(length: int, cut: int) -> tuple[int, bool]:
    """Where a sample is cut, about its middle, and whether that is its end."""
    stop = (length // 2 + cut - 1) // cut * cut
    return (length, True) if stop >= length else (stop, False)


def ranked(lengths: Sequence[int], num_ranks: int, *, cut: int, rows_alone: bool) -> Arrangement:
    """Contiguous shares of about equal tokens, one call a rank, in the order of the ranks."""
    total, shares, at = sum(lengths), [[] for _ in range(num_ranks)], 0  # type: ignore[var-annotated]
    for s, n in enumerate(lengths):
        start = 0
        while True:
            rank = min(num_ranks - 1, at * num_ranks // max(total, 1))
            room = -(-(rank + 1) * total // num_ranks) - at
            stop = n
            if rows_alone and rank < num_ranks - 1 and room < n - start:
                stop = min(n, start + max(cut, room // cut * cut))
            shares[rank].append((s, start, stop, stop == n))
            at += stop - start
            start = stop
            if start == n:
                break
    calls = tuple(packed(share, rank=rank) for rank, share in enumerate(shares))
    name = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}, contiguous shares"
    return Arrangement(prop=f"dp {num_ranks}", name=name, calls=calls, num_ranks=num_ranks)
