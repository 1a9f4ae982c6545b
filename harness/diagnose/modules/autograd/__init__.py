"""Backwards: those that users write, hooks, what autograd passes, uses of a parameter.

In: what the backwards were given and gave. Out: those that give something else than they should.
Asks `values` and `in_code`.
"""
