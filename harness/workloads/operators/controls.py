"""torch's own operators under the same matrix: controls, reported as they are."""

from __future__ import annotations

from typing import Any

import torch
from sumgrad.invariance.arrangement import Call
from sumgrad.invariance.operator_run import Tensors
from sumgrad.invariance.protocol import Operator, Rows
from sumgrad.invariance.runs import plain
from torch import Tensor
from torch.nn import functional

WIDTH, VOCABULARY = 24, 13


def _attention(rows: Tensors, weights: Tensors, call: Call) -> Tensor:
    """Scaled dot product attention over all rows of the call, samples kept apart by a mask."""
    sample = torch.full((call.num_rows,), -1)
    position = torch.zeros(call.num_rows, dtype=torch.int64)
    for s in call.segments:
        sample[s.row : s.row + s.length] = s.sample
        position[s.row : s.row + s.length] = torch.arange(s.start, s.stop)
    same = (sample[:, None] == sample) & (position[:, None] >= position)
    same |= torch.eye(call.num_rows, dtype=torch.bool)
    q, k, v = (rows[name].transpose(0, 1) for name in ("q", "k", "v"))
    mask = same.to(q.device)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


def _counted(call: Call, targets: Tensor) -> Tensor:
    """Targets of valid rows; padding is ignored."""
    out = torch.full_like(targets, -100)
    for s in call.segments:
        out[s.row : s.row + s.length] = targets[s.row : s.row + s.length]
    return out


def controls() -> list[Operator]:
    """One for each of ours that torch has."""
    width = (WIDTH,)
    x: dict[str, Any] = {"rows": {"x": Rows(width)}, "expect": "control"}
    heads = (2, 12)
    return [
        plain(
            "torch rms_norm",
            lambda r, w, _: functional.rms_norm(r["x"], width, w["weight"], 1e-6),
            weights={"weight": width}, output=width, **x,
        ),
        plain(
            "torch layer_norm",
            lambda r, w, _: functional.layer_norm(r["x"], width, w["weight"], w["bias"]),
            weights={"weight": width, "bias": width}, output=width, **x,
        ),
        plain(
            "torch linear",
            lambda r, w, _: functional.linear(r["x"], w["weight"], w["bias"]),
            weights={"weight": (19, WIDTH), "bias": (19,)}, output=(19,), **x,
        ),
        plain(
            "torch attention",
            _attention, rows={name: Rows(heads) for name in "qkv"}, output=heads,
            rows_alone=False, expect="control",
        ),
        plain(
            "torch embedding",
            lambda r, w, _: functional.embedding(r["tokens"], w["weight"]),
            rows={"tokens": Rows(limit=VOCABULARY)}, weights={"weight": (VOCABULARY, WIDTH)},
            output=width, expect="control",
        ),
        plain(
            "torch silu",
            lambda r, w, _: functional.silu(r["gate"]) * r["up"],
            rows={"gate": Rows(width), "up": Rows(width)}, output=width, expect="control",
        ),
        plain(
            "torch cross_entropy",
            lambda r, w, call: functional.cross_entropy(
                r["logits"], _counted(call, r["targets"]), reduction="sum"
            ),
            rows={"logits": Rows((VOCABULARY,)), "targets": Rows(limit=VOCABULARY)},
            expect="control",
        ),
    ]  # fmt: skip
