"""Keys and values of the positions already seen, and the gradients that flow back into them.

A training sequence may be prefilled in chunks: chunk c attends to the cached keys of chunks 0 to c.
Backward runs the chunks last to first; each adds what its queries owe to every cached key into a
carry of the accumulator's dtype, and takes out the finished sums of its own keys. The order is
forced by a token: an output of chunk c and an input of chunk c + 1. Autograd never adds these
gradients itself, and never rounds them to 16 bits on the way.
"""

from __future__ import annotations

import torch
from sumgrad.kernels.layout import Layout, LayoutError, Piece
from sumgrad.kernels.runtime import accumulator_dtype
from torch import Tensor


class KeyValueCache:
    """Room for whole samples. layout: where each sample's positions lie, from 0 on, no cuts.

    keys, values: (R, kv heads, head) in dtype; memory O(R). One cache serves one attention layer
    and one forward pass; `token` ties its chunks together. Differentiate all chunks in one backward
    pass: autograd would add the passes of single chunks in its own order.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        num_heads: int,
        head: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if any(p.start or not p.ends for p in layout.pieces):
            raise LayoutError("cache: its layout must hold whole samples, from position 0 on")
        shape = (layout.num_rows, num_heads, head)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.token = torch.zeros((), device=device)
        self._room = {p.sample: p for p in layout.pieces}
        self._filled = dict.fromkeys(self._room, 0)
        self._carry: tuple[Tensor, Tensor] | None = None
        self._pass = -1
        self._versions = (self.keys._version, self.values._version)

    def first_row(self, piece: Piece) -> int:
        """The row of position 0 of a piece's sample."""
        return self.room(piece).row

    def room(self, piece: Piece) -> Piece:
        """Where the whole sample lies. Raises LayoutError if there is no such room."""
        room = self._room.get(piece.sample)
        if room is None or piece.stop > room.stop:
            raise LayoutError(f"cache: has no room for positions up to {piece.stop} of {piece}")
        if piece.ends != (piece.stop == room.stop):
            raise LayoutError(f"cache: {piece}: by its room the sample ends at {room.stop}")
        return room

    def write(self, keys: Tensor, values: Tensor, layout: Layout) -> None:
        """Take a chunk's rows, once, in order; the same bits may be written again (recomputation).

        Raises LayoutError for a gap, for other contents, and for two pieces of one sample.
        """
        self._check_untouched()
        samples = [piece.sample for piece in layout.pieces if piece.length]
        if len(set(samples)) < len(samples):
            raise LayoutError("cache: a chunk holds two pieces of one sample; make it two chunks")
        for piece in layout.pieces:
            row, filled = self.room(piece).row + piece.start, self._filled[piece.sample]
            span, place = slice(piece.row, piece.row + piece.length), slice(row, row + piece.length)
            if piece.stop <= filled:
                same = torch.equal(self.keys[place], keys[span])
                if not (same and torch.equal(self.values[place], values[span])):
                    raise LayoutError(
                        f"cache: {piece} is cached already, with other contents: one cache serves "
                        f"one layer and one forward pass"
                    )
                continue
            if piece.start != filled:
                raise LayoutError(
                    f"cache: got {piece}, but only {filled} positions of the sample are cached"
                )
            self.keys[place] = keys[span]
            self.values[place] = values[span]
            self._filled[piece.sample] = piece.stop
        self._versions = (self.keys._version, self.values._version)

    def _check_untouched(self) -> None:
        if self._versions != (self.keys._version, self.values._version):
            raise RuntimeError("cache: its keys or values were changed from outside")

    def carry(self) -> tuple[Tensor, Tensor]:
        """dK and dV of all cached keys so far in this backward pass, in the accumulator's dtype."""
        self._check_untouched()
        current = torch._C._current_graph_task_id()
        if self._carry is None or current != self._pass:  # an unfinished pass leaves nothing behind
            acc = accumulator_dtype(self.keys.dtype)
            self._carry = (
                torch.zeros_like(self.keys, dtype=acc),
                torch.zeros_like(self.values, dtype=acc),
            )
            self._pass = current
        return self._carry

    def take(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """The finished gradients of a chunk's own keys and values; their carry starts anew."""
        carried = self.carry()
        taken = tuple(
            torch.zeros((layout.num_rows, *c.shape[1:]), dtype=c.dtype, device=c.device)
            for c in carried
        )
        for piece in layout.pieces:
            row = self.room(piece).row + piece.start
            for source, out in zip(carried, taken, strict=True):
                out[piece.row : piece.row + piece.length] = source[row : row + piece.length]
                source[row : row + piece.length] = 0
        return taken[0], taken[1]
