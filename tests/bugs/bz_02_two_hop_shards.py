"""ZeRO-3 by hand on two nodes of three ranks: every parameter is cut along its first dimension over all six ranks, gathered before use, and the gradients go back to their owners by a reduce-scatter of two hops
as in ZeRO++: first within the node, then between the ranks of the same place in the nodes, so that less crosses the slow links. Each rank has rows of its own and two micro-batches, accumulated on the shards.

The bug: the pieces are not reordered before the first hop. Rank l of a node then gets the pieces l*N ... l*N+N-1 in a row and ends with piece l*N+node instead of node*L+l. After ZeRO++ (DeepSpeed), whose
authors describe the "tensor slice reordering" that hierarchical reduce-scatter needs so that slices are not misplaced.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"node": 2, "local": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, INNER = 13, 4, 18, 6, 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        y = self.up(torch.cat((self.norm(x), before), -1))
        return self.head(x + self.down(F.silu(y)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                own = p.detach().chunk(ctx.world_size)[ctx.rank].clone()
                setattr(module, name, nn.Parameter(own))
        return model

    def gather(self, shard, ctx):
        parts = [torch.empty_like(shard) for _ in range(ctx.world_size)]
        dist.all_gather(parts, shard.detach().contiguous())
        return torch.cat(parts).requires_grad_()

    def hop(self, pieces, group):
        """Sum over the group; each rank keeps its part of the first dimension."""
        pieces = pieces.contiguous()
        dist.all_reduce(pieces, group=group)
        return pieces[dist.get_rank(group)]

    def reduce_scatter(self, grad, ctx):
        nodes, local = ctx.axes["node"], ctx.axes["local"]
        pieces = grad.unflatten(0, (nodes, local, -1)).transpose(0, 1)
        pieces = self.hop(pieces, ctx.group("local"))
        return self.hop(pieces, ctx.group("node"))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        total = batch["labels"].numel()
        shards = dict(model.named_parameters())
        for p in shards.values():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            whole = {name: self.gather(p, ctx) for name, p in shards.items()}
            logits = functional_call(model, whole, (part["ids"],)).flatten(0, 1)
            loss = F.cross_entropy(logits, part["labels"].flatten(), reduction="sum")
            grads = torch.autograd.grad(loss / total, list(whole.values()))
            for p, grad in zip(shards.values(), grads):
                grad = self.reduce_scatter(grad, ctx)
                p.grad = grad.clone() if p.grad is None else p.grad + grad


class Buggy(Clean):
    def reduce_scatter(self, grad, ctx):
        nodes, local = ctx.axes["node"], ctx.axes["local"]
        pieces = grad.unflatten(0, (local, nodes, -1))
        pieces = self.hop(pieces, ctx.group("local"))
        return self.hop(pieces, ctx.group("node"))


EXPECT = dict(
    right=[
        r"order|permut|swap|exchang|misplac|another (rank|shard|piece|part|owner)|other (rank|shard|piece|part|owner|slice)|wrong (shard|piece|slice|part|rows|range|chunk|owner|rank|place)|transpos|belongs? to|different (shard|piece|slice|rows|part|rank)"
    ],
    place=[r"reduce_scatter", r"\bhop\b", r"unflatten|pieces", r"rank(s)? (1|2|3|4)|shard"],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|reduced (twice|again)",
        r"divisor|denominator|mean of means|scaled by",
        r"micro.?batch.{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"forward.{0,20}wrong|parameters? (are|is) gathered in the wrong order|wrong rows of the batch",
    ],
)
WHY = (
    "The gradient is cut into six pieces; the first hop gives rank l of each node the pieces 2l and 2l+1, the second gives node n the piece 2l+n, but rank (n, l) owns piece 3n+l. So ranks 1, 2, 3 and 4 get the "
    "complete, correctly summed gradient of another rank's rows (1 gets 2, 2 gets 4, 3 gets 1, 4 gets 3), ranks 0 and 5 are right; all parameters are concerned, in both micro-batches. A right cause says that the "
    "pieces/shards come in another order, i.e. a rank has the gradient of another rank's shard. Fix: transpose the pieces to (local, node) before the first hop."
)
