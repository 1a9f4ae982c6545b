"""The three-pool workload with one ingredient of exact bits left out; named by `--workload`.

Each patches the step of the ranks when it is made; the reference's process, which makes it too,
does not use what is patched.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from sumgrad.subjects.planned.bitwise import step as steps
from sumgrad.workloads.three_pool.workload import ThreePool, ThreePoolFormulas


class _Patched(ThreePool):
    names = ()

    def __init__(self, options, *, seed, where):
        super().__init__(options, seed=seed, where=where)
        for owner, name, value in self.changes():
            setattr(owner, name, value)

    def changes(self):
        return ()


class PlainSum(_Patched):
    """The same numbers, summed by the backend."""

    def changes(self):
        def plain(self, trees, leaves, like):
            out = []
            for own in leaves:
                total = like.clone()
                for key in sorted(own):
                    total = total + own[key]
                dist.all_reduce(total, group=self.ctx.group)
                out.append(total)
            return out

        return ((steps.TreeStep, "_sum_by_trees", plain),)


class DroppedNode(_Patched):
    """The last node of the last rank that brings one is zero."""

    def changes(self):
        own = steps.TreeStep._sum_by_trees

        def dropped(self, trees, leaves, like):
            leaves = [dict(held) for held in leaves]
            last = max((i for i, keys in enumerate(trees[0].keys) if keys), default=0)
            if self.member == last and leaves[0]:
                leaves[0][max(leaves[0])] = torch.zeros_like(like)
            return own(self, trees, leaves, like)

        return ((steps.TreeStep, "_sum_by_trees", dropped),)


class Rounded(_Patched):
    """Nodes on their way in bfloat16."""

    def changes(self):
        own = steps.node

        def rounded(key, held, num):
            return own(key, held, num).to(torch.bfloat16).float()

        return ((steps, "node", rounded),)


class NoSiblings(_Patched):
    """Nodes are added as they come."""

    def changes(self):
        def in_order(held, num):
            values = list(held.values())
            total = values[0]
            for value in values[1:]:
                total = total + value
            return total

        return ((steps, "root", in_order),)


class Batched(_Patched):
    """A rank's rows in one call, so that shapes follow its share."""

    def changes(self):
        own = steps.TreeStep.__init__

        def together(rows, own_rows):
            made = rows.formulas.produce(rows.leaves, torch.tensor(own_rows))
            for i, row in enumerate(own_rows):
                one = {u: q[i : i + 1] for u, q in made.quantity.items()}
                rows._produced[row] = type(made)(quantity=one, inner=made.inner[i : i + 1])

        def init(self, *args):
            own(self, *args)
            if self.own and self.with_quantity:
                together(self.row_by_row, list(self.own))

        return ((steps.TreeStep, "__init__", init),)


class ByEdge(_Patched):
    """The cotangents of each pool are differentiated by themselves."""

    def changes(self):
        own = steps.RowByRow.through

        def apart(self, outputs, slopes):
            if len(outputs) < 3:
                return own(self, outputs, slopes)
            half = len(outputs) // 2
            first, second = (
                own(self, outputs[:half], slopes[:half]),
                own(self, outputs[half:], slopes[half:]),
            )
            return {u: first[u] + second[u] if u in second else first[u] for u in first}

        step_init = steps.TreeStep.__init__

        def init(self, *args):
            step_init(self, *args)
            self.row_by_row.through = lambda o, s: apart(self.row_by_row, o, s)

        return ((steps.TreeStep, "__init__", init),)


class LocalAndRest(_Patched):
    """local + (S - local) in place of S."""

    def changes(self):
        own = steps.TreeStep._sum_by_trees

        def residual(self, trees, leaves, like):
            roots = own(self, trees, leaves, like)
            if len(trees) > 1 or not leaves[0] or not trees[0].over_rows:
                return roots
            local = steps._loose_sum(leaves[0], like)
            return [local + (roots[0] - local)]

        return ((steps.TreeStep, "_sum_by_trees", residual),)


class Restless(ThreePool):
    """A formula that is another one each time it is called."""

    def formulas(self, dtype, device, **more):
        return _Restless(self, dtype=dtype, device=device, rounded_to=dtype)


class _Restless(ThreePoolFormulas):
    calls = itertools.count(1)

    def statistics(self, term, produced, rows):
        return super().statistics(term, produced, rows) * (1 + 1e-6 * next(self.calls))
