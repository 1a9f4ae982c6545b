"""Parameters and settings that a module computes with, beside the model's own.

In: what a module computed with. Out: what is another there, and what it is. Asks
`values` and `in_code`.
"""
