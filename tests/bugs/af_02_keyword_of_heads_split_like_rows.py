"""torch.distributed.pipelining (PipelineStage, ScheduleGPipe) with three stages and three micro-batches of three rows: embedding with an MLP, attention with three heads and a gate per head (a pruning schedule sets the gates for the step),
head. The gates have the shape (heads, 1, 1) and are handed to the schedule as a keyword of the middle stage.

The bug: without kwargs_chunk_spec the schedule splits every tensor keyword on dimension 0 into micro-batches. Three heads and three micro-batches: micro-batch m gets gates[m : m + 1], which broadcasts over all heads. As in
NVIDIA-NeMo/Automodel PR #3208 (preserve mRoPE axes in PP chunking: the default splitter chunks every tensor keyword on dim 0), there with an error, here silent.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.microbatch import _Replicate
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, HEADS, MICRO = 9, 5, 13, 6, 3, 3
GATES = [1.0, 0.25, 0.6]


class Front(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, WIDTH))

    def forward(self, ids):
        x = self.embed(ids)
        return x + self.mlp(x)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, gates):
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in self.qkv(self.norm(x)).chunk(3, -1)
        )
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True) * gates.to(x.dtype)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x):
        return self.head(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.gated, self.back = Front(), Gated(), Back()

    def forward(self, ids, gates):
        return self.back(self.gated(self.front(ids), gates))


def head_gates():
    return torch.tensor(GATES).view(HEADS, 1, 1)


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    chunks = {"gates": _Replicate()}

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], head_gates())
        return token_loss(logits, rows["labels"]), rows["labels"].numel()

    def step(self, model, batch, ctx):
        module = [model.front, model.gated, model.back][ctx.rank]
        stage = PipelineStage(
            module, ctx.rank, ctx.world_size, torch.device("cpu"), group=ctx.group("pp")
        )
        schedule = ScheduleGPipe(
            stage,
            MICRO,
            loss_fn=lambda logits, labels: token_loss(logits, labels) / (ROWS * TOKENS),
            kwargs_chunk_spec=self.chunks if ctx.rank == 1 else None,
            scale_grads=False,
        )
        if ctx.rank == 0:
            schedule.step(batch["ids"])
        elif ctx.rank == 1:
            schedule.step(gates=head_gates())
        else:
            schedule.step(target=batch["labels"], losses=[])
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    chunks = None


EXPECT = dict(
    right=[
        r"(?i)gated|attention|head.?gate|gates?\b|stage 1|rank 1|middle stage",
        r"(?i)forward|output|input|keyword|argument|activation|value|gates? (of|for)|chunk|split",
        r"(?i)wrong|differ|other|not (the )?(same|right)|deviat|first|foreign|split|chunk"
        r"|per micro.?batch|slice",
    ],
    place=[r"(?i)gated|attention|stage 1|rank 1|gates"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)(never|not) (been )?(all.?)?(reduced|summed)|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|scale_grads",
        r"(?i)(front|embed|mlp)\S* .{0,30}forward.{0,20}wrong|goes wrong (first )?(in"
        r"|at) (front|embed|back|head)",
        r"(?i)labels? .{0,20}(is|are) (wrong|of another)|micro.?batch(es)? .{0,20}(lost|dropped"
        r"|swapped|overwritten)",
        r"(?i)gradient .{0,30}(stage|pipeline) .{0,30}(lost|swapped|wrong micro)",
    ],
)
WHY = (
    "Rank 1 (stage `gated`) multiplies the attention output of every head in micro-batch m (rows 3m to 3m+2) by gates[m] instead of gates[h]: micro-batch 0 has 1.0, 1 has 0.25, 2 has 0.6 for all three heads, right is 1.0, 0.25, "
    "0.6 for heads 0, 1, 2 in all micro-batches. Head m of micro-batch m is right by accident. So the forward goes wrong inside `gated` (input of gated.out) on rank 1 for all nine rows; its output and all of `back` (norm, head, "
    "loss) follow, and all gradients are wrong in direction (front through the gradient sent back). Embedding, labels, transport between the stages, divisor 45 and the last sum over pp are right. Fix: kwargs_chunk_spec that "
    "replicates the gates."
)
