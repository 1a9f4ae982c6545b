"""`sumgrad diff`: a script unchanged, on many ranks and on one, and its gradients compared.

boot.py is what Python loads first in every process of the script; seat.py is which rank that is,
watch.py observes it, by what in_front.py puts before torch's own; weights.py makes weights equal;
look.py looks into modules; user_files.py puts files back; sides.py starts and ends them; diff.py
leads to a verdict, variants.py to a matrix.
In: command lines; out: a run directory like any other. Imports subjects, judge, record, local.
"""
