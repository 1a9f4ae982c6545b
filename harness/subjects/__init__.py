"""Subjects: what is checked. Each kind runs a step on a rank and gives a reference in one process.

In: a RunSpec. Out: tensors and facts of a rank, and References (subject.py is the protocol). Kinds:
planned/ (formulas under a plan), program/ (a user's own step). loading.py finds classes by name;
noise_floor.py measures what arithmetic does. Imports record, plan, ledger, faults, convention.
"""
