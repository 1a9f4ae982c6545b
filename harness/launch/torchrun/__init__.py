"""Under torchrun: every worker runs the check, on one host or several, and one of them judges.

ranks.py is where a worker begins and agrees with the others on what and where (agreement.py);
member.py is its life up to its exit code, others.py what it knows of the other ranks, agent.py
what ties it to other hosts. Out: one verdict, one exit code. Imports launch, record and base.
"""
