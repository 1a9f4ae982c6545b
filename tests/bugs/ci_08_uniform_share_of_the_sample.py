"""A Dreamer-style world model (recurrent state-space model with categorical latents, a tenth of
uniform mixed into the probabilities, straight-through samples with given Gumbel noise), FSDP2
over three ranks with rows 3, 2, 2 and two micro-batches each.

Bug: the training path samples by a fused straight-through Function whose backward is the plain
softmax's, without the factor 1 - unimix of the mixed probabilities that are sampled from. After
DreamerV3 ports that fuse sampling and softmax.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
OBS, ACT, DETER, LATENTS, CLASSES, TIME, ROWS, UNIMIX = 7, 2, 9, 3, 5, 4, 7, 0.1


def mixed(logits):
    return (1 - UNIMIX) * logits.softmax(-1) + UNIMIX / logits.shape[-1]


def straight_through(logits, noise):
    probs = mixed(logits)
    hard = F.one_hot((probs.detach().log() + noise).argmax(-1), logits.shape[-1]).to(probs.dtype)
    return hard + probs - probs.detach()


class FusedSample(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, noise):
        soft = logits.softmax(-1)
        probs = (1 - UNIMIX) * soft + UNIMIX / logits.shape[-1]
        ctx.save_for_backward(soft)
        return F.one_hot((probs.log() + noise).argmax(-1), logits.shape[-1]).to(soft.dtype)

    @staticmethod
    def backward(ctx, g):
        (soft,) = ctx.saved_tensors
        return soft * (g - (g * soft).sum(-1, keepdim=True)), None


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(OBS, 11), nn.SiLU(), nn.Linear(11, 8))
        self.cell = nn.GRUCell(LATENTS * CLASSES + ACT, DETER)
        self.prior = nn.Linear(DETER, LATENTS * CLASSES)
        self.posterior = nn.Linear(DETER + 8, LATENTS * CLASSES)
        self.decoder = nn.Linear(DETER + LATENTS * CLASSES, OBS)
        self.reward = nn.Linear(DETER + LATENTS * CLASSES, 1)
        self.sample = straight_through

    def forward(self, rows):
        embedded = self.encoder(rows["obs"])
        n = len(embedded)
        h = embedded.new_zeros(n, DETER)
        z = embedded.new_zeros(n, LATENTS * CLASSES)
        loss = 0
        for t in range(TIME):
            h = self.cell(torch.cat([z, rows["action"][:, t]], -1), h)
            prior = self.prior(h).unflatten(-1, (LATENTS, CLASSES))
            post = self.posterior(torch.cat([h, embedded[:, t]], -1)).unflatten(
                -1, (LATENTS, CLASSES)
            )
            z = self.sample(post, rows["noise"][:, t]).flatten(1)
            p, q = mixed(post), mixed(prior)
            dyn = (p.detach() * (p.detach().log() - q.log())).sum()
            rep = (p * (p.log() - q.detach().log())).sum()
            feature = torch.cat([h, z], -1)
            loss = loss + (self.decoder(feature) - rows["obs"][:, t]).square().sum() / 2
            loss = loss + (self.reward(feature)[:, 0] - rows["reward"][:, t]).square().sum() / 2
            loss = loss + 0.5 * dyn + 0.1 * rep
        return loss


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        return WorldModel()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 800)
        uniform = torch.rand(ROWS, TIME, LATENTS, CLASSES, generator=g).clamp(1e-4, 1 - 1e-4)
        return {
            "obs": torch.randn(ROWS, TIME, OBS, generator=g),
            "action": torch.randn(ROWS, TIME, ACT, generator=g),
            "reward": torch.randn(ROWS, TIME, generator=g),
            "noise": -(-uniform.log()).log(),
        }

    def loss_sum(self, model, rows):
        return model(rows), len(rows["reward"])

    def distribute(self, model, ctx):
        for module in (model.encoder, model.cell, model.decoder):
            fully_shard(module, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        size = dist.get_world_size(group)
        own = torch.arange(ROWS).tensor_split(size)[dist.get_rank(group)]
        for part in own.tensor_split(2):
            loss = model({k: v[part] for k, v in batch.items()})
            (loss * size / ROWS).backward()


class Buggy(Clean):
    def distribute(self, model, ctx):
        model = super().distribute(model, ctx)
        model.sample = FusedSample.apply
        return model


EXPECT = dict(
    right=[
        "straight.?through|sampl",
        r"unimix|uniform|mix(ed|ing|ture)|1 ?- ?(unimix|0\.1)|0\.9",
        "gradient|backward|factor|derivative|jacobian",
    ],
    place=["FusedSample", "posterior", r"\bsoft\b|softmax", r"model\.sample|\.sample\b"],
    wrong=[
        r"KL (balanc|term)|dyn\b.{0,20}rep\b",
        "noise (is )?(drawn|differ)",
        "world.?size|divided (twice|by the)",
        r"micro.?batch\w* (mean|count|weight)",
        "reshard|gradient sync",
        "hidden state (is )?detach",
    ],
)
WHY = (
    "The latents are sampled from (1 - unimix) * softmax(logits) + unimix / K, so the "
    "straight-through gradient has the factor 1 - unimix (0.9). FusedSample draws from the "
    "mixed probabilities but its backward is the plain softmax's, without that factor: the "
    "gradient that comes through the sample is 1/0.9 too large. The forward is the same. "
    "Wrong are the posterior, the encoder, and the cell; prior, decoder and reward are right. "
    "A right cause says that the straight-through backward leaves out the uniform mixing. "
    "Fix: multiply by (1 - unimix), or use hard + probs - probs.detach()."
)
