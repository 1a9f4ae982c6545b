"""Shipped Programs with a real bug written into their code: the faults of the third layer.

Each is a subclass that changes one method as the bug did. PLANTED (register.py) says of each what
it is called, which operator of the catalogue it plants, and which cause names it; faults/step.py
finds them by name. Imports workloads/programs only.
"""

from sumgrad.workloads.planted import data_parallel, model_parallel
from sumgrad.workloads.planted.register import PLANTED

__all__ = ["PLANTED", "data_parallel", "model_parallel"]
