"""Where a step goes wrong: what went through its modules on every rank, beside one process's.

In: the traces of a failing step. Out: modules whose output, or the gradient that reaches it, is no
slice of the single process's; the factor on every vector of it; the rows that a rank read. A new
look at the traces is a function here and an explainer that asks it. Imports record.
"""
