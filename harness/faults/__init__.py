"""Faults: what is planted to prove that it would be noticed, and the catalogue of real bugs.

Three layers: of a plan (plan.py), of a collective (collective.py what, misbehaviour.py how), around
a step (step.py); operators.py says which public report each stands for. Data and small wrappers;
runs nothing by itself. Imports plan, ledger, topology, base.
"""
