"""Actor and critic of PPO with a running normaliser of the observations, FSDP2 (fully_shard) over
two ranks (4 and 3 of 7 transitions), two micro-batches a rank, reduced at the last one.

All micro-batches of a step are to be normalised with the statistics from the step's beginning; the
observations seen are merged into the running statistics (over all ranks) after each micro-batch.

Bug: what the step sets aside at its beginning are the buffers themselves and not copies of them.
The update works in place, so the second micro-batch is normalised with other statistics. After
VecNormalize / RunningMeanStd ports to torch buffers.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, SEEN, HIDDEN, ACTIONS, CLIP = 7, 5, 7, 3, 0.2


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SEEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.policy = nn.Linear(HIDDEN, ACTIONS)
        self.value = nn.Linear(HIDDEN, 1)
        self.register_buffer("mean", torch.randn(SEEN) * 0.5)
        self.register_buffer("var", torch.rand(SEEN) + 0.5)
        self.register_buffer("seen", torch.tensor(6.0))

    def forward(self, seen, mean, var):
        x = ((seen - mean) / (var + 1e-5).sqrt()).clamp(-5, 5)
        x = torch.tanh(self.body(x))
        return self.policy(x), self.value(x).squeeze(-1)

    @torch.no_grad()
    def observe(self, x, group):
        moments = torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([x.shape[0]])])
        dist.all_reduce(moments, group=group)
        new = moments[-1]
        mean = moments[:SEEN] / new
        var = moments[SEEN:-1] / new - mean.square()
        delta, total = mean - self.mean, self.seen + new
        spread = self.var * self.seen + var * new + delta.square() * self.seen * new / total
        self.mean.add_(delta * new / total)
        self.var.copy_(spread / total)
        self.seen.copy_(total)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 71)
        return Agent()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 711)
        return {
            "seen": torch.randn(ROWS, SEEN, generator=g) * 2 + 1,
            "action": torch.randint(ACTIONS, (ROWS,), generator=g),
            "old": -1.1 + 0.2 * torch.randn(ROWS, generator=g),
            "advantage": torch.randn(ROWS, generator=g),
            "returns": torch.randn(ROWS, generator=g),
        }

    def losses(self, rows, logits, value):
        new = F.log_softmax(logits, -1).gather(1, rows["action"][:, None]).squeeze(1)
        ratio, advantage = (new - rows["old"]).exp(), rows["advantage"]
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return (0.5 * (value - rows["returns"]).square() - gain).sum()

    def loss_sum(self, model, rows):
        logits, value = model(rows["seen"], model.mean, model.var)
        return self.losses(rows, logits, value), rows["seen"].shape[0]

    def distribute(self, model, ctx):
        mesh = init_device_mesh("cpu", (ctx.axes["dp"],))
        for part in (model.body, model):
            fully_shard(part, mesh=mesh)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        return model

    def at_the_beginning(self, model):
        return model.mean.clone(), model.var.clone()

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        mean, var = self.at_the_beginning(model)
        parts = own.split(2)
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            rows = {k: v[part] for k, v in batch.items()}
            logits, value = model(rows["seen"], mean, var)
            (self.losses(rows, logits, value) / ROWS).backward()
            model.observe(rows["seen"], ctx.group("dp"))


class Buggy(Clean):
    def at_the_beginning(self, model):
        return model.mean, model.var


EXPECT = dict(
    right=[
        r"mean|var|statistic|normali[sz]|buffer|running|observ",
        r"in.?place|alias|same (tensor|storage|memory)|copy|clone|snapshot|updat|"
        r"moved|changed|differ|between|mutat|stale|drift",
        r"micro.?batch|second|later|accumul|observe|at_the_beginning|between|after (the|each)",
    ],
    place=[r"at_the_beginning", r"\bobserve\b", r"\.mean\b|\.var\b", r"add_|copy_"],
    wrong=[
        r"set_requires_gradient_sync.{0,40}(wrong|missing|early|late)",
        r"divide_factor.{0,30}(wrong|missing|root)",
        r"(statistic|moment)s?.{0,40}(own|local) (rows|rank) only",
        r"uneven.{0,40}(rows|ranks)",
        r"advantage.{0,30}(normali|centred)",
    ],
)
WHY = """The step is to normalise every micro-batch with the statistics it began with. Buggy takes
model.mean and model.var without clone(), and observe() changes these tensors in place (add_, copy_)
after each micro-batch, so that the second micro-batch of each rank is normalised with the moved
statistics. The first micro-batch, the reductions and the divisor are right. A right cause says that
the running statistics move between the micro-batches (the snapshot is an alias). Fix: clone()."""
