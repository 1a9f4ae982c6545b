"""Invariant Triton kernels with backward: the same bits for every batch shape.

    from sumgrad.kernels import Layout, Accumulator, rms_norm, linear, attention

    layout    which (sample, position) each physical row holds
    tree      the canonical reduction tree of weight gradients, version 1
    rms_norm, layer_norm, linear, attention, embedding, swiglu, rope, cross_entropy
    oracle    the mathematics of each, in float64 numpy
    chain     a small decoder made of them
    certificate, variants   proof without a GPU; planted: kernels that must be caught

Nothing is imported before it is asked for, so that layout, tree and oracle work where Triton does
not exist. An operator's name is its function here, also where its module has been imported.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sumgrad.kernels.attention import attention as attention
    from sumgrad.kernels.cross_entropy import cross_entropy as cross_entropy
    from sumgrad.kernels.embedding import embedding as embedding
    from sumgrad.kernels.kv_cache import KeyValueCache as KeyValueCache
    from sumgrad.kernels.layer_norm import layer_norm as layer_norm
    from sumgrad.kernels.layout import Layout as Layout
    from sumgrad.kernels.linear import linear as linear
    from sumgrad.kernels.rms_norm import rms_norm as rms_norm
    from sumgrad.kernels.rope import rope as rope
    from sumgrad.kernels.swiglu import swiglu as swiglu
    from sumgrad.kernels.tree import Accumulator as Accumulator

OPERATORS = (
    "attention", "cross_entropy", "embedding", "layer_norm", "linear", "rms_norm", "rope", "swiglu",
)  # fmt: skip
OTHERS = {"Accumulator": "tree", "KeyValueCache": "kv_cache", "Layout": "layout"}
__all__ = ["Accumulator", "KeyValueCache", "Layout", "attention", "cross_entropy", "embedding",
           "layer_norm", "linear", "rms_norm", "rope", "swiglu"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in OTHERS:
        return getattr(importlib.import_module(f"{__name__}.{OTHERS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(ModuleType):
    """Where an operator's module is imported, Python puts it in the way of the function."""


def _operator(name: str) -> property:
    def function(_: ModuleType) -> Any:
        return getattr(importlib.import_module(f"{__name__}.{name}"), name)

    return property(function, lambda *_: None)


for _name in OPERATORS:
    setattr(_Package, _name, _operator(_name))
sys.modules[__name__].__class__ = _Package
