"""The kill matrix: topologies x faults, each cell a run that must be noticed, or must pass.

cells.py is the matrix as data; plan_faults.py and programs.py run the cells, warm_rank.py without
starting ranks again; shrink.py finds the smallest topology and batch that still fail.
"""
