"""What a failing step does, seen from outside: modules, lines, autograd, what is kept.

In: a model and its step, run once more. Out: traces (`record`). Asks `placed` and `functions`.
"""
