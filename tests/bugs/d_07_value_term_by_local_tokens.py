"""PPO with an actor and a critic on one trunk: each term has a mask of its own. After FAULTS C10-06
(Megatron-LM issue 7452, finding 3): the second term is normalised by local token counts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 3}}}}

ROWS, LENGTH, WIDTH, VOCABULARY, CLIP, VALUE = 11, 6, 9, 12, 0.2, 0.5


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.trunk = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.actor = nn.Linear(WIDTH, VOCABULARY)
        self.critic = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, ids):
        x = self.norm(self.trunk(self.embed(ids))[0])
        return self.actor(x), self.critic(x)[..., 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"policy": self.policy_sum, "value": self.value_sum}

    def build(self):
        torch.manual_seed(self.seed)
        return ActorCritic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = ROWS, LENGTH
        responses = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        answered = torch.arange(LENGTH) < responses
        finished = torch.rand(ROWS, 1, generator=g) < 0.7
        finished[0] = finished[5] = finished[9] = True
        return {
            "ids": torch.randint(VOCABULARY, shape, generator=g),
            "actions": torch.randint(VOCABULARY, shape, generator=g),
            "old": -2.5 + 0.3 * torch.randn(shape, generator=g),
            "advantages": torch.randn(shape, generator=g),
            "returns": torch.randn(shape, generator=g),
            "mask": answered,
            "value_mask": answered & finished,
        }

    def losses(self, model, rows):
        logits, values = model(rows["ids"])
        logp = logits.log_softmax(-1).gather(-1, rows["actions"][..., None])[..., 0]
        ratio = (logp - rows["old"]).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy = -torch.minimum(ratio * rows["advantages"], clipped * rows["advantages"])
        value = VALUE * F.mse_loss(values, rows["returns"], reduction="none")
        return (policy * rows["mask"]).sum(), (value * rows["value_mask"]).sum()

    def policy_sum(self, model, rows):
        return self.losses(model, rows)[0], rows["mask"].sum()

    def value_sum(self, model, rows):
        return self.losses(model, rows)[1], rows["value_mask"].sum()

    def loss_sum(self, model, rows):
        (policy, value), n = self.losses(model, rows), rows["mask"].sum()
        return policy + value * n / rows["value_mask"].sum().clamp(min=1), n

    def value_loss(self, value, mask, ctx):
        count = mask.sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        return value / count

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        tokens = mine["mask"].sum()
        dist.all_reduce(tokens, group=ctx.group("dp"))
        policy, value = self.losses(model, mine)
        loss = policy / tokens + self.value_loss(value, mine["value_mask"], ctx)
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def value_loss(self, value, mask, ctx):
        return value / mask.sum() / ctx.axes["dp"]


EXPECT = dict(
    right=[
        r"value|critic|term",
        r"mean of (the )?(rank |ranks' |per.?rank )?means|local|own (count|tokens|number|mask|denominator"
        r"|divisor|normali)|per.?rank|each rank|number of (tokens|valid)|count|divid|divisor|normali[sz]"
        r"|weight|coefficient|denominator|unequal",
    ],
    place=[r"value", r"critic", r"term", r"ranks?"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"forward (pass )?(is wrong|differs)",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"policy\S* (term )?(is|has) (wrong|divided|normali[sz]ed locally|local)",
    ],
)

WHY = (
    "The value term is divided by the rank's own unmasked value tokens and averaged over the "
    "ranks, a mean of means of unequal counts; the policy term has the global count and is right."
)
