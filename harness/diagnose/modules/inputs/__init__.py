"""What modules are handed: rows of the batch, ids, targets, parts of rows, in which order.

In: what entered the modules. Out: rows that are read otherwise than the single process reads them.
Asks `values` and `where`.
"""
