"""What a value would have to be for what follows to be right: functions solved for an argument.

In: a computation, what it should give. Out: the argument that gives it, and in which way that is
another. Asks `values` and `in_code`.
"""
