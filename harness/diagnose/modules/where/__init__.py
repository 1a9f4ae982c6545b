"""In which module a step goes wrong: every module's outputs and gradients, the ways between them.

In: the traces of a failing step. Out: the first wrong modules, and how rows enter the loss there.
Asks `values`.
"""
