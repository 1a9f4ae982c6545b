"""Report: a Verdict shown. Judges nothing and computes no figure that the verdict has not.

In: a Verdict, a Plan. Out: text for the terminal (terminal.py, plan.py), markdown, HTML and JUnit
(files.py with templates/). Prints nothing itself. Imports plan, base.
"""
