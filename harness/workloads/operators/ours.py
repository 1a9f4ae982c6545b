"""Our operators and the full chain, as the invariance matrix takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sumgrad.invariance.arrangement import Arrangement, Call
from sumgrad.invariance.operator_run import Tensors
from sumgrad.invariance.protocol import Operator, OperatorError, OperatorFields, Rows
from sumgrad.invariance.tree_exchange import Held, tree_sum
from sumgrad.kernels import oracle
from sumgrad.kernels.attention import AttentionTiles, attention
from sumgrad.kernels.chain import Chain
from sumgrad.kernels.cross_entropy import cross_entropy
from sumgrad.kernels.embedding import embedding
from sumgrad.kernels.kv_cache import KeyValueCache
from sumgrad.kernels.layer_norm import layer_norm
from sumgrad.kernels.layout import Layout, Piece
from sumgrad.kernels.linear import default_tiles, linear
from sumgrad.kernels.rms_norm import rms_norm
from sumgrad.kernels.rope import rope
from sumgrad.kernels.swiglu import swiglu
from sumgrad.kernels.tree import Accumulator, Nodes, TreeId
from sumgrad.workloads.operators.chain_reference import chain_reference
from torch import Tensor

LEAF = 16
WIDTH = 24
VOCABULARY = 13
TILES = AttentionTiles(query=16, key=16)
PARTS = 4  # of the chain: attention and MLP of each layer
_ANY = TreeId(leaf=LEAF)  # of a rank that holds no node and so knows no tree
CHAIN = Chain(
    vocabulary=VOCABULARY, width=WIDTH, layers=2, heads=2, kv_heads=1, mlp=20, leaf=LEAF,
    tiles=default_tiles(torch.float32, LEAF), attention_tiles=TILES,
)  # fmt: skip


def layout_of(call: Call, num_samples: int) -> Layout:
    """A call's rows in the words of the kernels."""
    return Layout(
        num_samples=num_samples,
        num_rows=call.num_rows,
        pieces=tuple(
            Piece(sample=s.sample, start=s.start, stop=s.stop, row=s.row, ends=s.ends)
            for s in call.segments
        ),
    )


@dataclass(slots=True, kw_only=True)
class TreeState:
    """One rank: its weights, a tree for each gradient, and caches while it prefills in chunks."""

    lengths: tuple[int, ...]
    weights: Tensors
    trees: dict[str, Accumulator]
    shapes: dict[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    caches: list[KeyValueCache] | None = None


@dataclass(frozen=True, kw_only=True)
class TreeOperator(OperatorFields):
    """An operator whose weight gradients (and loss) go into canonical trees.

    function(rows, weights, layout, trees by name, caches) -> the result. reference(rows and weights
    by name as arrays, seed, lengths) -> float64 results by name.
    """

    function: Callable[..., Tensor | tuple[Tensor, Tensors]]
    caches: Callable[[Layout, torch.dtype, torch.device], list[KeyValueCache]] | None = None
    cut: int = LEAF
    chunks: bool = True

    def begin(
        self, lengths: Sequence[int], arrangement: Arrangement, weights: Tensors, dtype: torch.dtype
    ) -> TreeState:
        trees = {name: Accumulator(len(lengths)) for name in self.weights}
        shapes = dict(self.weights)
        if self.output is None:
            trees["loss"], shapes["loss"] = Accumulator(len(lengths)), (1,)
        return TreeState(
            lengths=tuple(lengths),
            weights=weights,
            trees=trees,
            shapes=shapes,
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
            device=next((w.device for w in weights.values()), torch.device("cpu")),
            caches=[] if arrangement.chunked and self.caches else None,
        )

    def forward(
        self, state: TreeState, call: Call, rows: Tensors
    ) -> Tensor | tuple[Tensor, Tensors]:
        layout = layout_of(call, len(state.lengths))
        if state.caches is not None and not state.caches:
            assert self.caches is not None
            given = (*rows.values(), *state.weights.values())
            like = next(t for t in given if t.is_floating_point())
            whole = Layout.packed(state.lengths, gap=5)
            state.caches += self.caches(whole, like.dtype, like.device)
        return self.function(rows, state.weights, layout, state.trees, state.caches)

    def totals(self, states: Sequence[TreeState]) -> Tensors:
        trees = states[0].trees
        if len(states) > 1:
            trees = {name: Accumulator(len(states[0].lengths)) for name in states[0].trees}
            for state in states:
                for name, tree in state.trees.items():
                    if tree.tree is not None:
                        trees[name].add(tree.nodes())
        never = [name for name, tree in trees.items() if tree.tree is None]
        if never:
            raise OperatorError(f"{_gradient(never[0])}: no call put a node into this tree")
        return {_gradient(name): _root(tree, states[0], name) for name, tree in trees.items()}

    def exchange(self, state: TreeState, group: Any) -> Tensors:
        return {_gradient(name): exchange(state, name, group).root for name in state.trees}

    def oracle(self, rows: Tensors, weights: Tensors, seed: Tensor, lengths: Sequence[int]) -> Any:
        if self.reference is None:
            return None
        values = {name: value.numpy() for name, value in {**rows, **weights}.items()}
        return self.reference(values, seed.numpy(), lengths)


def _gradient(name: str) -> str:
    return name if name == "loss" else "d" + name


def _root(tree: Accumulator, state: TreeState, name: str) -> Tensor:
    root = tree.finish()
    if root is None:
        return torch.zeros(state.shapes[name], dtype=state.dtype, device=state.device)
    return root


def exchange(state: TreeState, name: str, group: Any) -> Any:
    """One tree over real ranks: a TreeSum."""
    tree = state.trees[name]
    nodes = tree.nodes() if tree.tree is not None else None
    held = Held(
        tree=repr(nodes.tree) if nodes else "",
        keys=nodes.keys if nodes else (),
        empties=nodes.empties if nodes else (),
        values=nodes.values.cpu()
        if nodes
        else torch.empty(0, *state.shapes[name], dtype=state.dtype),
    )
    known = tree.tree

    def finish(shares: Sequence[Held]) -> Tensor:
        whole = Accumulator(len(state.lengths))
        for share in shares:
            if share.keys or share.empties:
                whole.add(
                    Nodes(
                        tree=known or _ANY,
                        num_samples=len(state.lengths),
                        keys=tuple(share.keys),
                        empties=tuple(share.empties),
                        values=share.values,
                    )
                )
        root = whole.finish()
        return torch.zeros(shares[0].values.shape[1], dtype=state.dtype) if root is None else root

    return tree_sum(held, shape=state.shapes[name], dtype=state.dtype, finish=finish, group=group)


def _chain(r: Tensors, w: Tensors, layout: Layout, trees: Any, caches: Any) -> Any:
    logits, loss = CHAIN.forward(
        w, r["tokens"], r["targets"], layout=layout, sinks=trees, caches=caches
    )
    return loss, {"y": logits}


def _norm(values: dict[str, Any], seed: Any, _: Any) -> Any:
    return oracle.rms_norm(values["x"], values["weight"], seed)


def shipped() -> list[Operator]:
    """Every operator of ours in its invariant mode, and the full chain."""
    return [*_norms_and_products(), *_with_positions(), *_with_tokens()]


def _norms_and_products() -> list[Operator]:
    width = (WIDTH,)
    x = {"x": Rows(width)}
    return [
        TreeOperator(
            name="rms_norm",
            function=lambda r, w, layout, trees, _: rms_norm(
                r["x"], w["weight"], layout=layout, sinks=trees, leaf=LEAF
            ),
            rows=x, weights={"weight": width}, output=width, reference=_norm,
        ),
        TreeOperator(
            name="layer_norm",
            function=lambda r, w, layout, trees, _: layer_norm(
                r["x"], w["weight"], w["bias"], layout=layout, sinks=trees, leaf=LEAF
            ),
            rows=x, weights={"weight": width, "bias": width}, output=width,
            reference=lambda v, seed, _: oracle.layer_norm(v["x"], v["weight"], v["bias"], seed),
        ),
        TreeOperator(
            name="linear",
            function=lambda r, w, layout, trees, _: linear(
                r["x"], w["weight"], w["bias"], layout=layout, sinks=trees,
                tiles=default_tiles(r["x"].dtype, LEAF),
            ),
            rows=x, weights={"weight": (19, WIDTH), "bias": (19,)}, output=(19,),
            reference=lambda v, seed, _: oracle.linear(v["x"], v["weight"], v["bias"], seed),
        ),
        TreeOperator(
            name="swiglu",
            function=lambda r, _w, _l, _t, _c: swiglu(r["gate"], r["up"]),
            rows={"gate": Rows(width), "up": Rows(width)}, output=width,
            reference=lambda v, seed, _: oracle.swiglu(v["gate"], v["up"], seed),
        ),
    ]  # fmt: skip


def _with_positions() -> list[Operator]:
    heads = (2, 12)
    return [
        TreeOperator(
            name="attention",
            function=lambda r, _w, layout, _t, caches: attention(
                r["q"], r["k"], r["v"], layout=layout, cache=caches[0] if caches else None,
                tiles=TILES,
            ),
            rows={"q": Rows(heads), "k": Rows((1, 12)), "v": Rows((1, 12))}, output=heads,
            caches=lambda layout, dtype, device: [
                KeyValueCache(layout, num_heads=1, head=12, dtype=dtype, device=device)
            ],
            rows_alone=False,
            reference=lambda v, seed, lengths: oracle.attention(
                v["q"], v["k"], v["v"], seed, lengths=lengths
            ),
        ),
        TreeOperator(
            name="rope",
            function=lambda r, _w, layout, _t, _c: rope(r["x"], layout=layout),
            rows={"x": Rows(heads)}, output=heads,
            reference=lambda v, seed, lengths: oracle.rope(v["x"], seed, lengths=lengths),
        ),
    ]  # fmt: skip


def _with_tokens() -> list[Operator]:
    return [
        TreeOperator(
            name="embedding",
            function=lambda r, w, layout, trees, _: embedding(
                r["tokens"], w["weight"], layout=layout, sinks=trees, leaf=LEAF
            ),
            rows={"tokens": Rows(limit=VOCABULARY)}, weights={"weight": (VOCABULARY, WIDTH)},
            output=(WIDTH,),
            reference=lambda v, seed, _: oracle.embedding(v["tokens"], v["weight"], seed),
        ),
        TreeOperator(
            name="cross_entropy",
            function=lambda r, _w, layout, trees, _: cross_entropy(
                r["logits"], r["targets"], layout=layout, sinks=trees, leaf=LEAF, ignore_index=3
            )[0],
            rows={"logits": Rows((VOCABULARY,)), "targets": Rows(limit=VOCABULARY)},
            reference=_cross_entropy,
        ),
        TreeOperator(
            name="chain",
            function=_chain,
            rows={"tokens": Rows(limit=VOCABULARY), "targets": Rows(limit=VOCABULARY)},
            weights=CHAIN.shapes(), rows_alone=False, caches=CHAIN.caches, parts=PARTS,
            reference=lambda v, seed, lengths: chain_reference(CHAIN, v, float(seed), lengths),
        ),
    ]  # fmt: skip


def _cross_entropy(values: dict[str, Any], seed: Any, _: Any) -> Any:
    targets = np.where(values["targets"] == 3, -1, values["targets"])
    found = oracle.cross_entropy(values["logits"], targets, float(seed))
    return {**found, "loss": found["loss"].reshape(1)}
