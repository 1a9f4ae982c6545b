"""A Program: a user's own distributed step, seen from outside.

protocol.py is what a user implements, context.py what a step is told, probe.py the look before it
runs, rank.py the run, placed/ which elements a rank holds, unseen.py what happens beside the
gradients, lift.py true float64 on both sides, reference/ loss_sum in one process and its gradient
row by row after a failure, job.py the Subject. After a failure: watched/ what the step does,
functions/ backwards of a user's own, tried/ what makes it right.
"""
