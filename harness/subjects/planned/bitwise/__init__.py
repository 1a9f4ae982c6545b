"""The bitwise tier of a planned workload: the same bits on every topology as in one process.

rows.py: one row a call, so that no shape follows a rank's share; step.py: the ranks, sums by
canonical trees; reference.py: one process. In: formulas and a plan; out: tensors by name.
"""
