"""sumgrad.kernels: batch-invariant Triton kernels with backward. Imports nothing of the harness.

Empty in this release: the workloads run on torch's own operators.
"""
