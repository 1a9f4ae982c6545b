"""Which line goes wrong: the computations of a step, by the line and the function that made them.

In: the computations of ranks and of the single process. Out: lines, and what they were given.
Asks `values` and `where`.
"""
