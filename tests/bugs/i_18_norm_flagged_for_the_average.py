"""Tensor and sequence parallelism in Megatron's manner, gradients added up in main_grad over micro-batches and finished at the end. After
Megatron-LM's `finalize_model_grads`, which sums over tp the parameters flagged `sequence_parallel` and averages those flagged
`average_gradients_across_tp_domain` (see also FAULTS C06-07: SUM or MEAN per parameter): norm2 has the wrong flag.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 3}}}}
ROWS, LENGTH, WIDTH, HEADS, HIDDEN, VOCABULARY, MICRO_BATCHES = 10, 9, 12, 3, 9, 17, 2


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def reduce_scatter(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group), None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up, self.down = (
            nn.Linear(WIDTH, HIDDEN, bias=False),
            nn.Linear(HIDDEN, WIDTH, bias=False),
        )

    def forward(self, x, enter, leave):
        h = enter(self.norm1(x))
        q, k, v = (
            p(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for p in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + leave(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + leave(self.down(F.gelu(self.up(enter(self.norm2(x))))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, enter=lambda x: x, leave=lambda x: x):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, enter, leave)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def flag(self, model):
        for name, param in model.named_parameters():
            param.sequence_parallel = "norm" in name or name in ("embed.weight", "head.weight")
            param.average_gradients_across_tp_domain = False

    def distribute(self, model, ctx):
        for block in model.blocks:
            for name in ("query", "key", "value", "up", "out", "down"):
                module, dim = getattr(block, name), int(name in ("out", "down"))
                module.weight = nn.Parameter(
                    module.weight.detach().chunk(ctx.axes["tp"], dim)[ctx.coords["tp"]].clone()
                )
        self.flag(model)
        return model

    def gradient_of(self, name, param, ctx):
        return param.main_grad

    @staticmethod
    def finalize(model, ctx):
        for param in model.parameters():
            dist.all_reduce(param.main_grad, group=ctx.group("dp"))
            if param.sequence_parallel or param.average_gradients_across_tp_domain:
                dist.all_reduce(param.main_grad, group=ctx.group("tp"))
            if param.average_gradients_across_tp_domain:
                param.main_grad /= ctx.axes["tp"]

    def step(self, model, batch, ctx):
        tp, at = ctx.group("tp"), ctx.coords["tp"]
        mine = {
            k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]].chunk(ctx.axes["tp"], 1)[at]
            for k, v in batch.items()
        }
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            logits = model(rows["ids"], lambda x: Enter.apply(x, tp), lambda x: Leave.apply(x, tp))
            (self.token_loss(logits, rows["labels"]) / (batch["labels"] != -100).sum()).backward()
            for param in model.parameters():
                param.main_grad += param.grad
                param.grad = None
        self.finalize(model, ctx)


class Buggy(Clean):
    def flag(self, model):
        super().flag(model)
        for block in model.blocks:
            for param in block.norm2.parameters():
                param.sequence_parallel = False
                param.average_gradients_across_tp_domain = True


EXPECT = dict(
    right=[r"norm2", r"1/3|third|\b3\b|0\.33|divided|average|mean|too small|scale|tp"],
    place=[r"norm2"],
    wrong=[
        r"\b(norm1|query|key|value|out|up|down|embed|head)\S* (is|are|has|have|was|were) (a )?wrong",
        r"(counted|reduced|summed) (twice|again)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"never (been )?(all.?)?(reduced|summed)|is not (all.?)?reduced",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "norm2 of both blocks sees a third of the sequence on each tp rank, so its gradients must be summed over tp, but its flag makes "
    "them an average: blocks.*.norm2.weight and bias are 1/3 of the right ones on all ranks. "
    "Everything else is right."
)
