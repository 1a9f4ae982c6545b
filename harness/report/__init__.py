"""Report: a Verdict shown. Judges nothing and computes no figure that the verdict has not.

In: a Verdict, a Plan. Out: text for the terminal (terminal.py, plan.py), markdown, HTML and JUnit
(files.py with templates/), SARIF, of a matrix the same (grid.py, grid_files.py). Prints nothing
itself. Imports faults, plan, base.
"""

# What can be written of a verdict: flag -> who renders it, a function from a Verdict to text.
FORMATS = {
    "html": "sumgrad.report.files:to_html",
    "markdown": "sumgrad.report.files:to_markdown",
    "junit": "sumgrad.report.files:to_junit",
    "sarif": "sumgrad.report.sarif:to_sarif",
}
OF_GRIDS = {
    "html": "sumgrad.report.grid_files:grid_to_html",
    "markdown": "sumgrad.report.grid_files:grid_to_markdown",
    "junit": "sumgrad.report.grid_files:grid_to_junit",
    "sarif": "sumgrad.report.sarif:grid_to_sarif",
}
