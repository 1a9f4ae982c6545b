"""Invariant Triton kernels with backward: the same bits for every batch shape.

    layout    which (sample, position) each physical row holds
    tree      the canonical reduction tree of weight gradients, version 1
    rms_norm, layer_norm, linear, attention, embedding, swiglu, rope, cross_entropy
    oracle    the mathematics of each, in float64 numpy
    chain     a small decoder made of them
    certificate, variants   proof without a GPU; planted: kernels that must be caught

Import an operator's module, not this one: nothing is imported here, so that layout, tree and
oracle work where Triton does not exist.
"""
