"""Supervised fine-tuning of a small causal model with main_grad buffers filled by a hook on every parameter, three micro-batches. After
Megatron-LM's DistributedDataParallel (its hook adds to main_grad and sets param.grad to None) and FAULTS C12-08 (InfiniTrain PR 213:
two accumulators): the hook does not drop the local gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"sft": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_BATCHES = 17, 9, 13, 6, 3


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 3)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = F.pad(self.norm(x).mT, (2, 0))
        return x + self.out(F.glu(self.conv(y), dim=1).mT)


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Mixer(), Mixer())
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Causal()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        prompt = torch.randint(0, 2, (ROWS, 1), generator=g)
        where = torch.arange(LENGTH)
        learned = (where < lengths) & (where >= prompt)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(~learned, -100)}

    def loss_sum(self, model, rows):
        logits = model(rows["tokens"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
            param.register_post_accumulate_grad_hook(self.accumulate)
        return model

    @staticmethod
    def accumulate(param):
        param.main_grad.add_(param.grad)
        param.grad = None

    def step(self, model, batch, ctx):
        for param in model.parameters():
            param.grad = None
            param.main_grad.zero_()
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = (mine["labels"] != -100).sum()
        dist.all_reduce(tokens)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (self.loss_sum(model, micro)[0] / tokens).backward()
        for param in model.parameters():
            dist.all_reduce(param.main_grad)
            param.grad = param.main_grad.detach().clone()


class Buggy(Clean):
    @staticmethod
    def accumulate(param):
        param.main_grad.add_(param.grad)


EXPECT = dict(
    right=[
        r"micro.?batch",
        r"\b3\b|three|thrice|twice|two times|again|double|more than once|repeated|accumulat|several times|too often|earlier|first|counted",
    ],
    place=[r"micro.?batch", r"(all|every|each) (parameter|rank|tensor)", r"accumul|main_grad"],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"reduced (twice|again)",
        r"micro.?batch(es)? \S* ?(is|are|was|were) (lost|missing|dropped|left out)",
        r"only (the )?(embed|head|blocks)\S* (is|are) wrong",
    ],
)
WHY = (
    "The hook adds param.grad to main_grad but keeps it, so the next micro-batch's hook adds the sum so far once more: the first "
    "micro-batch of every rank counts 3 times, the second twice, the third once. All parameters on all ranks; the reduction is right."
)
