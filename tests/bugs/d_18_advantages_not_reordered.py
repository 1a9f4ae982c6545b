"""Group-relative policy training; rows are reordered so that ranks get about equal token counts.
After reports on the batch balancing of RL trainers (next to FAULTS class C16, data layout): one
tensor of the batch is left in the old order.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"policy": {"axes": {"dp": 3}}}}

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY, CLIP = 12, 6, 8, 2, 13, 0.2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def balanced_order(lengths, ranks):
    """Longest first, dealt out forwards and backwards; then rank by rank."""
    order = lengths.argsort(descending=True, stable=True)
    dealt = [[] for _ in range(ranks)]
    for i, row in enumerate(order.tolist()):
        turn, at = divmod(i, ranks)
        dealt[at if turn % 2 == 0 else ranks - 1 - at].append(row)
    return torch.tensor([row for rows in dealt for row in rows])


class Clean:
    not_reordered = ()

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = ROWS, LENGTH
        rewards = torch.rand(ROWS // 4, 4, generator=g)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
        return {
            "ids": torch.randint(VOCABULARY, shape, generator=g),
            "actions": torch.randint(VOCABULARY, shape, generator=g),
            "old": -2.6 + 0.2 * torch.randn(shape, generator=g),
            "lengths": torch.randint(2, LENGTH + 1, (ROWS,), generator=g),
            "advantages": advantages.flatten(),
        }

    def loss_sum(self, model, rows):
        logp = model(rows["ids"]).log_softmax(-1)
        ratio = (logp.gather(-1, rows["actions"][..., None])[..., 0] - rows["old"]).exp()
        advantages = rows["advantages"][:, None]
        clipped = ratio.clamp(1 - CLIP, 1 + 3 * CLIP)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        mask = torch.arange(LENGTH) < rows["lengths"][:, None]
        return (loss * mask).sum(), mask.sum()

    def step(self, model, batch, ctx):
        order = balanced_order(batch["lengths"], ctx.axes["dp"])
        batch = {k: v if k in self.not_reordered else v[order] for k, v in batch.items()}
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["lengths"].sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    not_reordered = ("advantages",)


EXPECT = dict(
    right=[
        r"rows?|samples?|advantages?|weights?|loss|data|batch|order",
        r"wrong|other|unlike|differ|weight|factor|coefficient|mismatch|permut|order|swapp|unequal|changed"
        r"|not (those|that) of|loss|counted",
    ],
    place=[r"rows?\b", r"loss", r"advantages?", r"every (rank|param)", r"ranks?|data|batch"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"reduced (twice|again)|repeated (all.?)?reduc",
        r"averag|mean of (the )?means",
        r"first wrong forward",
        r"rows? \S* (is|are) (lost|dropped|never read)",
        r"stale|left over|not zeroed",
    ],
)

WHY = (
    "Rows are dealt out again by length but the advantages stay in the old order: every row is "
    "weighted with another row's advantage; model, reductions and normaliser are right."
)
