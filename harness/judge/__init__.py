"""Judge: a record's gradients compared with its reference, and the checks that look at the rest.

In: a Record. Out: a diff for each tensor of each rank (comparison.py, cells.py) and findings
(checks/). What a subject knows is asked for in knowledge.py; collectives as all members issued them
are in joint.py. Starts no process, explains nothing. Imports record, plan, ledger, base.
"""
