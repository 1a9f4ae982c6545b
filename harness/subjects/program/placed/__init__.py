"""Which elements of the model a rank holds, and under which names: by placement, by value.

In: a rank's model, that of build(). Out: slices of full parameters, names of modules.
"""
