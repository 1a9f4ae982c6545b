"""A planned workload on a page, for tests that change one line of it, and its topology."""

from __future__ import annotations

MINI = '''
import torch
from sumgrad.topology.declaration import *
from sumgrad.subjects.planned.workload import Produced

class Mini:
    """One pool, one linear model; subclasses change what they are about."""
    shapes = {"w": (3, 2), "b": (3,)}
    terms = (Term(name="main", role="dp", kind="rows"),)
    def __init__(self, options, *, seed, where):
        params = tuple(Param(name=n, unit="all", shape=s) for n, s in self.shapes.items())
        roles = (Role(name="dp", units=("all",), home=True),)
        self.declaration = Declaration(workload="mini", row_lengths=tuple(range(1, 8)),
            params=params, roles=roles, quantity=None, terms=self.terms)
    def params(self, step):
        g = torch.Generator().manual_seed(step)
        return {n: torch.randn(s, generator=g, dtype=torch.float64)
                for n, s in self.shapes.items()}
    def formulas(self, dtype, device, rounded_to=None):
        return self.Formulas(dtype)

    class Formulas:
        def __init__(self, dtype):
            g = torch.Generator().manual_seed(5)
            self.x = torch.randn(7, 2, generator=g).to(dtype)
        def produce(self, params, rows):
            return Produced(quantity={})
        def count(self, term, rows):
            return int((rows + 1).sum())
        def coefficient(self, term):
            return 1.5
        def loss_sum(self, term, *, params, quantity, rows, units, step, state):
            return (self.x[rows] @ params["w"].T + params["b"]).square().sum()
        def initial_state(self, term, rows):
            return {}
        def advance(self, term, *, params, quantity, rows, step, state):
            return {}
'''
ONE_POOL = "name: mini\nworkload: mini\npools:\n  dp: {axes: {dp: 3}}\n"
