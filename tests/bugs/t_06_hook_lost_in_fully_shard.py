"""FSDP2: a vocabulary grown by new tokens, of the embedding only the new rows are trained (the gradient of the old ones is set to zero by a hook); two micro-batches.
After the reports that tensor hooks on parameters vanish when fully_shard replaces them.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, OLD, MICRO = 11, 5, 10, 19, 9, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.over = nn.LayerNorm(WIDTH), nn.Linear(LENGTH, LENGTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x):
        x = x + self.over(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, fixed=0):
        if fixed:
            table = torch.cat([self.embed.weight[:fixed].detach(), self.embed.weight[fixed:]])
            x = F.embedding(tokens, table)
        else:
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def keep_new_rows(grad, first=0):
    """Zeros for the old rows of a gradient whose first row is `first` of the table."""
    index = torch.arange(first, first + len(grad), device=grad.device)
    return grad * (index >= OLD).to(grad.dtype)[:, None]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {k: torch.randint(VOCAB, (ROWS, LENGTH), generator=g) for k in ("tokens", "labels")}

    def loss_sum(self, model, rows):
        return token_loss(model(rows["tokens"], OLD), rows["labels"]), rows["labels"].numel()

    def shard(self, model, ctx):
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def distribute(self, model, ctx):
        model = self.shard(model, ctx)
        first = ctx.coords["dp"] * -(-VOCAB // ctx.axes["dp"])

        def mask(param):
            local = param.grad.to_local()
            local.copy_(keep_new_rows(local, first))

        model.embed.weight.register_post_accumulate_grad_hook(mask)
        return model

    def step(self, model, batch, ctx):
        world = ctx.axes["dp"]
        mine = {
            k: v.tensor_split(world)[ctx.coords["dp"]].tensor_split(MICRO) for k, v in batch.items()
        }
        for i in range(MICRO):
            model.set_requires_gradient_sync(i == MICRO - 1)
            loss = token_loss(model(mine["tokens"][i]), mine["labels"][i])
            (loss * world / batch["labels"].numel()).backward()  # FSDP averages


class Buggy(Clean):
    def distribute(self, model, ctx):
        model.embed.weight.register_hook(keep_new_rows)
        return self.shard(model, ctx)


EXPECT = dict(
    right=[
        r"embed",
        r"old rows|rows? .{0,20}(0|[1-8])\b|elements|part of|zero|frozen|detach|hook|mask|first 9|9 of (the )?19|some rows|not (be )?trained",
    ],
    place=[r"embed"],
    wrong=[
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"(blocks|head|norm)\S* (is|are) wrong",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"do(es)? not read every row once",
        r"(counted|reduced|summed) (twice|again)",
        r"micro.?batch\w* .{0,30}(lost|twice|only)",
        r"averag\w+ where .{0,20}sum",
    ],
)
WHY = (
    "Only the rows from 9 on of embed.weight are to be trained, the gradient of rows 0 to 8 is set to zero by a tensor hook. It is registered before fully_shard, which replaces the parameter by a "
    "new one, sharded, without the hook; it never runs. So rows 0 to 8 keep the plain gradient (all of rank 0's shard, rows 7 and 8 on rank 1) where zeros belong. The new rows and all other "
    "parameters, the forward, the backward and the reduction are right. Right: masked after the reduction, on the sharded parameter."
)
