"""Invariance: does an operator give the same bits whatever else is in the batch?

In: an Operator and Arrangements (arrangement.py, data). Out: bits by sample and position
(operator_run.py), compared (bits.py, runs.py), as a matrix (matrix.py, ranks.py). tree_exchange.py
is the canonical tree across ranks.
"""

from sumgrad.invariance.protocol import Operator, Rows
from sumgrad.invariance.runs import PlainOperator, assert_invariant, check_operator, plain

__all__ = ["Operator", "PlainOperator", "Rows", "assert_invariant", "check_operator", "plain"]
