"""In which way a value is wrong: in another place, with a part too much, a part of a sum.

In: a wrong tensor. Out: what it is instead, by value. Asks `values` and `where`.
"""
