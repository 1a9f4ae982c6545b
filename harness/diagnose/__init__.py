"""Diagnose: why a run is wrong, from evidence; and the verdict, put together from everything.

In: a comparison and its findings. Out: causes with coefficients (diagnose.py: outright.py, then
explainers/ and the rule of explanation.py that chooses), and the Verdict (verdict.py). Fits are in
fit.py and row_fit.py. Starts no process. Imports judge, record, plan, faults, base.
"""
