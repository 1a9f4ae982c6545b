"""A pipeline with data parallelism whose gradients are divided by the number of tokens at the end. After Megatron-LM's
finalize_model_grads, which broadcasts num_tokens from the last stage (Megatron-LM issue 936, zero-bubble issue 64), and torchtitan
PR 4399: the broadcast is left out, and the other stages have counted no tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_BATCHES = 12, 6, 17, 7, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        gate, value = self.mix(self.norm(x)).chunk(2, dim=-1)
        return x + self.out(torch.sigmoid(gate) * value.cumsum(1) / 3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(VOCAB, WIDTH),
            nn.ModuleList(Block() for _ in range(3)),
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x) if block is not None else x
        return self.head(x) if self.head is not None else x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(padding, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["tokens"]), rows["labels"]), (
            rows["labels"] != -100
        ).sum()

    def distribute(self, model, ctx):
        if ctx.coords["pp"] == 0:
            model.head = model.blocks[2] = None
        else:
            model.embed = model.blocks[0] = model.blocks[1] = None
        stage = PipelineStage(
            model, ctx.coords["pp"], 2, torch.device("cpu"), group=ctx.group("pp")
        )
        self.schedule = ScheduleGPipe(
            stage, MICRO_BATCHES, loss_fn=self.token_loss, scale_grads=False
        )
        return model

    def broadcast_from_last_stage(self, num_tokens, ctx):
        dist.broadcast(num_tokens, group=ctx.group("pp"), group_src=1)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        num_tokens = torch.tensor(0)
        if ctx.coords["pp"] == 0:
            self.schedule.step(mine["tokens"])
        else:
            self.schedule.step(target=mine["labels"])
            num_tokens += (mine["labels"] != -100).sum()
        self.broadcast_from_last_stage(num_tokens, ctx)
        dist.all_reduce(num_tokens, group=ctx.group("dp"))
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))
            param.grad /= num_tokens.clamp(min=1)


class Buggy(Clean):
    def broadcast_from_last_stage(self, num_tokens, ctx):
        pass


EXPECT = dict(
    right=[
        r"embed|blocks\.[01]|first stage|stage 0|pp\W{0,3}0|ranks? \W?[02]",
        r"times|too large|larger|scale|factor|divi|normali[sz]|count|tokens|unnormali",
    ],
    place=[r"embed|blocks\.[01]", r"stage", r"ranks? \W?[02]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"reduced (twice|again)|counted twice",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(head|blocks\.2)\S* (is|are|was|were) (wrong|missing)",
        r"(all|every) (the )?(param|gradient|weight)\w* (is|are) (wrong|too large)|all gradients are",
    ],
)
WHY = (
    "Only the last stage counts tokens; without the broadcast the first stage divides by clamp(0, min=1) = 1, so embed, blocks.0 "
    "and blocks.1 (pp 0, on both data ranks) have the gradients of the summed loss, N (number of valid tokens) times too large. "
    "blocks.2 and head are right, and so is the forward."
)
