"""A user's own script as a subject: no protocol, no line changed; it knows its one-process run.

models.py: what it trains and where a rank's part of it lies; start.py: weights made equal; rows.py:
which rows it read; reference.py: the one-process runs as a Reference. launch/script observes.
In: modules and stored runs; out: values of record/. Starts no process; imports record, program.
"""
