"""Gradient reduction from hooks, with accumulation. After FAULTS C05-02 (gpt-neox PR 1257: backward hooks that do not do what they
are meant to) and the documentation of register_full_backward_hook: for a module none of whose inputs takes a gradient (an
embedding!) the hook fires when its OUTPUT's gradient is there, before its parameters' gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB, CLASSES, MICRO_BATCHES = 20, 6, 7, 15, 4, 3


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, k, padding=1) for k in (2, 3))
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.classify = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, ids):
        x = self.embed(ids).mT
        x = torch.cat([torch.tanh(conv(x)).mean(-1) for conv in self.convs], dim=-1)
        return self.classify(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return TextCNN()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["ids"]), rows["label"], reduction="sum")
        return loss, len(rows["label"])

    def reduce(self, params):
        if self.last:
            for param in params:
                if param.grad is not None:
                    dist.all_reduce(param.grad)

    def distribute(self, model, ctx):
        self.last = False
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: self.reduce([p]))
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            self.last = i == MICRO_BATCHES - 1
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (self.loss_sum(model, micro)[0] / ROWS).backward()


class Buggy(Clean):
    def distribute(self, model, ctx):
        self.last = False

        def hook(module, grad_input, grad_output):
            self.reduce(module.parameters())

        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                module.register_full_backward_hook(hook)
        return model


EXPECT = dict(
    right=[
        r"embed",
        r"last|final|third|micro-?batch|after (the )?(all.?)?reduc|before|too early|too late|late|early|not (been )?(all.?)?(reduced|summed)|own (rows|part)|"
        r"partial|differ\w* (between|on|across|over)|missing|lack|local|only .{0,30}rows|rows \d",
    ],
    place=[r"embed", r"hook", r"micro-?batch", r"ranks?", r"rows"],
    wrong=[
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(convs|norm|classify)\S* (is|are|was|were) (wrong|missing|(not|never) (reduced|summed))",
        r"mean of (the )?(rank |ranks' )?means",
        r"(first|second) micro-?batch\w* (is|was|are|were) (lost|missing|(not|never) (reduced|summed))",
        r"divided (twice|by)",
    ],
)
WHY = (
    "Token ids take no gradient, so the embedding's full backward hook fires before its weight's gradient of the last micro-batch is accumulated: the sum over ranks "
    "covers micro-batches 0 and 1, and each rank then adds its own rows of the last one. embed.weight lacks the other ranks' last micro-batch and differs between ranks; all other parameters are exact."
)
