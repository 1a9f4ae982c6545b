"""Actor and critic of a PPO trainer in accelerate: both are prepared by an Accelerator (DDP on three ranks), which accumulates over two micro-batches with no_sync, and its backward divides by two. The loss is the
policy's plus half of the value's; rows are dealt out evenly.

The bug: the critic is prepared with evaluation_mode=True, the line copied from the reference and reward models, which are only read. In this mode prepare_model does not wrap the module into DistributedDataParallel.
After TRL's prepare_model(..., evaluation_mode=True) for reference models, and reports of value heads which differ between the ranks.
"""

import contextlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FEATURES, ACTIONS, ACCUMULATION = 12, 5, 4, 2


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, ACTIONS))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ActorCritic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, FEATURES, generator=g),
            "action": torch.randint(ACTIONS, (ROWS,), generator=g),
            "advantage": torch.randn(ROWS, generator=g),
            "value": torch.randn(ROWS, generator=g),
        }

    def losses(self, model, rows):
        chosen = -F.cross_entropy(model.actor(rows["state"]), rows["action"], reduction="none")
        error = (model.critic(rows["state"]).squeeze(1) - rows["value"]).square()
        return 0.5 * error - chosen * rows["advantage"]

    def loss_sum(self, model, rows):
        losses = self.losses(model, rows)
        return losses.sum(), len(losses)

    def distribute(self, model, ctx):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        self.prepare(model)
        return model

    def prepare(self, model):
        model.actor = self.accelerator.prepare_model(model.actor)
        model.critic = self.accelerator.prepare_model(model.critic)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(ACCUMULATION):
            rows = {k: v.tensor_split(ACCUMULATION)[n] for k, v in mine.items()}
            with contextlib.ExitStack() as stack:
                if n < ACCUMULATION - 1:
                    stack.enter_context(self.accelerator.no_sync(model.actor))
                    stack.enter_context(self.accelerator.no_sync(model.critic))
                self.accelerator.backward(self.losses(model, rows).mean())


class Buggy(Clean):
    def prepare(self, model):
        model.actor = self.accelerator.prepare_model(model.actor)
        model.critic = self.accelerator.prepare_model(model.critic, evaluation_mode=True)


EXPECT = dict(
    right=[
        r"critic",
        r"(not|never|isn.t|without|no|un).{0,25}(reduc|averag|synchroni|wrapp|DDP|DistributedDataParallel|all.?reduc|communicat)|evaluation_mode|(own|local) (rows|gradient)|missing|differ.{0,40}(between|across|on) (the )?ranks",
    ],
    place=[r"critic", r"prepare", r"evaluation_mode"],
    wrong=[
        r"actor[^.]{0,40}(not reduced|never reduced|not synchron)|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro",
        r"reduced (twice|again)|mean of means|divided (twice|again)",
        r"detached|no gradient|(wrong|other) (rows|labels)",
    ],
)
WHY = (
    "prepare_model with evaluation_mode=True casts (and compiles) only; the critic stays a plain module, its no_sync is a null context, and each of the three ranks keeps the mean gradient of its own four rows (both micro-batches) "
    "instead of the mean over all twelve. The actor is wrapped and right; forward and loss are right. The critic's gradients differ between the ranks, on all three wrong. A right cause says that the critic's gradients are not "
    "reduced over the ranks. Fix: prepare it like the actor."
)
