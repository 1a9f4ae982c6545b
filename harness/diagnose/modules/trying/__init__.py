"""What may be done otherwise in a failing step, to see whether that makes it right.

In: lines that are known, the user's code. Out: changes and edits, likely ones first; `launch` runs
them. Asks `values`, `in_code` and `wanted`.
"""
