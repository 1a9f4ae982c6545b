"""Plan: topology x declaration as data, every arrow of a step an edge with an exact weight.

In: Topology and Declaration. Out: the Plan (edges.py), its Proof by fractions (proof.py), what its
ledger must read (schedule.py), the gradient that it predicts from partials (predict.py). No tensor
but in predict.py, no process, no file. Imports topology and base.
"""
