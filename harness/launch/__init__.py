"""Launch: one check from the flags to the verdict, on processes of this machine or under torchrun.

In: flags (ask.py). Out: a run directory, judged (check.py, judging.py, torchrun/). rank.py and
guard.py are a rank's process; local/ starts ranks in a fraction of a second; matrix/ runs many
checks. The only folder that starts processes; prints nothing.
"""
