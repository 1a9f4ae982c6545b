"""GRPO with each prompt's answers spread over the ranks; advantages are relative to the group.
After verl/TRL reports: mean and deviation are those of the answers on the rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
PROMPTS, ANSWERS, LENGTH, WIDTH, VOCAB = 5, 6, 4, 8, 10


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)
        self.down, self.lm_head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[-1]))
        x = x.cumsum(-2)
        return self.lm_head(x + self.down(F.silu(self.up(self.norm(x)))))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (PROMPTS, ANSWERS, LENGTH)
        lengths = torch.randint(1, LENGTH + 1, (PROMPTS, ANSWERS, 1), generator=g)
        return {
            "ids": torch.randint(VOCAB, shape, generator=g),
            "next": torch.randint(VOCAB, shape, generator=g),
            "old": torch.randn(shape, generator=g) * 0.2 - 2.3,
            "mask": torch.arange(LENGTH) < lengths,
            "reward": torch.randn(PROMPTS, ANSWERS, generator=g),
        }

    @staticmethod
    def advantage(reward, group):
        """Rewards relative to their group (dim 1 of `group` has all that are compared)."""
        mean, deviation = group.mean(1, keepdim=True), group.std(1, keepdim=True)
        return (reward - mean) / (deviation + 1e-4)

    @staticmethod
    def policy_loss(model, rows, advantage):
        log_p = model(rows["ids"]).log_softmax(-1)
        log_p = log_p.gather(-1, rows["next"][..., None])[..., 0]
        ratio = (log_p - rows["old"]).exp()
        gain = torch.minimum(
            ratio * advantage[..., None], ratio.clamp(0.7, 1.3) * advantage[..., None]
        )
        return -(gain * rows["mask"]).sum()

    def loss_sum(self, model, rows):
        advantage = self.advantage(rows["reward"], rows["reward"])
        return self.policy_loss(model, rows, advantage), rows["mask"].sum()

    def compared(self, reward, ctx):
        parts = [torch.empty_like(reward) for _ in range(ctx.world_size)]
        dist.all_gather(parts, reward)
        return torch.cat(parts, dim=1)

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size, 1)[ctx.rank].contiguous() for k, v in batch.items()}
        count = mine["mask"].sum()
        dist.all_reduce(count)
        advantage = self.advantage(mine["reward"], self.compared(mine["reward"], ctx))
        (self.policy_loss(model, mine, advantage) / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def compared(self, reward, ctx):
        return reward


EXPECT = dict(
    right=[
        r"loss|advantage|reward|weights? of (the )?(rows|answers)|lm_head",
        r"loss (itself|differs|value|function|is (wrong|another|computed)|term)"
        r"|(outside|after|behind|above) (the |every )?(last )?(model|module|lm_head)|enters"
        r"|arrives"
        r"|(into|at|of) (the )?(output|logits|lm_head)|other weights? (of|for)|weighs|weighted"
        r"|own (group|answers)",
    ],
    place=[r"loss", r"lm_head", r"advantage|reward|answers"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"\bforward (is )?wrong",
        r"counted twice",
        r"mean of (the )?means",
    ],
)
WHY = (
    "Advantages are normalised with mean and deviation of the rank's own half of the answers, so "
    "the loss (not the model's forward) weights every answer otherwise on both ranks."
)
