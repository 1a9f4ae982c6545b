"""A mixture of experts with a capacity per sequence and expert, tokens cut over three sequence ranks. After Megatron-LM's token drop
policies under sequence parallelism and DeepSpeed's `top1gating` (locations = cumsum(mask) - 1), and FAULTS C18-07 (Megatron-LM issue 1740):
the place of a token in the queue of its expert is counted within the rank's own tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, HIDDEN, EXPERTS, CAPACITY = 4, 12, 17, 8, 11, 3, 4


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions, everyone):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        k, v = everyone(k), everyone(v)
        scores = q @ k.mT / WIDTH**0.5
        future = torch.arange(LENGTH) > positions[:, None]
        return x + self.out(scores.masked_fill(future, -torch.inf).softmax(-1) @ v)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x, ahead):
        h = self.norm(x)
        gate, chosen = (3 * self.router(h)).softmax(-1).max(-1)
        queue = F.one_hot(chosen, EXPERTS)
        place = queue.cumsum(1) - 1 + ahead(queue)
        kept = place.gather(-1, chosen[..., None]) < CAPACITY
        y = torch.einsum("blw,blwh->blh", h, self.up[chosen])
        y = torch.einsum("blh,blhw->blw", F.gelu(y), self.down[chosen])
        return x + y * gate[..., None] * kept


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, positions, everyone=lambda x: x, ahead=lambda queue: 0):
        x = self.embed(tokens) + self.position(positions)
        for attention, experts in zip(self.attention, self.experts):
            x = experts(attention(x, positions, everyone), ahead)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        answer = torch.rand(ROWS, LENGTH, generator=g) < 0.7
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(~answer, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = model(rows["tokens"], torch.arange(LENGTH))
        return self.token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    def ahead(self, queue):
        """How many tokens of each row and expert the earlier shards hold."""
        counts = queue.sum(1, keepdim=True)
        shards = [torch.empty_like(counts) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, counts)
        return sum(shards[: dist.get_rank()], torch.zeros_like(counts))

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        positions = torch.arange(LENGTH).chunk(ctx.world_size)[ctx.rank]
        logits = model(mine["tokens"], positions, Gathered.apply, self.ahead)
        (self.token_loss(logits, mine["labels"]) / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def ahead(self, queue):
        return 0


EXPECT = dict(
    right=[
        r"experts(\.0)?|expert|capacity|drop|queue",
        r"forward|output|activation|input of|values?|capacity|drop|kept|own (tokens|shard)",
    ],
    place=[r"experts\.0", r"experts", r"(all|every|each) ranks?|ranks? \W?[12]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"first wrong (module |output )?(is |at |in )?\S{0,12}(embed|position|attention\.0)",
        r"(embed|position|attention\.0)\S* .{0,20}first wrong",
        r"detach|no_grad",
    ],
)
WHY = (
    "Ranks 1 and 2 count the queue of each expert from zero, so tokens that are over the capacity of 4 per row and expert are kept "
    "there. The forward is wrong from experts.0 on, on ranks 1 and 2 (rank 0, the first shard, begins right), and with it the "
    "gradients of nearly all parameters."
)
