"""The shipped workloads. The only part of the harness that may import sumgrad.kernels."""
