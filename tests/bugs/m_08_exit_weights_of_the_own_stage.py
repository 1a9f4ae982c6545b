"""A language model with early exits over three pipeline stages: each exit has a loss weight, and the weights are normalised to one. After
EE-LLM (Megatron-LM with early-exit losses in the stages) and FAULTS C10 (auxiliary losses miss the scale of the main one): the stage
normalises the weights of its own exits.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, MICRO_BATCHES = 9, 5, 17, 8, 3
EXIT_WEIGHTS = 0.15, 0.25, 0.4, 1.0
STAGES = (0, 1), (2,), (3,)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 11),
            nn.Linear(11, WIDTH),
        )

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.down(F.gelu(self.up(self.norm(x + past))))


class ExitModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(4)})
        self.exits = nn.ModuleDict({str(i): nn.Linear(WIDTH, WORDS) for i in range(4)})


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            f"exit{i}": lambda model, rows, i=i: (
                self.whole(model, rows)[i],
                (rows["next"] != -100).sum(),
            )
            for i in range(4)
        }

    def build(self):
        torch.manual_seed(self.seed)
        return ExitModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {
            "words": words[:, :-1],
            "next": words[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def exit_loss(logits, rows):
        return F.cross_entropy(logits.flatten(0, 1), rows["next"].flatten(), reduction="sum")

    def run(self, model, x, rows, layers, weights):
        """(output, the weighted exit losses of these layers)"""
        losses = []
        for i in layers:
            x = model.blocks[str(i)](x)
            losses.append(weights[i] * self.exit_loss(model.exits[str(i)](x), rows))
        return x, losses

    def whole(self, model, rows):
        weights = self.normalised(range(4))
        return self.run(model, model.words(rows["words"]), rows, range(4), weights)[1]

    def loss_sum(self, model, rows):
        return sum(self.whole(model, rows)), (rows["next"] != -100).sum()

    def normalised(self, exits):
        total = sum(EXIT_WEIGHTS[i] for i in exits)
        return {i: EXIT_WEIGHTS[i] / total for i in exits}

    def distribute(self, model, ctx):
        for i in range(4):
            if i not in STAGES[ctx.rank]:
                del model.blocks[str(i)], model.exits[str(i)]
        if ctx.rank:
            del model.words
        return model

    def stage_weights(self, layers):
        return self.normalised(range(4))

    def step(self, model, batch, ctx):
        count = (batch["next"] != -100).sum()
        layers, last = STAGES[ctx.rank], ctx.world_size - 1
        weights, held = self.stage_weights(layers), []
        micros = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            for i in range(MICRO_BATCHES)
        ]
        for rows in micros:
            if ctx.rank == 0:
                x = entered = model.words(rows["words"])
            else:
                entered = torch.empty(len(rows["words"]), LENGTH, WIDTH, dtype=ctx.dtype)
                dist.recv(entered, ctx.rank - 1)
                x = entered.requires_grad_()
            x, losses = self.run(model, x, rows, layers, weights)
            if ctx.rank < last:
                dist.send(x.detach().contiguous(), ctx.rank + 1)
            held.append((entered, x, sum(losses) / count))
        for entered, x, loss in held:
            if ctx.rank < last:
                grad = torch.empty_like(x)
                dist.recv(grad, ctx.rank + 1)
                torch.autograd.backward([x, loss], [grad, None])
            else:
                loss.backward()
            if ctx.rank:
                dist.send(entered.grad, ctx.rank - 1)


class Buggy(Clean):
    def stage_weights(self, layers):
        return self.normalised(layers)


EXPECT = dict(
    right=[
        r"exits?\W?\d?",
        r"4\.5|1\.8|2\.5|4\.50|9/2|9/5|scal|factor|weight|times|multipl|coefficient|too (large|often|big)|counted",
    ],
    place=[r"exits?\W?[0123]", r"stage|ranks? \W?[012]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"forward .{0,30}(is|was) wrong|activation .{0,20}wrong",
        r"mean of (the )?(micro|rank|ranks' )\S* ?means",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"(gradient|part) .{0,30}(of|from) (the )?(next|later) stage .{0,20}(lost|missing|dropped)",
        r"all (terms|gradients|parameters) .{0,20}(same|one) factor",
    ],
)
WHY = (
    "Each stage divides its exits' weights by the sum over its own exits (0.4, 0.4 and 1.0) instead of over all (1.8): exits 0, 1 and "
    "2 weigh 4.5 times and exit 3 1.8 times what they should. The heads exits.0-2 are 4.5 times and exits.3 and blocks.3 1.8 times "
    "too large, and blocks.0-2 and words hold the wrong mixture; the forward is right."
)
