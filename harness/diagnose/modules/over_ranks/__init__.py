"""Collectives by value: what ranks put in, what came out, and what should have.

In: what a rank's group issued. Out: sums that are not what they should be. Asks `values`, `where`.
"""
