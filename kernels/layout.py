"""Which (sample, position) each physical row holds: padded, packed, chunked or cut, as data.

A sample is named by its place in the global batch as drawn, before sharding, sorting or packing; a
position counts from the sample's first valid token. Neither depends on ranks or on the layout, so
results keyed by them have a meaning that survives every rearrangement.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from operator import index
from typing import Any

import torch

MAX_SAMPLES = 2**31 - 1
MAX_POSITIONS = 2**32


class LayoutError(ValueError):
    """Pieces that overlap, leave the batch, or contradict each other."""


class UnalignedCut(LayoutError):
    """A sample is cut where no node of the canonical tree begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Positions [start, stop) of one sample, in consecutive physical rows from `row` on.

    ends: `stop` is the sample's end, so the owner knows that nothing follows. An empty sample is a
    piece of no positions that ends.
    """

    sample: int
    start: int = 0
    stop: int
    row: int
    ends: bool = True

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The physical rows of one call. Rows of no piece are padding.

    num_samples: N of the global batch, known to all ranks. num_rows: physical rows of this call.
    Raises LayoutError.
    """

    num_samples: int
    num_rows: int
    pieces: tuple[Piece, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.num_samples <= MAX_SAMPLES:
            raise LayoutError(f"num_samples: got {self.num_samples}, expected 0 to 2**31 - 1")
        for piece in self.pieces:
            self._check_piece(piece)
        self._check_no_overlap("rows", [(p.row, p.row + p.length) for p in self.pieces])
        by_sample: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            by_sample.setdefault(piece.sample, []).append(piece)
        for sample, pieces in by_sample.items():
            if len(pieces) > 1:
                spans = [(p.start, p.stop) for p in pieces]
                self._check_no_overlap(f"positions of sample {sample}", spans)
                last = max(pieces, key=lambda p: p.stop)
                if any(p.ends and p is not last for p in pieces):
                    raise LayoutError(f"sample {sample}: a piece that ends is not its last")

    def _check_piece(self, piece: Piece) -> None:
        if not 0 <= piece.sample < self.num_samples:
            raise LayoutError(f"{piece}: the batch has samples 0 to {self.num_samples - 1}")
        if not 0 <= piece.start <= piece.stop <= MAX_POSITIONS:
            raise LayoutError(f"{piece}: expected 0 <= start <= stop <= 2**32")
        if piece.row < 0 or piece.row + piece.length > self.num_rows:
            raise LayoutError(f"{piece}: leaves the {self.num_rows} physical rows")

    def _check_no_overlap(self, what: str, spans: Sequence[tuple[int, int]]) -> None:
        taken = sorted(span for span in spans if span[1] > span[0])
        for (_, stop), (start, _) in itertools.pairwise(taken):
            if start < stop:
                raise LayoutError(f"{what} {start} to {stop} belong to two pieces")

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int],
        *,
        samples: Sequence[int] | None = None,
        num_samples: int | None = None,
        gap: int = 0,
    ) -> Layout:
        """Whole samples one after another, `gap` rows of padding before each.

        lengths: of the samples in physical order; samples: which they are (default 0, 1, ...).
        """
        lengths = [index(length) for length in lengths]
        names = [index(s) for s in (range(len(lengths)) if samples is None else samples)]
        pieces, row = [], 0
        for sample, length in zip(names, lengths, strict=True):
            row += gap
            pieces.append(Piece(sample=sample, stop=length, row=row))
            row += length
        total = len(names) if num_samples is None else num_samples
        return cls(num_samples=total, num_rows=row, pieces=tuple(pieces))

    @classmethod
    def padded(
        cls,
        lengths: Sequence[int],
        *,
        width: int | None = None,
        side: str = "right",
        samples: Sequence[int] | None = None,
        num_samples: int | None = None,
    ) -> Layout:
        """Whole samples, `width` rows each (default: the longest); side: where the padding is."""
        if side not in ("left", "right"):
            raise LayoutError(f"side: got {side!r}, expected 'left' or 'right'")
        lengths = [index(length) for length in lengths]
        names = [index(s) for s in (range(len(lengths)) if samples is None else samples)]
        width = max(lengths, default=0) if width is None else width
        pieces = [
            Piece(
                sample=sample,
                stop=length,
                row=i * width + (width - length if side == "left" else 0),
            )
            for i, (sample, length) in enumerate(zip(names, lengths, strict=True))
        ]
        if any(length > width for length in lengths):
            raise LayoutError(f"width: got {width}, the longest sample has {max(lengths)}")
        total = len(names) if num_samples is None else num_samples
        return cls(num_samples=total, num_rows=len(names) * width, pieces=tuple(pieces))

    @classmethod
    def single(cls, num_rows: int) -> Layout:
        """All rows as one sample: what an operator assumes when it is told nothing."""
        return cls(
            num_samples=1, num_rows=num_rows, pieces=(Piece(sample=0, stop=num_rows, row=0),)
        )

    @cached_property
    def _derived(self) -> dict[object, Any]:
        return {}

    def derived(self, key: object, make: Callable[[], Any]) -> Any:
        """A table made from this layout, kept with it: every layer of a model asks for the same.

        Made outside inference mode, so that a later training step may use it too.
        """
        if key not in self._derived:
            with torch.inference_mode(False):
                self._derived[key] = make()
        return self._derived[key]

    def __getstate__(self) -> dict[str, Any]:
        """Without the tables, which may be large and on a GPU."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 (num_rows,): each row's position, -1 for padding."""
        out = torch.full((self.num_rows,), -1, dtype=torch.int64)
        for p in self.pieces:
            out[p.row : p.row + p.length] = torch.arange(p.start, p.stop)
        return out

    @cached_property
    def samples(self) -> torch.Tensor:
        """int64 (num_rows,): each row's sample, -1 for padding."""
        out = torch.full((self.num_rows,), -1, dtype=torch.int64)
        for p in self.pieces:
            out[p.row : p.row + p.length] = p.sample
        return out

    @cached_property
    def num_tokens(self) -> int:
        """Valid rows."""
        return sum(p.length for p in self.pieces)

    def check_cuts(self, multiple: int, what: str) -> None:
        """Raise UnalignedCut unless every cut inside a sample is a multiple of `multiple`."""
        for p in self.pieces:
            wrong = (p.start % multiple and p.start) or (
                not p.ends and p.stop % multiple and p.stop
            )
            if wrong:
                before = wrong - wrong % multiple
                raise UnalignedCut(
                    f"{what}: sample {p.sample} is cut at position {wrong}; a cut inside a sample "
                    f"must be a multiple of {multiple} (for example {before or multiple} or "
                    f"{before + multiple}) or the sample's end"
                )


def resolve(layout: Layout | None, num_rows: int) -> Layout:
    """The layout, or all rows as one sample. Raises LayoutError if it is for other rows."""
    if layout is None:
        return _single(num_rows)
    if layout.num_rows != num_rows:
        raise LayoutError(f"layout: has {layout.num_rows} physical rows, the tensor {num_rows}")
    return layout


@lru_cache(maxsize=64)
def _single(num_rows: int) -> Layout:
    """One for all calls, so that its tables are made once."""
    return Layout.single(num_rows)
