"""A fused linear + cross entropy that makes its gradients in the forward (reduction "none").
After FAULTS C19-07 (fused linear cross entropy kernels): weighted tokens get one token's weight."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB = 8, 4, 10, 14


class FusedLinearCrossEntropy(torch.autograd.Function):
    """Never keeps the logits: gradients are computed with the loss and scaled in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, per_token):
        logits = hidden @ weight.T
        log_p = logits.log_softmax(-1)
        loss = -log_p.gather(1, labels[:, None])[:, 0]
        slope = log_p.exp()
        slope[torch.arange(len(labels)), labels] -= 1
        ctx.per_token = per_token
        kept = slope if per_token else slope.T @ hidden
        ctx.save_for_backward(slope @ weight, kept, hidden)
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, kept, hidden = ctx.saved_tensors
        grad_weight = (kept * grad[:, None]).T @ hidden if ctx.per_token else kept * grad[0]
        return grad_hidden * grad[:, None], grad_weight, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
        self.fc2 = nn.Linear(16, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.silu(self.fc1(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        return self.norm(self.blocks(self.embed(ids)))


class Clean:
    per_token = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "weight": torch.randint(1, 5, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model.lm_head(model(rows["ids"])).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="none")
        return (loss * rows["weight"].flatten()).sum(), rows["weight"].sum()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["weight"].sum()
        dist.all_reduce(count)
        loss = FusedLinearCrossEntropy.apply(
            model(mine["ids"]).flatten(0, 1),
            model.lm_head.weight,
            mine["labels"].flatten(),
            self.per_token,
        )
        ((loss * mine["weight"].flatten()).sum() / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    per_token = False


EXPECT = dict(
    right=[r"lm_head", r"only|alone|just|backward|rows?|weight|tokens?"],
    place=[r"lm_head"],
    wrong=[
        r"averag",
        r"never reduced|not reduced|missing reduction",
        r"(embed|blocks).*forward",
        r"mean of (the )?means",
    ],
)
WHY = (
    "The fused loss sums the head's gradient over tokens before it knows the tokens' weights and "
    "multiplies by the first one's: only lm_head.weight is wrong, by another factor on each rank."
)
