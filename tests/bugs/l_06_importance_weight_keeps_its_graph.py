"""GRPO with FSDP2 and a truncated importance weight against the engine that generated the responses. Modelled on verl's and TRL's
rollout correction (TIS: exp(trainer log-prob - rollout log-prob), capped) for strictly on-policy steps, in which the old log-prob is
the current one: it is taken without `detach` for the weight.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_BATCHES, CAP = 11, 7, 17, 8, 3, 1.2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        past = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + torch.tanh(self.mix(torch.cat([self.norm(x), past], -1)))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).log_softmax(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        prompt = torch.randint(1, 3, (ROWS, 1), generator=g)
        end = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        place = torch.arange(LENGTH)
        return {
            "tokens": torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g),
            "response": (place >= prompt) & (place < end),
            "rollout": -math.log(VOCAB) + 0.6 * torch.randn(ROWS, LENGTH, generator=g),
            "advantage": torch.randn(ROWS, generator=g),
        }

    def weight(self, log_prob, rollout):
        return (log_prob.detach() - rollout).exp().clamp(max=CAP)

    def policy_loss(self, model, rows, weight):
        chosen = rows["tokens"][:, 1:, None]
        log_prob = model(rows["tokens"][:, :-1]).gather(2, chosen)[..., 0]
        ratio = (log_prob - log_prob.detach()).exp()
        surrogate = -ratio * rows["advantage"][:, None] * weight(log_prob, rows["rollout"])
        return (surrogate * rows["response"]).sum()

    def loss_sum(self, model, rows):
        return self.policy_loss(
            model, rows, lambda p, old: (p.detach() - old).exp().clamp(max=CAP)
        ), rows["response"].sum()

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["response"].sum()
        dist.all_reduce(count)
        for i in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (self.policy_loss(model, rows, self.weight) / count).backward()


class Buggy(Clean):
    def weight(self, log_prob, rollout):
        return (log_prob - rollout).exp().clamp(max=CAP)


EXPECT = dict(
    right=[
        r"loss|log.?prob|output|objective|ratio|weight of|rows?|token|head",
        r"gradient (at|of|entering|into|that enters|with respect to) (the )?(output|loss|log|head|last|model)|graph|detach|second path|"
        r"additional|extra|more than|too (large|much)|"
        r"twice|double|\b2\b|not proportional|no (single )?(factor|coefficient|multiple)|differ\w* by (row|token)|uneven|"
        r"between 1 and 2|unequal|weights?",
    ],
    place=[
        r"loss|log.?prob|head|output|policy",
        r"rows?|token",
        r"(all|every|each|both) ranks?|ranks? \W?[01]",
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"reduced over the wrong|wrong group",
    ],
)
WHY = (
    "The importance weight is differentiated too: a token whose weight is below the cap counts twice in the gradient (ratio and weight "
    "each give the same derivative), a token at the cap once. All parameters are wrong on both ranks by a factor between 1 and 2 that "
    "differs by token; forward and loss value are right."
)
