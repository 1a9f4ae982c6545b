"""In a process of a script that is observed: who it is, what it computes, and what is kept of it.

watch.py has the hooks, and calls the others: in_front.py puts them before torch's own, seat.py is
which rank this is, weights.py and buffers.py make and keep values, owned.py is which parameters
optimizers have, look.py looks into modules. In: what is asked, and torch's calls; out: a rank's
record. The script must not notice: what goes wrong here is a trouble in the record, no exception.
"""
