"""The flagship: four loss terms on three kinds of pools, over real text.

workload.py declares and gives formulas, model.py is the mathematics, kernels.py the same on
sumgrad.kernels, documents.py the rows, draws.py numbers that do not depend on the sharding.
"""
