"""Actor and critic on one encoder, two losses and two optimizers by manual optimization. After Lightning's toggle_optimizer (all parameters
that do not belong to the current optimizer stop requiring gradients) and its issues on shared parts: the encoder belongs to the
actor's optimizer.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"rl": {"axes": {"dp": 3}}}}
ROWS, HORIZON, OBSERVED, ACTIONS, WIDTH = 11, 5, 6, 4, 8


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(OBSERVED, WIDTH), nn.LayerNorm(WIDTH), nn.ELU())
        self.actor = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, ACTIONS))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "policy": lambda model, rows: (self.policy(model, rows), rows["alive"].sum()),
            "value": lambda model, rows: (self.value(model, rows), rows["alive"].sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return ActorCritic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        alive = torch.arange(HORIZON) < torch.randint(1, HORIZON + 1, (ROWS, 1), generator=g)
        return {
            "observed": torch.randn(ROWS, HORIZON, OBSERVED, generator=g),
            "action": torch.randint(ACTIONS, (ROWS, HORIZON), generator=g),
            "advantage": torch.randn(ROWS, HORIZON, generator=g),
            "returns": torch.randn(ROWS, HORIZON, generator=g) + 1,
            "alive": alive,
        }

    @staticmethod
    def policy(model, rows):
        log_probs = model.actor(model.encoder(rows["observed"])).log_softmax(-1)
        taken = log_probs.gather(-1, rows["action"][..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return -((taken * rows["advantage"] + 0.02 * entropy) * rows["alive"]).sum()

    @staticmethod
    def value(model, rows):
        guess = model.critic(model.encoder(rows["observed"]))[..., 0]
        error = F.smooth_l1_loss(guess, rows["returns"], reduction="none")
        return 0.7 * (error * rows["alive"]).sum()

    def loss_sum(self, model, rows):
        return self.policy(model, rows) + self.value(model, rows), rows["alive"].sum()

    def optimizers(self, model):
        actor = [*model.encoder.parameters(), *model.actor.parameters()]
        return {"policy": actor, "value": list(model.critic.parameters())}

    @contextmanager
    def turn_of(self, params, model):
        yield

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["alive"].sum()
        dist.all_reduce(count)
        for name, params in self.optimizers(model).items():
            with self.turn_of(params, model):
                (getattr(self, name)(model, mine) / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    @contextmanager
    def turn_of(self, params, model):
        model.requires_grad_(False)
        for param in params:
            param.requires_grad_(True)
        yield
        model.requires_grad_(True)


EXPECT = dict(
    right=[
        r"encoder",
        r"value|critic|one (of the )?(term|loss)|second (term|loss)",
        r"detach|lost|lose|no gradient|missing|misses|zero|without|lacks?|frozen|freez|drop|not reach|never reach|not flow|"
        r"no part|left out|absent|disconnect|"
        r"requires_grad|\b0\b|only",
    ],
    place=[r"encoder", r"value"],
    wrong=[
        r"(actor|critic)\.\d\S* (is|are|has|have) (a )?wrong",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"policy (term|loss)?\S* ?(is|has) (a )?(wrong|scaled|missing|lost)",
    ],
)
WHY = (
    "In the critic's turn every parameter outside the critic's optimizer is frozen, also the shared encoder, so encoder.* gets the "
    "gradient of the policy term only and the value term is missing there, on all ranks. actor and critic are right."
)
