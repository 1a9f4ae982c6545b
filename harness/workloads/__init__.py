"""What is shipped: the flagship workload, Programs to copy from, operators; and planted bugs.

The only place where harness and kernels meet. Found by name (subjects/loading.py), so nothing
imports it. three_pool/ is planned; programs/ is a page each; planted/ has their bugs written as
code; operators/ is for `sumgrad ops`.
"""
