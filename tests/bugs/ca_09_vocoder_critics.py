"""The generator's step of a HiFi-GAN vocoder: least squares term and feature matching against five frozen period discriminators, plus a reconstruction term. The discriminators are dealt out over three ranks (2, 2 and 1) and the generator runs the same batch
on each; a rank's loss has the terms of its own discriminators, the reconstruction is on rank 0, and the generator's gradients are summed over the ranks. Two micro-batches.

The bug: each rank takes the mean over the discriminators that it holds, and the ranks' means are averaged, so that the single one of the last rank weighs twice.
After vocoder trainers that average the multi-period / multi-scale losses (MelGAN's 1/num_D) and were then spread over devices; class normalizer_mean_of_means.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"critics": 3}}}}
ROWS, BANDS, FRAMES, HOP, WIDTH = 5, 4, 6, 4, 5
PERIODS = (1, 2, 3, 4, 6)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.Conv1d(BANDS, WIDTH, 3, padding=1)
        self.up = nn.ConvTranspose1d(WIDTH, WIDTH, 2 * HOP, HOP, padding=HOP // 2)
        self.res = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2)
        self.post = nn.Conv1d(WIDTH, 1, 5, padding=2)

    def forward(self, mel):
        h = self.up(torch.tanh(self.pre(mel)))
        h = h + torch.tanh(self.res(h))
        return torch.tanh(self.post(h))[:, 0]


class PeriodDiscriminator(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList(
            [nn.Conv2d(1, 4, (3, 1), padding=(1, 0)), nn.Conv2d(4, 4, (3, 1), padding=(1, 0))]
        )
        self.post = nn.Conv2d(4, 1, 1)

    def forward(self, wave):
        h = wave.unflatten(1, (-1, self.period))[:, None]
        features = []
        for conv in self.convs:
            h = F.leaky_relu(conv(h), 0.1)
            features.append(h)
        return self.post(h), features


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = Generator()
        self.discriminators = nn.ModuleList(PeriodDiscriminator(p) for p in PERIODS)
        self.discriminators.requires_grad_(False)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Vocoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "mel": torch.randn(ROWS, BANDS, FRAMES, generator=g),
            "wave": torch.randn(ROWS, FRAMES * HOP, generator=g).tanh(),
        }

    @staticmethod
    def judged(discriminator, fake, real):
        score, features = discriminator(fake)
        _, wanted = discriminator(real)
        loss = (score - 1).square().mean((1, 2, 3)).sum()
        for a, b in zip(features, wanted):
            loss = loss + 2 * (a - b).square().mean((1, 2, 3)).sum()
        return loss

    @staticmethod
    def reconstruction(fake, real):
        return 3 * (fake - real).square().mean(1).sum()

    def loss_sum(self, model, rows):
        fake, real = model.generator(rows["mel"]), rows["wave"]
        losses = torch.stack([self.judged(d, fake, real) for d in model.discriminators])
        return losses.mean() + self.reconstruction(fake, real), len(real)

    def adversarial_loss(self, own, fake, real, ctx):
        losses = torch.stack([self.judged(d, fake, real) for d in own])
        return losses.sum() / len(PERIODS)

    def step(self, model, batch, ctx):
        rank, world = ctx.rank, ctx.world_size
        own = [
            model.discriminators[int(i)]
            for i in torch.arange(len(PERIODS)).tensor_split(world)[rank]
        ]
        for p in model.generator.parameters():
            p.grad = None
        for m in range(2):
            part = {k: v.tensor_split(2)[m] for k, v in batch.items()}
            fake = model.generator(part["mel"])
            loss = self.adversarial_loss(own, fake, part["wave"], ctx)
            if rank == 0:
                loss = loss + self.reconstruction(fake, part["wave"])
            (loss / ROWS).backward()
        for p in model.generator.parameters():
            dist.all_reduce(p.grad, group=ctx.group("critics"))


class Buggy(Clean):
    def adversarial_loss(self, own, fake, real, ctx):
        losses = torch.stack([self.judged(d, fake, real) for d in own])
        return losses.mean() / ctx.world_size


EXPECT = dict(
    right=[
        r"mean of (the )?(ranks'? )?means|own|local|averag|number of|each rank|every rank|per.?rank|of its|weigh|factor|scal|divis|denominator|normali[sz]",
        r"discriminator|critic|mean|term|adversarial|weight|factor|divi|count|number|scal",
    ],
    place=[
        r"adversarial_loss",
        r"losses",
        r"discriminator",
        r"world_size",
        r"rank 2|rank two|last rank|every rank|each rank|all ranks|ranks? 0",
    ],
    wrong=[
        r"(missing|lacks?|without|never|not) (all.?)?reduc|not reduced|reduced twice",
        r"reconstruction.{0,40}(missing|twice|three times|wrong)",
        r"(only the last|lost|dropped|overwritten) .{0,10}micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(own|local) (number|count) of rows|wrong rows|other rows|detach|discriminators?.{0,20}(should|must) (be )?train",
    ],
)
WHY = (
    "The reference has one fifth of each discriminator's loss. adversarial_loss takes the mean over the rank's own list (two, two and one) and divides by three ranks, so that the four discriminators of ranks 0 and 1 come with 1/6 and the one of rank 2 with 1/3: "
    "their share of the gradient is 5/6 of the right one on ranks 0 and 1 and 5/3 on rank 2, in both micro-batches; the reconstruction on rank 0, the sum over the ranks and the division by rows are right. A right cause says that the ranks' means (over their own number of "
    "discriminators) are averaged / the weight of a rank's terms is wrong. Fix: own sum over the number of all discriminators."
)
