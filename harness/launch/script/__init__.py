"""`sumgrad diff`: a script unchanged, on many ranks and on one, and its gradients compared.

boot.py is what Python loads first in every process of the script, and watched/ what observes it
there; sides.py starts and ends them; running.py and single_runs.py are the runs, diff.py leads to a
verdict, variants.py to a matrix.
In: command lines; out: a run directory like any other. Imports subjects, judge, record, local.
"""
