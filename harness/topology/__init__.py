"""Topology: pools of ranks with named axes, from strict YAML; and what a workload declares.

In: a YAML file. Out: `Topology` (pools.py), its errors with file and line (yaml_source.py), the
shipped files by name (shipped.py), `Declaration` (declaration.py), data only. Imports base.
"""
