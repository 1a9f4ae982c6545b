"""What everything stands on: errors, files, verdicts, outcomes, tolerances, texts, bits.

In: nothing of ours. Out: values and small functions without a policy, but for `tolerances`, the one
place where it is decided how far off a gradient may be. Must not import any other folder.
"""
