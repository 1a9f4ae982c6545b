"""Explainers that look at what went through the modules of a failing step (`diagnose/modules`)."""
