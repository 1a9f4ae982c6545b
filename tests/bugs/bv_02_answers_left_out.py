"""RLOO (REINFORCE, leave one out): seven sampled answers to each prompt, the baseline of an answer is the mean reward of the six others. The prompts are cut over dp, the answers to a prompt over gen
(4 and 3), the sum of the rewards of a prompt is all-reduced over gen. Two micro-batches of prompts per rank, gradients summed over all ranks.

The bug: what is taken out of the sum is not the answer's own reward but all rewards that this rank holds: the whole local group is "left out", the divisor remains that of one answer. After the RLOO
advantage of TRL/OpenRLHF/verl, and reports on it when the samples of one prompt come from several workers.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "gen": 2}}}}
ROWS, ANSWERS, LENGTH, WORDS, FEATURES, WIDTH = 5, 7, 4, 9, 5, 8


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Linear(FEATURES, WIDTH)
        self.word = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.logits = nn.Linear(WIDTH, WORDS)

    def forward(self, prompt, answers):
        """log probability of every answer: prompt (b, f), answers (b, k, t)."""
        b, k, t = answers.shape
        start = torch.tanh(self.prompt(prompt))[:, None].expand(b, k, WIDTH).reshape(b * k, WIDTH)
        flat = answers.reshape(b * k, t)
        x = torch.cat([start[:, None], self.word(flat[:, :-1])], 1)
        h, _ = self.cell(x, start[None].contiguous())
        logp = self.logits(h).log_softmax(-1).gather(-1, flat[..., None]).squeeze(-1)
        return logp.sum(1).view(b, k)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "prompt": torch.randn(ROWS, FEATURES, generator=g),
            "answers": torch.randint(WORDS, (ROWS, ANSWERS, LENGTH), generator=g),
            "rewards": torch.randn(ROWS, ANSWERS, generator=g) + 1.5,
        }

    def loss_sum(self, model, rows):
        r = rows["rewards"]
        advantages = r - (r.sum(1, keepdim=True) - r) / (ANSWERS - 1)
        logp = model(rows["prompt"], rows["answers"])
        return -(advantages * logp).sum() / ANSWERS, len(r)

    def leave_one_out(self, rewards, ctx):
        total = rewards.sum(1, keepdim=True)
        dist.all_reduce(total, group=ctx.group("gen"))
        return (total - rewards) / (ANSWERS - 1)

    def policy_loss(self, model, part, ctx):
        rewards = part["rewards"]
        advantages = rewards - self.leave_one_out(rewards, ctx)
        return -(advantages * model(part["prompt"], part["answers"])).sum() / ANSWERS

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for name in ("answers", "rewards"):
            mine[name] = mine[name].tensor_split(ctx.axes["gen"], dim=1)[ctx.coords["gen"]]
        for n in range(2):
            part = {k: v.tensor_split(2)[n].contiguous() for k, v in mine.items()}
            (self.policy_loss(model, part, ctx) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


class Buggy(Clean):
    def leave_one_out(self, rewards, ctx):
        own = rewards.sum(1, keepdim=True)
        total = own.clone()
        dist.all_reduce(total, group=ctx.group("gen"))
        return (total - own) / (ANSWERS - 1)


EXPECT = dict(
    right=[
        r"baseline|leave.?one.?out|advantage|reward|leave_one_out",
        r"own|local|rank'?s|whole (group|part|shard)|all (of )?(its|the) (own |local )?(answers|rewards|samples)|instead of (its|the|each|one)|subtract|left out|excluded?|taken (out|off)|minus|other (rank|answers|worker)|keepdim|sum\(",
    ],
    place=[
        r"leave_one_out",
        r"total - own|\bown\b.{0,40}total|total.{0,40}\bown\b",
        r"baseline|advantage",
        r"policy_loss",
        r"all.?reduce.{0,80}(gen|reward|total)",
    ],
    wrong=[
        r"gradient.{0,40}(not|never) reduced|reduced (twice|again)|missing (all.?)?reduc",
        r"wrong group|over the (wrong|other) (axis|group)",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten)",
        r"mean of means|token count|wrong (labels|rows)",
    ],
)
WHY = (
    "The baseline of an answer has to be (sum of all seven rewards of its prompt - its own reward) / 6. leave_one_out subtracts the sum of all rewards this rank holds (own: 4 or 3 of the 7) from the all-reduced "
    "total and still divides by 6, so that all answers of a rank share a baseline from the other rank's answers only. The advantages are wrong on all four ranks and in both micro-batches, and with them, after the "
    "all-reduce, every gradient on every rank alike; the reduction itself is right. A right cause names the baseline or the advantages, from which the rank's whole part instead of the one answer is left out. Fix: (total - rewards) / (ANSWERS - 1)."
)
