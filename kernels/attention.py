"""Causal softmax attention over samples of any length, grouped heads, O(T) memory.

For each query at position p, over keys j <= p of its sample, scale c = head**-0.5 by default:
    s_j = c q.k_j     P_j = exp(s_j - lse)     o = sum_j P_j v_j
With delta = do.o and dP_j = do.v_j, backward is
    dq = c sum_j P_j (dP_j - delta) k_j     dk_j = c sum_p P_j (dP_j - delta) q
    dv_j = sum_p P_j do

Tiles are anchored at position 0 of the sample, so they do not move with padding, packing or chunks.
Forward and dq take keys ascending. dk and dv have one owner per key tile: query tiles descending,
the heads of the group ascending inside, one chain; no atomics. Forward keeps o and lse only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sumgrad.kernels.kv_cache import KeyValueCache
from sumgrad.kernels.layout import Layout, LayoutError, resolve
from sumgrad.kernels.runtime import (
    KIND,
    TL_DTYPE,
    KernelError,
    accumulator_dtype,
    block_of,
    check_floats,
    check_shape,
    compute,
    compute_dtype,
    first_order,
    launch,
    tl,
    triton,
)
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_HEAD = 128  # at 256 some dtypes need more shared memory than a GPU has


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """Positions of a query and of a key tile. A cut inside a sample is a multiple of `query`.

    back_query, back_key, back_warps, back_stages: those of dk and dv; None: as query, key,
    num_warps, and 1.
    """

    query: int
    key: int
    num_warps: int = 4
    num_stages: int = 2
    back_query: int | None = None
    back_key: int | None = None
    back_warps: int | None = None
    back_stages: int = 1

    def __post_init__(self) -> None:
        sides = (self.query, self.key, *self.back)
        if any(n < 16 or n & (n - 1) or self.query % n for n in sides):
            raise KernelError(f"{self}: expected powers of two >= 16, query a multiple of key")

    @property
    def back(self) -> tuple[int, int]:
        """The query and the key tile of dk and dv."""
        query, key = self.back_query, self.back_key
        return self.query if query is None else query, self.key if key is None else key


def default_tiles(dtype: torch.dtype, kind: str = KIND) -> AttentionTiles:
    """One choice for each dtype and kind of machine; see docs/data/certificates.json."""
    if kind == "interpreted":
        return AttentionTiles(query=64, key=64)
    if dtype == torch.float64:
        return AttentionTiles(query=16, key=16, num_stages=1)
    if dtype == torch.float32:
        return AttentionTiles(query=32, key=32, num_warps=8)
    if kind == "hip":
        return AttentionTiles(query=64, key=64, num_stages=1)
    return AttentionTiles(
        query=128, key=64, num_warps=8, num_stages=3,
        back_query=32, back_key=64, back_warps=4, back_stages=2,
    )  # fmt: skip


@triton.jit
def _load_tile(
    base, row, inside, head, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """(positions, WIDE) of one head; rows outside and columns past DIM are 0.

    MASKED: whether a row may be outside.
    """
    d = tl.arange(0, WIDE)
    place = base + (row[:, None] * HEADS + head) * DIM + d[None, :]
    if MASKED:
        return tl.load(place, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    if DIM < WIDE:
        return tl.load(place, mask=(d < DIM)[None, :], other=0.0)
    return tl.load(place)


@triton.jit
def _scores(
    query, k, v, first, stop, kv_row, head, SCALE: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """A key tile's positions, keys, values, and c q.k in powers of 2, as yet without a mask."""
    key = first + tl.arange(0, BK)
    keys = _load_tile(k, kv_row + key, key < stop, head, HEADS, DIM, WIDE, MASKED)
    values = _load_tile(v, kv_row + key, key < stop, head, HEADS, DIM, WIDE, MASKED)
    s = tl.dot(query, tl.trans(keys), input_precision="ieee", out_dtype=ACC) * (SCALE * LOG2_E)
    return key, keys, values, s


@triton.jit
def _online(
    query, k, v, acc, total, top, at, first, stop, kv_row, head, SCALE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr,
    ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key tile more in the online softmax, in powers of 2. MASKED: not all keys count."""
    key, _, values, s = _scores(
        query, k, v, first, stop, kv_row, head, SCALE, HEADS, DIM, WIDE, BK, ACC, MASKED
    )
    if MASKED:
        counts = (key[None, :] <= at[:, None]) & (key < stop)[None, :]
        s = tl.where(counts, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, axis=1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(top - safe)
    p = tl.exp2(s - safe[:, None])
    total = total * shrink + tl.sum(p, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee", out_dtype=ACC)
    return acc, total, higher


@triton.jit
def attention_fwd(
    q, k, v, o, lse, work, SCALE: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One query tile of one head: online softmax, keys ascending.

    Keys before the tile count for all its queries and need no mask, which changes no bit. lse is
    kept as a power of 2.
    """
    item = work + tl.program_id(0).to(tl.int64) * 5
    head = tl.program_id(1).to(tl.int64)
    tile, start, stop = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    q_row, kv_row = tl.load(item + 3), tl.load(item + 4)
    at = tile * BQ + tl.arange(0, BQ)
    mine = (at >= start) & (at < stop)
    query = _load_tile(q, q_row + at, mine, head, H, DIM, WIDE, True)
    top = tl.full((BQ,), float("-inf"), dtype=ACC)
    total = tl.zeros((BQ,), dtype=ACC)
    acc = tl.zeros((BQ, WIDE), dtype=ACC)
    if SPLIT:
        for first in range(0, tile * BQ, BK):
            acc, total, top = _online(
                query, k, v, acc, total, top, at, first, stop, kv_row, head // GROUP, SCALE,
                H // GROUP, DIM, WIDE, BK, ACC, False,
            )  # fmt: skip
    for first in range(tile * BQ if SPLIT else 0, tl.minimum((tile + 1) * BQ, stop), BK):
        acc, total, top = _online(
            query, k, v, acc, total, top, at, first, stop, kv_row, head // GROUP, SCALE,
            H // GROUP, DIM, WIDE, BK, ACC, True,
        )  # fmt: skip
    d = tl.arange(0, WIDE)
    place = ((q_row + at)[:, None] * H + head) * DIM + d[None, :]
    inside = mine[:, None] & (d < DIM)[None, :]
    tl.store(o + place, (acc / total[:, None]).to(o.dtype.element_ty), mask=inside)
    tl.store(lse + (q_row + at) * H + head, top + tl.log2(total), mask=mine)


@triton.jit(do_not_specialize=["num_rows"])
def attention_delta(
    o, do, delta, num_rows, DIM: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """delta = do.o of ROWS (row, head) pairs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDE)
    inside = (row < num_rows)[:, None] & (d < DIM)[None, :]
    out = tl.load(o + row[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(ACC)
    seed = tl.load(do + row[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(ACC)
    tl.store(delta + row, tl.sum(out * seed, axis=1), mask=row < num_rows)


@triton.jit
def _dq_keys(
    query, seed, level, along, k, v, acc, at, mine, first, stop, kv_row, head, SCALE: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BK: tl.constexpr,
    ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """acc + what one key tile adds to dq."""
    key, keys, values, s = _scores(
        query, k, v, first, stop, kv_row, head, SCALE, HEADS, DIM, WIDE, BK, ACC, MASKED
    )
    s = s - level[:, None]
    if MASKED:
        counts = (key[None, :] <= at[:, None]) & (key < stop)[None, :] & mine[:, None]
        s = tl.where(counts, s, float("-inf"))
    p = tl.exp2(s)
    dp = tl.dot(seed, tl.trans(values), input_precision="ieee", out_dtype=ACC)
    ds = p * (dp - along[:, None]) * SCALE  # before it is rounded: float16 ends at 65504
    return tl.dot(ds.to(keys.dtype), keys, acc, input_precision="ieee", out_dtype=ACC)


@triton.jit
def attention_dq(
    q, k, v, do, lse, delta, dq, work, SCALE: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dq of one query tile of one head, keys ascending."""
    item = work + tl.program_id(0).to(tl.int64) * 5
    head = tl.program_id(1).to(tl.int64)
    tile, start, stop = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    q_row, kv_row = tl.load(item + 3), tl.load(item + 4)
    at = tile * BQ + tl.arange(0, BQ)
    mine = (at >= start) & (at < stop)
    query = _load_tile(q, q_row + at, mine, head, H, DIM, WIDE, True)
    seed = _load_tile(do, q_row + at, mine, head, H, DIM, WIDE, True)
    level = tl.load(lse + (q_row + at) * H + head, mask=mine, other=0.0)
    along = tl.load(delta + (q_row + at) * H + head, mask=mine, other=0.0)
    acc = tl.zeros((BQ, WIDE), dtype=ACC)
    if SPLIT:
        for first in range(0, tile * BQ, BK):
            acc = _dq_keys(
                query, seed, level, along, k, v, acc, at, mine, first, stop, kv_row, head // GROUP,
                SCALE, H // GROUP, DIM, WIDE, BK, ACC, False,
            )  # fmt: skip
    for first in range(tile * BQ if SPLIT else 0, tl.minimum((tile + 1) * BQ, stop), BK):
        acc = _dq_keys(
            query, seed, level, along, k, v, acc, at, mine, first, stop, kv_row, head // GROUP,
            SCALE, H // GROUP, DIM, WIDE, BK, ACC, True,
        )  # fmt: skip
    d = tl.arange(0, WIDE)
    place = ((q_row + at)[:, None] * H + head) * DIM + d[None, :]
    inside = mine[:, None] & (d < DIM)[None, :]
    tl.store(dq + place, acc.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _dkv_queries(
    keys, values, q, do, lse, delta, acc_k, acc_v, key, step, last, start, stop, q_row, group,
    SCALE: tl.constexpr, H: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, BQ: tl.constexpr, ACC: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What a query tile of one head adds to dk and dv of a key tile.

    step: which of the pairs (tile, head), tiles descending from `last`, the group's heads ascending
    inside. Scores stand as (keys, queries), so that no product needs one turned.
    """
    head = group * GROUP + step % GROUP
    at = (last - step // GROUP) * BQ + tl.arange(0, BQ)
    mine = (at >= start) & (at < stop)
    query = _load_tile(q, q_row + at, mine, head, H, DIM, WIDE, MASKED)
    seed = _load_tile(do, q_row + at, mine, head, H, DIM, WIDE, MASKED)
    place = (q_row + at) * H + head
    if MASKED:
        level = tl.load(lse + place, mask=mine, other=0.0)
        along = tl.load(delta + place, mask=mine, other=0.0)
    else:
        level, along = tl.load(lse + place), tl.load(delta + place)
    s = tl.dot(keys, tl.trans(query), input_precision="ieee", out_dtype=ACC) * (SCALE * LOG2_E)
    s = s - level[None, :]
    if MASKED:
        counts = (key[:, None] <= at[None, :]) & (key < stop)[:, None] & mine[None, :]
        s = tl.where(counts, s, float("-inf"))
    p = tl.exp2(s)
    acc_v = tl.dot(p.to(seed.dtype), seed, acc_v, input_precision="ieee", out_dtype=ACC)
    dp = tl.dot(values, tl.trans(seed), input_precision="ieee", out_dtype=ACC)
    ds = p * (dp - along[None, :]) * SCALE
    acc_k = tl.dot(ds.to(query.dtype), query, acc_k, input_precision="ieee", out_dtype=ACC)
    return acc_k, acc_v


@triton.jit
def attention_dkv(
    q, k, v, do, lse, delta, dk, dv, work, SCALE: tl.constexpr,
    H: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile of one key head, added to what dk and dv hold.

    Query tiles descending, the group's heads ascending inside: one chain, which later chunks began.
    Only the sample's last, if it is not full, and those that hold the key tile need a mask.
    """
    item = work + tl.program_id(0).to(tl.int64) * 5
    group = tl.program_id(1).to(tl.int64)
    tile, start, stop = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    q_row, kv_row = tl.load(item + 3), tl.load(item + 4)
    key = tile * BK + tl.arange(0, BK)
    there = key < stop
    keys = _load_tile(k, kv_row + key, there, group, H // GROUP, DIM, WIDE, True)
    values = _load_tile(v, kv_row + key, there, group, H // GROUP, DIM, WIDE, True)
    d = tl.arange(0, WIDE)
    place = ((kv_row + key)[:, None] * (H // GROUP) + group) * DIM + d[None, :]
    inside = there[:, None] & (d < DIM)[None, :]
    acc_k = tl.load(dk + place, mask=inside, other=0.0)
    acc_v = tl.load(dv + place, mask=inside, other=0.0)
    first_tile = tl.maximum(start // BQ, tile * BK // BQ)
    end = (stop + BQ - 1) // BQ
    full_end = tl.maximum(stop // BQ, first_tile)
    full = tl.minimum(tl.maximum(((tile + 1) * BK + BQ - 1) // BQ, first_tile), full_end)
    if SPLIT:
        for step in range(0, (end - full_end) * GROUP):
            acc_k, acc_v = _dkv_queries(
                keys, values, q, do, lse, delta, acc_k, acc_v, key, step, end - 1, start, stop,
                q_row, group, SCALE, H, GROUP, DIM, WIDE, BQ, ACC, True,
            )  # fmt: skip
        for step in range(0, (full_end - full) * GROUP):
            acc_k, acc_v = _dkv_queries(
                keys, values, q, do, lse, delta, acc_k, acc_v, key, step, full_end - 1, start, stop,
                q_row, group, SCALE, H, GROUP, DIM, WIDE, BQ, ACC, False,
            )  # fmt: skip
    last = full if SPLIT else end
    for step in range(0, (last - first_tile) * GROUP):
        acc_k, acc_v = _dkv_queries(
            keys, values, q, do, lse, delta, acc_k, acc_v, key, step, last - 1, start, stop, q_row,
            group, SCALE, H, GROUP, DIM, WIDE, BQ, ACC, True,
        )  # fmt: skip
    tl.store(dk + place, acc_k, mask=inside)
    tl.store(dv + place, acc_v, mask=inside)


def _work(layout: Layout, cache: KeyValueCache | None, tile: int, *, keys: bool) -> np.ndarray:
    """int64 (w, 5): tile, start, stop, row of position 0 among queries, and among keys.

    One item for each query tile that holds a query, or (keys) for each key tile that one sees;
    those with most to do come first.
    """
    items = []
    for p in layout.pieces:
        if cache is None and (p.start or not p.ends):
            raise LayoutError(f"attention: {p} is a part of its sample; that needs a cache")
        kv_row = p.row if cache is None else cache.first_row(p)
        first = 0 if keys else p.start // tile
        for i in range(first, -(-p.stop // tile) if p.length else 0):
            items.append((i, p.start, p.stop, p.row - p.start, kv_row))
    items.sort(key=lambda item: item[2] - tile * item[0] if keys else item[0], reverse=True)
    return np.array(items, dtype=np.int64).reshape(-1, 5)


def _tables(
    layout: Layout, cache: KeyValueCache | None, tiles: AttentionTiles, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Work items by query tile and by key tile, on the device, made once for each layout."""

    def make() -> Any:
        layout.check_cuts(tiles.query, f"attention with query tiles of {tiles.query}")
        return tuple(
            torch.from_numpy(_work(layout, cache, size, keys=keys)).to(device)
            for size, keys in ((tiles.query, False), (tiles.back[1], True))
        )

    if cache is not None:
        return make()
    found: tuple[Tensor, Tensor] = layout.derived(("attention", tiles, device), make)
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token: Tensor,
        layout: Layout,
        cache: KeyValueCache | None,
        tiles: AttentionTiles,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        by_query, by_key = _tables(layout, cache, tiles, q.device)
        if cache is not None:
            cache.write(k, v, layout)
            k, v = cache.keys, cache.values
        o = torch.zeros(q.shape, dtype=compute_dtype(q.dtype), device=q.device)
        lse = torch.zeros(q.shape[:2], dtype=accumulator_dtype(q.dtype), device=q.device)
        launch(
            attention_fwd, (len(by_query), q.shape[1]),
            compute(q), compute(k), compute(v), o, lse, by_query,
            **_constants(q, k, tiles, scale),
        )  # fmt: skip
        out = o.to(q.dtype)
        own = () if cache is not None else (k, v)
        ctx.save_for_backward(q, out, lse, by_query, by_key, *own)
        ctx.layout, ctx.cache, ctx.tiles, ctx.scale = layout, cache, tiles, scale
        return out, torch.zeros_like(token)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, out, lse, by_query, by_key, *own = ctx.saved_tensors
        do = grads[0]
        k, v = own if own else (ctx.cache.keys, ctx.cache.values)
        acc = lse.dtype
        constants = _constants(q, k, ctx.tiles, ctx.scale)
        given = [compute(t) for t in (q, k, v, do)]
        delta = torch.zeros_like(lse)
        wide, rows = constants["WIDE"], max(1, 4096 // constants["WIDE"])
        launch(
            attention_delta, (triton.cdiv(delta.numel(), rows),),
            compute(out), given[3], delta, delta.numel(),
            DIM=q.shape[2], WIDE=wide, ROWS=rows, ACC=TL_DTYPE[acc],
        )  # fmt: skip
        dq = torch.zeros(q.shape, dtype=compute_dtype(q.dtype), device=q.device)
        launch(
            attention_dq, (len(by_query), q.shape[1]), *given, lse, delta, dq, by_query, **constants
        )
        if ctx.cache is None:
            dk, dv = torch.zeros_like(k, dtype=acc), torch.zeros_like(v, dtype=acc)
        else:
            dk, dv = ctx.cache.carry()
        launch(
            attention_dkv, (len(by_key), k.shape[1]),
            *given, lse, delta, dk, dv, by_key, **(constants | back_constants(ctx.tiles)),
        )  # fmt: skip
        if ctx.cache is not None:
            dk, dv = ctx.cache.take(ctx.layout)
        token = torch.zeros((), device=q.device)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), token, None, None, None, None


def splits(dtype: torch.dtype) -> bool:
    """Whether tiles that need no mask have a loop of their own.

    It pays where matrix units do the products; without them the second loop only costs registers.
    """
    return dtype in (torch.bfloat16, torch.float16)


def back_constants(tiles: AttentionTiles) -> dict[str, Any]:
    """What attention_dkv is launched with in place of the others' constants."""
    query, key = tiles.back
    warps = tiles.back_warps or tiles.num_warps
    return {"BQ": query, "BK": key, "num_warps": warps, "num_stages": tiles.back_stages}


def _check_cache(cache: KeyValueCache, q: Tensor, k: Tensor, v: Tensor) -> None:
    have = (tuple(cache.keys.shape[1:]), cache.keys.dtype, cache.keys.device)
    got = (tuple(k.shape[1:]), k.dtype, k.device)
    if have != got:
        raise KernelError(f"cache: holds {have} (heads and head, dtype, device), got {got}")
    if not torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise KernelError(
            "cache: called without grad mode on inputs that require a gradient: backward would not "
            "know this chunk (reentrant checkpointing does so; use_reentrant=False works)"
        )


def _constants(q: Tensor, k: Tensor, tiles: AttentionTiles, scale: float) -> dict[str, Any]:
    return {
        "SCALE": scale,
        "H": q.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "DIM": q.shape[2],
        "WIDE": block_of(q.shape[2], least=16),
        "BQ": tiles.query,
        "BK": tiles.key,
        "SPLIT": splits(q.dtype),
        "ACC": TL_DTYPE[accumulator_dtype(q.dtype)],
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | None = None,
    cache: KeyValueCache | None = None,
    scale: float | None = None,
    tiles: AttentionTiles | None = None,
) -> Tensor:
    """q (R, H, D), k and v (R, G, D), G divides H -> (R, H, D). Padding rows give 0 and get 0.

    layout: the rows' samples (default: one). With a cache the rows are a chunk: they are written
    into it and attend to all that it holds of their sample; chunks come in order. Raises
    KernelError, LayoutError (UnalignedCut).
    """
    check_floats(q=q, k=k, v=v)
    check_shape("q", q, ("R", "H", "D"))
    check_shape("k", k, (q.shape[0], "G", q.shape[2]))
    check_shape("v", v, tuple(k.shape))
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise KernelError(f"k: got {k.shape[1]} heads, expected a divisor of q's {q.shape[1]}")
    if not 1 <= q.shape[2] <= MAX_HEAD:
        raise KernelError(f"q: got a head of {q.shape[2]} elements, expected 1 to {MAX_HEAD}")
    layout = resolve(layout, len(q))
    if cache is not None:
        _check_cache(cache, q, k, v)
    token = torch.zeros((), device=q.device) if cache is None else cache.token
    chosen = tiles or default_tiles(q.dtype)
    c = q.shape[2] ** -0.5 if scale is None else scale
    out, token = _Attention.apply(q, k, v, token, layout, cache, chosen, c)
    if cache is not None:
        cache.token = token
    return out
