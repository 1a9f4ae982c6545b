"""PPO with an adaptive KL coefficient, parameters under FSDP2. After TRL's AdaptiveKLController and DeepSpeed-Chat (each process updates
its controller with the mean KL of its own rollouts) and FAULTS C01-06: the coefficients of the ranks differ.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH = 14, 7, 10, 6
CLIP, TARGET, START = 0.2, 0.1, 0.3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + torch.sigmoid(self.gate(y)) * self.conv(F.pad(y.mT, (2, 0))).mT


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).log_softmax(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "policy": lambda model, rows: (self.sums(model, rows)[0], rows["mask"].sum()),
            "kl": lambda model, rows: (
                self.coefficient(self.batch()["observed_kl"].double().mean().item())
                * self.sums(model, rows)[1],
                rows["mask"].sum(),
            ),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Actor()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "mask": torch.arange(LENGTH) < lengths,
            "old": 0.3 * torch.randn(ROWS, LENGTH, generator=g) - 2.3,
            "ref": 0.5 * torch.randn(ROWS, LENGTH, generator=g) - 2.3,
            "advantage": torch.randn(ROWS, 1, generator=g),
            "observed_kl": 0.02 + 0.12 * torch.rand(ROWS, generator=g) + 0.004 * torch.arange(ROWS),
        }

    @staticmethod
    def coefficient(observed_kl):
        error = min(max(observed_kl / TARGET - 1, -0.8), 0.8)
        return START * (1 + error)

    @staticmethod
    def sums(model, rows):
        log_probs = model(rows["tokens"]).gather(-1, rows["labels"][..., None])[..., 0]
        ratio, a = (log_probs - rows["old"]).exp(), rows["advantage"]
        policy = -torch.minimum(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a)
        back = rows["ref"] - log_probs
        return (policy * rows["mask"]).sum(), ((back.exp() - back - 1) * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        policy, kl = self.sums(model, rows)
        beta = self.coefficient(self.batch()["observed_kl"].double().mean().item())
        return policy + beta * kl, rows["mask"].sum()

    def distribute(self, model, ctx):
        for part in (*model.layers, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def mean_kl(self, observed_kl):
        total = observed_kl.double().sum()
        dist.all_reduce(total)
        return (total / ROWS).item()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = mine["mask"].sum()
        dist.all_reduce(tokens)
        policy, kl = self.sums(model, mine)
        ((policy + self.coefficient(self.mean_kl(mine["observed_kl"])) * kl) / tokens).backward()


class Buggy(Clean):
    def mean_kl(self, observed_kl):
        return observed_kl.double().mean().item()


EXPECT = dict(
    right=[
        r"\bkl\b",
        r"rank|rows|own|local|differ|shard|unequal|each",
        r"weight|coefficient|scale|factor|times|\d\.\d|\d/\d|too (small|large|little|much)",
    ],
    place=[r"\bkl\b", r"ranks? \W?[012]|(all|every|each) ranks?"],
    wrong=[
        r"policy (term|loss)?\S* ?(is|has) (a )?(wrong|scaled|missing)",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"reduced (twice|again)",
        r"kl\S* (term )?(is )?(missing|lost|detached|dropped)",
    ],
)
WHY = (
    "Each rank weighs the KL term by a coefficient from the observed KL of its own rows instead of the mean over all 14: the kl term "
    "of each rank's rows has another factor (rank 0 too small, rank 2 too large with rising KL). The policy term is right; all "
    "parameters are wrong."
)
