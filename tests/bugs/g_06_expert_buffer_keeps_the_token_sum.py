"""Mixture of experts, expert parallel inside data parallel, per-token loss: gradients of the token sums go into flat main_grad buffers,
one for dense and one for expert parameters, and are divided by the window's tokens at the end. After Megatron's
calculate_per_token_loss with `buffers` and `expert_parallel_buffers` and FAULTS C09-03 (PR 7160: one of the two is compensated).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, EXPERTS, MICRO_BATCHES = 16, 5, 23, 6, 4, 2


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class OwnPart(torch.autograd.Function):
    """Sum over ranks, of which a rank keeps its own rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.mix, self.norm = nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, gather=lambda x: x, own=lambda x: x):
        x = self.words(ids)
        x = torch.tanh(self.mix(torch.cat([x, F.pad(x, (0, 0, 1, -1))], -1)))
        flat = self.norm(x).flatten(0, 1)
        scores = gather(self.router(flat).softmax(-1))
        tokens, (weight, chosen) = gather(flat), scores.max(-1)
        out = torch.zeros_like(tokens)
        for i, expert in self.experts.items():
            here = (chosen == int(i)).nonzero()[:, 0]
            out = out.index_add(0, here, expert(tokens[here]) * weight[here, None])
        return self.head(x + own(out).view_as(x))


class Buffer:
    """One flat main_grad for some parameters; hooks add to it."""

    def __init__(self, params, group):
        self.params, self.group = list(params), group
        self.data = torch.zeros(sum(p.numel() for p in self.params), dtype=self.params[0].dtype)
        for param, part in zip(
            self.params, self.data.split([p.numel() for p in self.params]), strict=True
        ):
            param.main_grad = part.view_as(param)
            param.register_post_accumulate_grad_hook(self.add)

    @staticmethod
    def add(param):
        param.main_grad += param.grad
        param.grad = None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return MoE()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        labels = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": labels.masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        own = EXPERTS // ctx.axes["ep"]
        for i in range(EXPERTS):
            if i // own != ctx.coords["ep"]:
                del model.experts[str(i)]
        experts = set(model.experts.parameters())
        model.buffers_dense = [
            Buffer((p for p in model.parameters() if p not in experts), ctx.group("dp", "ep"))
        ]
        model.buffers_expert = [Buffer(model.experts.parameters(), ctx.group("dp"))]
        return model

    def scale_gradients(self, model, factor):
        for buffer in model.buffers_dense + model.buffers_expert:
            buffer.data *= factor

    def step(self, model, batch, ctx):
        group = ctx.group("ep")
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = torch.zeros((), dtype=torch.int64)
        buffers = model.buffers_dense + model.buffers_expert
        for buffer in buffers:
            buffer.data.zero_()
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            logits = model(
                micro["ids"], lambda x: Gathered.apply(x, group), lambda x: OwnPart.apply(x, group)
            )
            self.token_loss(logits, micro["labels"]).backward()
            tokens += (micro["labels"] != -100).sum()
        for buffer in buffers:
            dist.all_reduce(buffer.data, group=buffer.group)
        dist.all_reduce(tokens)
        self.scale_gradients(model, 1 / tokens.item())
        for param in model.parameters():
            param.grad = param.main_grad.clone()


class Buggy(Clean):
    def scale_gradients(self, model, factor):
        for buffer in model.buffers_dense:
            buffer.data *= factor


EXPECT = dict(
    right=[
        r"experts?\b",
        r"(not|never) (been )?(divided|normali[sz]ed|scaled)|without (the |a )?(divi|normali)|number of tokens|token count|"
        r"\b(44|55)\b|too large|divisor|normali[sz]",
    ],
    place=[r"experts?"],
    wrong=[
        r"(words|mix|norm|router|head)\S* (is|are|was|were) wrong",
        r"(never|not) (been )?(all.?)?(reduced|summed)",
        r"forward (pass )?(is|was) (wrong|different)",
        r"(counted|reduced|summed) (twice|again)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "The gradients of experts.* are the sums over all tokens, reduced over the right groups but never divided by the number of tokens "
    "of the window (all ranks, both micro-batches), so they are too large by exactly that number; the dense parameters are right."
)
