"""The `sumgrad` command: parses, calls, prints. The only folder that prints.

entry.py is where commands begin, arguments.py the flags, main.py the verbs, catalogue.py what there
is, interrupts.py what a signal does. Everything heavy is imported when a verb runs.
"""
