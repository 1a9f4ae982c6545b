"""Shipped Programs with a real bug written into their code: the faults of the third layer.

PLANTED says of each what it is called and which cause names it; faults/step.py finds them by name.
"""
