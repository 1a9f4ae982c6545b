"""A failing step with one thing done otherwise, again and again, on all ranks together.

In: changes and edits (`diagnose`). Out: which of them make every gradient right. Ranks meet on a
board before they communicate; edited code can do nothing outside. Asks `placed` and `watched`.
"""
