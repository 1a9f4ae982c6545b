"""Ledger: every operation that a rank issues, written down before it starts.

In: a process group to stand under, and parameters to watch. Out: ledger lines (process_group.py),
names like `allreduce@dp#1` (operations.py), which gradients entered and left (evidence.py). Judges
nothing. Imports topology and base.
"""
