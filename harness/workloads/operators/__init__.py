"""Operators as the invariance matrix takes them: ours, torch's as controls, and planted ones.

Each lays samples out as an Arrangement says and gives their bits back; chain_reference.py is the
chain in torch, float64. Imports kernels and invariance.
"""
