"""A recurrent text VAE with an annealed KL weight and three micro-batches. After FAULTS C12-13 (tracel-ai/burn issue 5695:
"advances LR scheduler per microbatch"): the schedule of the KL weight advances with every micro-batch of a step.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, LATENT, MICRO_BATCHES = 13, 6, 14, 7, 3, 3
STEPS_DONE, WARM_UP = 4, 10


class Annealing:
    def __init__(self, step):
        self.at = step

    def step(self):
        self.at += 1

    @property
    def weight(self):
        return min(1.0, self.at / WARM_UP)


class TextVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.mean, self.log_var = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, LATENT)
        self.start = nn.Linear(LATENT, WIDTH)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, rows):
        x = self.embed(rows["ids"])
        last = self.encoder(x)[0][torch.arange(len(x)), rows["length"] - 1]
        mean, log_var = self.mean(last), self.log_var(last)
        z = mean + (0.5 * log_var).exp() * rows["noise"]
        y = self.decoder(x[:, :-1], torch.tanh(self.start(z))[None])[0]
        return self.out(y), mean, log_var


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "reconstruction": lambda m, r: (self.losses(m, r)[0], (r["length"] - 1).sum()),
            "kl": lambda m, r: (Annealing(STEPS_DONE).weight * self.losses(m, r)[1], len(r["ids"])),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return TextVAE()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "length": torch.randint(2, LENGTH + 1, (ROWS,), generator=g),
            "noise": torch.randn(ROWS, LATENT, generator=g),
        }

    @staticmethod
    def losses(model, rows):
        logits, mean, log_var = model(rows)
        token = F.cross_entropy(logits.transpose(1, 2), rows["ids"][:, 1:], reduction="none")
        valid = torch.arange(1, LENGTH) < rows["length"][:, None]
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum()
        return (token * valid).sum(), kl

    def loss_sum(self, model, rows):
        (token, kl), tokens = self.losses(model, rows), (rows["length"] - 1).sum()
        kl = Annealing(STEPS_DONE).weight * kl / len(rows["ids"])
        return token + kl * tokens, tokens

    def after_micro_batch(self, schedule):
        pass

    def after_step(self, schedule):
        schedule.step()

    def step(self, model, batch, ctx):
        schedule = Annealing(STEPS_DONE)  # as a resumed run has it
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = (mine["length"] - 1).sum()
        dist.all_reduce(tokens)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            token, kl = self.losses(model, micro)
            (token / tokens + schedule.weight * kl / ROWS).backward()
            self.after_micro_batch(schedule)
        for param in model.parameters():
            dist.all_reduce(param.grad)
        self.after_step(schedule)


class Buggy(Clean):
    def after_micro_batch(self, schedule):
        schedule.step()

    def after_step(self, schedule):
        pass


EXPECT = dict(
    right=[
        r"\bkl\b|beta|anneal|schedule|kl term|divergence",
        r"micro.?batch|rows|1\.25|5/4|1\.5|3/2|increas|grow|factor|coefficient|weight|later|advance|different (weight|factor)",
    ],
    place=[r"\bkl\b|beta|anneal|divergence", r"micro.?batch|rows"],
    wrong=[
        r"reconstruction\S* (term )?(is|has|gets) (wrong|divided|scaled)",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"decoder\S* (is|has) (a )?wrong",
    ],
)
WHY = (
    "The KL weight grows after each micro-batch: 0.4, 0.5, 0.6 instead of 0.4 for all, so the KL term of the rows of micro-batches 1 and 2 "
    "counts 1.25 and 1.5 times on both ranks. The reconstruction term, and with it decoder, start and out, is right."
)
