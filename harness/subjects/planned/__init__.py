"""A planned workload: formulas without a rank, executed along its plan's own edges.

workload.py is the protocol to implement, step.py executes, exchange.py sends, reference.py computes
the same formulas in one process and shares no distributed code, job.py is the Subject.
"""
