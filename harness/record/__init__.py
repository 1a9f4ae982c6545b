"""Record: the directory between running and judging, one format and one reader for every subject.

In: what was asked (spec.py), what ranks wrote (ranks.py, endings.py), references (reference.py).
Out: a `Record` (directory.py), read only as it was written (manifest.py). Knows no plan and judges
nothing. Imports topology and base.
"""
