"""Vector-quantised autoencoder under DDP on three ranks (4, 5 and 3 rows, two micro-batches each, no_sync for the first): the encoder's vector is replaced by the nearest of eight codes with a straight-through estimator, the decoder
reconstructs; loss = reconstruction + code book term (codes towards the encoder) + 0.25 commitment term, summed over rows and divided by all rows.

The bug: the straight-through output is written as `codes + (z - z.detach())` instead of `z + (codes - z).detach()`. The value is the same, but the gradient of the reconstruction also goes on to the codes. As in
ritheshkumar95/pytorch-vqvae issue 7 (Bug in VQ function? the reconstruction loss is also updating the embedding, which should not happen), compare lucidrains/vector-quantize-pytorch PR 54.
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PARTS = [[(0, 2), (2, 4)], [(4, 7), (7, 9)], [(9, 10), (10, 12)]]
ROWS, FEATURES, WIDTH, CODES, COMMITMENT = 12, 6, 4, 8, 0.25


class Quantizer(nn.Module):
    leaky = False

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(CODES, WIDTH))

    def forward(self, z):
        number = (z[:, None] - self.codes[None]).square().sum(-1).argmin(1)
        nearest = self.codes[number]
        book = (nearest - z.detach()).square().sum()
        commitment = (z - nearest.detach()).square().sum()
        if self.leaky:
            out = nearest + (z - z.detach())
        else:
            out = z + (nearest - z).detach()
        return out, book + COMMITMENT * commitment


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 7), nn.SiLU(), nn.Linear(7, WIDTH))
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 7), nn.SiLU(), nn.Linear(7, FEATURES))

    def forward(self, x):
        z, extra = self.quantizer(self.encoder(x))
        return self.decoder(z), extra


class Clean:
    leaky = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"x": torch.randn(ROWS, FEATURES, generator=g)}

    def loss_sum(self, model, rows):
        out, extra = model(rows["x"])
        return (out - rows["x"]).square().sum() + extra, len(out)

    def distribute(self, model, ctx):
        model.quantizer.leaky = self.leaky
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, {"x": batch["x"][low:high]})
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    leaky = True


EXPECT = dict(
    right=[
        r"(?i)codes?|quantizer|code ?book",
        r"(?i)straight|detach|backward|gradient|graph|adjoint|reconstruct|leak|hands? (back|on)",
        r"(?i)wrong|extra|additional|too much|also|should (not|be)|not (cut|detached|stopped)|goes on|leak|differ|missing detach|on top|adjoint|one more",
    ],
    place=[r"(?i)quantizer|codes|code ?book"],
    wrong=[
        r"(?i)(encoder|decoder)(\.[\w.]+)? (is|are) wrong|all (parameters|tensors) (are|is) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)only (on )?rank \d|rank \d alone|no gradient (for|to|reaches) the code|commitment .{0,20}(missing|wrong)",
    ],
)
WHY = (
    "The forward (values, chosen codes, all three terms) is right on all ranks. In the backward the quantizer's output hands the gradient of the reconstruction to the encoder, which is right, and also to the chosen codes, which "
    "should hear the code book term alone. Only quantizer.codes is wrong (the rows of chosen codes), on all ranks and in all micro-batches, equally after DDP's average; encoder and decoder are right. Divisor 12, no_sync and the "
    "reduction are right. Fix: z + (codes - z).detach()."
)
