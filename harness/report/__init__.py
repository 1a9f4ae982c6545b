"""Report: a Verdict shown. Judges nothing and computes no figure that the verdict has not.

In: a Verdict, a Plan. Out: text for the terminal (terminal.py, plan.py), markdown, HTML and JUnit
(files.py with templates/). Prints nothing itself. Imports plan, base.
"""

# What `sumgrad report` can write: flag -> who renders it, a function from a Verdict to text.
FORMATS = {
    "html": "sumgrad.report.files:to_html",
    "markdown": "sumgrad.report.files:to_markdown",
    "junit": "sumgrad.report.files:to_junit",
}
