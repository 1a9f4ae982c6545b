"""Which numbers of a rank are the single process's: tensors beside tensors, vector by vector.

In: a tensor of a rank, what the single process has. Out: what of it is known, and in which order.
Asks nothing of the other packages here.
"""
