"""Functions of a user's with a backward of their own: its adjoint, its derivative.

In: calls as they were seen. Out: whether the backward is what the forward asks for.
"""
