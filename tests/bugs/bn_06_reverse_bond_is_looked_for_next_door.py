"""A directed message passing network for molecules (D-MPNN, as in chemprop: hidden values live on directed bonds, and a bond's message is the sum of those that enter its first atom without its own
reverse), trained with DDP on three ranks (4, 3 and 3 of ten molecules, two micro-batches, the first without synchronisation). The ranks' loader sorts the directed bonds of a micro-batch by the atom that
they end in, so that sums over atoms are sums over segments.

The bug: the loader says that the reverse of bond 2k is bond 2k + 1, which holds in the order of the file and not in the sorted one. After the class of public reports about e ^ 1 as the reverse edge
(chemprop's b2revb, and torch-geometric's transforms that coalesce or sort edge_index and so part edges from what was paired with them).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, ATOMS, FEATURES, BONDS, KINDS, WIDTH, HOPS = 10, 5, 4, 6, 3, 7, 3


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(FEATURES + KINDS, WIDTH)
        self.pass_on = nn.Linear(WIDTH, WIDTH)
        self.atom = nn.Linear(FEATURES + WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def gather(self, hidden, graph):
        if "length" in graph:
            return torch.segment_reduce(hidden, "sum", lengths=graph["length"], axis=0)
        return hidden.new_zeros(len(graph["atoms"]), WIDTH).index_add(0, graph["target"], hidden)

    def forward(self, graph):
        first = self.enter(torch.cat([graph["atoms"][graph["source"]], graph["kind"]], -1))
        hidden = F.silu(first)
        for _ in range(HOPS):
            message = self.gather(hidden, graph)[graph["source"]] - hidden[graph["reverse"]]
            hidden = F.silu(first + self.pass_on(message))
        atoms = F.silu(self.atom(torch.cat([graph["atoms"], self.gather(hidden, graph)], -1)))
        return self.out(atoms.unflatten(0, (-1, ATOMS)).sum(1)).squeeze(-1)


def directed(rows):
    """Both directions of every bond that is there, one after the other, as in the file."""
    there = torch.arange(BONDS) < rows["bonds"][:, None]
    ends = (rows["ends"] + ATOMS * torch.arange(len(rows["ends"]))[:, None, None])[there]
    source, target = ends.flatten(), ends.flip(1).flatten()
    return source, target, rows["kind"][there].repeat_interleave(2, 0)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Messages()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        pairs = torch.combinations(torch.arange(ATOMS))
        ends = torch.stack(
            [pairs[torch.randperm(len(pairs), generator=g)[:BONDS]] for _ in range(ROWS)]
        )
        swap = torch.rand(ROWS, BONDS, 1, generator=g) < 0.5
        return {
            "atoms": torch.randn(ROWS, ATOMS, FEATURES, generator=g),
            "ends": torch.where(swap, ends.flip(2), ends),
            "bonds": torch.randint(3, BONDS + 1, (ROWS,), generator=g),
            "kind": torch.randn(ROWS, BONDS, KINDS, generator=g),
            "value": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        source, target, kind = directed(rows)
        reverse = torch.arange(len(source)) ^ 1
        graph = {
            "atoms": rows["atoms"].flatten(0, 1),
            "source": source,
            "target": target,
            "kind": kind,
        }
        return (model(graph | {"reverse": reverse}) - rows["value"]).square().sum(), len(
            rows["value"]
        )

    def reverse(self, order):
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        return place[order ^ 1]

    def collate(self, rows):
        source, target, kind = directed(rows)
        atoms = rows["atoms"].flatten(0, 1)
        order = target.argsort(stable=True)
        return {
            "atoms": atoms,
            "source": source[order],
            "kind": kind[order],
            "length": target.bincount(minlength=len(atoms)),
            "reverse": self.reverse(order),
        }

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            rows = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            model.require_backward_grad_sync = n == 1
            loss = (model(self.collate(rows)) - rows["value"]).square().sum()
            (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def reverse(self, order):
        return torch.arange(len(order)) ^ 1


EXPECT = dict(
    right=[
        r"revers|opposite|\^ ?1|pair|other direction|index|neighbou?r",
        r"sort|order|argsort|permut|position|index|place|\^ ?1|next",
        r"reverse|collate|message|bond|edge|hidden|index|input|rows|graph",
    ],
    place=[r"\breverse\b", r"collate", r"messages?", r"pass_on", r"\border\b"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|segment_reduce .{0,20}wrong|(enter|first) (computes|is) .{0,20}wrong",
    ],
)
WHY = (
    "Clean.reverse maps each sorted directed bond to the place where its reverse was sorted to; Buggy.reverse hands back arange ^ 1, the pairing of the file's order, though the bonds have been sorted by their "
    "ending atom. So from the first hop on a bond's message subtracts the hidden values of some other bond that lies next to it, mostly one that enters the same atom, of the same molecule. The initial values "
    "(enter), sources, kinds and segment lengths are right; the first wrong value is the input of pass_on, on all ranks, in nearly all rows. Loss and all gradients are wrong; DDP's mean, the factor 3 / 10 and "
    "no_sync are right. Fix: place[order ^ 1] with the inverse of the sorting permutation."
)
