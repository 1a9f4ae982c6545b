"""A convolutional GAN whose two optimizers step after the same accumulation window. After pytorch/examples issue 86
("In DCGAN example, when training G, D is not freezed"): harmless where zero_grad() follows, not when gradients accumulate.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, NOISE, LENGTH, MICRO_BATCHES = 14, 4, 9, 2


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(NOISE, 5 * 3)
        self.up = nn.ConvTranspose1d(5, 6, 3, stride=3)
        self.out = nn.Conv1d(6, 1, 3, padding=1)

    def forward(self, z):
        x = F.leaky_relu(self.start(z), 0.2).unflatten(1, (5, 3))
        return torch.tanh(self.out(F.leaky_relu(self.up(x), 0.2)))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(1, 5, 3, stride=2), nn.Conv1d(5, 7, 2)
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        x = F.leaky_relu(self.conv2(F.leaky_relu(self.conv1(x), 0.2)), 0.2)
        return self.head(x.mean(-1))[:, 0]


@contextlib.contextmanager
def frozen(module):
    module.requires_grad_(False)
    try:
        yield module
    finally:
        module.requires_grad_(True)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"telling": self.telling_sum, "making": self.making_sum}

    def build(self):
        torch.manual_seed(self.seed)
        return nn.ModuleDict({"generator": Generator(), "discriminator": Discriminator()})

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "z": torch.randn(ROWS, NOISE, generator=g),
            "x": torch.randn(ROWS, 1, LENGTH, generator=g).cumsum(-1) / 3,
        }

    def telling_sum(self, model, rows):
        tell, fake = model["discriminator"], model["generator"](rows["z"]).detach()
        loss = F.softplus(-tell(rows["x"])).sum() + F.softplus(tell(fake)).sum()
        return loss, len(rows["x"])

    def making_sum(self, model, rows):
        tell = model["discriminator"]
        constant = {n: p.detach() for n, p in tell.named_parameters()}
        fooled = torch.func.functional_call(tell, constant, model["generator"](rows["z"]))
        return F.softplus(-fooled).sum(), len(rows["x"])

    def loss_sum(self, model, rows):
        telling, making = self.telling_sum(model, rows), self.making_sum(model, rows)
        return telling[0] + making[0], telling[1]

    def while_generating(self, discriminator):
        return frozen(discriminator)

    def step(self, model, batch, ctx):
        make, tell = model["generator"], model["discriminator"]
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            fake = make(micro["z"])
            telling = F.softplus(-tell(micro["x"])).sum() + F.softplus(tell(fake.detach())).sum()
            (telling / ROWS).backward()
            with self.while_generating(tell):
                (F.softplus(-tell(fake)).sum() / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def while_generating(self, discriminator):
        return contextlib.nullcontext(discriminator)


EXPECT = dict(
    right=[
        r"discriminator|telling",
        r"generator'?s?|making|other (loss|term)|adversarial|fool|freez|frozen|requires_grad|extra|additional|leak|pollut|not (accounted|"
        r"explained)|unexplained|unexpected|foreign|more than|second backward|accumul|residual|added",
    ],
    place=[r"discriminator", r"telling"],
    wrong=[
        r"generator\.\S+ (is|are|has|have) (a )?wrong",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|summed) (twice|again)",
        r"mean of (the )?means",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The discriminator is not frozen while the generator's loss runs backward through it, so discriminator.* accumulates the gradient "
    "of the generator's (making) loss beside its own, in every micro-batch, on all ranks alike. The generator's gradients are right."
)
