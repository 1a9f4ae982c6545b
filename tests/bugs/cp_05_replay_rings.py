"""A duelling value network (Q learning) trained on three-step returns out of replay rings: each of
seven actors keeps its last ten steps in a ring, `oldest` says where the ring begins in time. FSDP2
over three ranks with an odd layout (matrices cut along their columns), micro-batches of at most two
rings, gradients sent in the last one.

A return runs over three steps or ends earlier: at the end of an episode (then nothing is added), or
at the newest step of the ring (then the value estimate that was stored there is added).

Bug: the ranks' vectorised version takes (slot + k) modulo the size of the ring and does not stop at
the newest step: returns that begin there go on with the oldest steps of the ring. After replay
buffers whose n-step windows cross the write pointer.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ACTORS, SIZE, OBS, H, ACTIONS, STEPS, GAMMA = 7, 10, 6, 9, 4, 3, 0.9


class Duelling(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS, H), nn.SiLU(), nn.Linear(H, H), nn.SiLU())
        self.value = nn.Linear(H, 1)
        self.advantage = nn.Linear(H, ACTIONS)

    def forward(self, obs):
        h = self.trunk(obs)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


def in_order_of_time(rows):
    out = torch.zeros_like(rows["reward"])
    for actor, oldest in enumerate(rows["oldest"].tolist()):
        order = [(oldest + i) % SIZE for i in range(SIZE)]
        for i in range(SIZE):
            g, rate, ended = 0.0, 1.0, False
            window = order[i : i + STEPS]
            for slot in window:
                g = g + rate * rows["reward"][actor, slot]
                rate *= GAMMA
                if rows["done"][actor, slot]:
                    ended = True
                    break
            if not ended:
                g = g + rate * rows["estimate"][actor, window[-1]]
            out[actor, order[i]] = g
    return out


def vectorised(rows):
    slots = torch.arange(SIZE).expand_as(rows["reward"])
    newest = (rows["oldest"][:, None] - 1) % SIZE
    g, rate = torch.zeros_like(rows["reward"]), torch.ones_like(rows["reward"])
    for k in range(STEPS):
        at = (slots + k) % SIZE
        g = g + rate * rows["reward"].gather(1, at)
        rate = rate * GAMMA * (~rows["done"].gather(1, at))
        last = (at == newest) | torch.tensor(k == STEPS - 1)
        g = g + rate * last * rows["estimate"].gather(1, at)
        rate = rate * (~last)
    return g


def vectorised_in_short(rows):
    slots = torch.arange(SIZE).expand_as(rows["reward"])
    g, rate = torch.zeros_like(rows["reward"]), torch.ones_like(rows["reward"])
    for k in range(STEPS):
        at = (slots + k) % SIZE
        g = g + rate * rows["reward"].gather(1, at)
        rate = rate * GAMMA * (~rows["done"].gather(1, at))
    return g + rate * rows["estimate"].gather(1, at)


class Clean:
    returns = staticmethod(vectorised)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        return Duelling()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 510)
        return {
            "obs": torch.randn(ACTORS, SIZE, OBS, generator=g),
            "action": torch.randint(ACTIONS, (ACTORS, SIZE), generator=g),
            "reward": torch.randn(ACTORS, SIZE, generator=g),
            "done": torch.rand(ACTORS, SIZE, generator=g) < 0.15,
            "estimate": torch.randn(ACTORS, SIZE, generator=g),
            "oldest": torch.randint(1, SIZE, (ACTORS,), generator=g),
        }

    def errors(self, model, rows, returns):
        q = model(rows["obs"]).gather(-1, rows["action"][..., None])[..., 0]
        return F.smooth_l1_loss(q, returns(rows), reduction="sum")

    def loss_sum(self, model, rows):
        return self.errors(model, rows, in_order_of_time), rows["reward"].numel()

    def distribute(self, model, ctx):
        fully_shard(
            model,
            mesh=ctx.mesh["dp"],
            shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0),
        )
        return model

    def step(self, model, batch, ctx):
        dp, r = ctx.axes["dp"], ctx.coords["dp"]
        parts = torch.arange(ACTORS).tensor_split(dp)[r].tensor_split(2)
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i + 1 == len(parts))
            loss = self.errors(model, {k: v[part] for k, v in batch.items()}, self.returns)
            (loss * dp / batch["reward"].numel()).backward()


class Buggy(Clean):
    returns = staticmethod(vectorised_in_short)


EXPECT = dict(
    right=[
        r"return|target|n-?step|three.?step|bootstrap|reward|window",
        r"newest|oldest|ring|wrap|modulo|% SIZE|write (pointer|head)|cross|stop|end of the "
        r"(ring|buffer)|boundary|circular|head of",
    ],
    place=[
        r"vectorised_in_short",
        r"vectorised",
        r"\breturns\b",
        r"\boldest\b",
        r"\bestimate\b",
        r"\(slots \+ k\)",
    ],
    wrong=[
        r"set_requires_gradient_sync",
        r"shard_placement|Shard\(1\).{0,30}wrong",
        r"(not|never|twice).{0,20}(all.?)?reduc",
        r"done.{0,30}(ignored|missing|not)",
        r"(uneven|unequal).{0,30}(rows|actors)",
        r"advantage.{0,30}mean",
    ],
)
WHY = """A return that reaches the newest step of the ring must stop there and add the estimate
stored at it. vectorised_in_short never looks at `oldest`: the last two steps in time go on with
the oldest steps of the ring (modulo), so their targets mix rewards of another time. The targets of
2 of 10 steps per actor are wrong, with them all gradients; the forward, FSDP2 and the normalisation
are right. The fix is to end the window at (oldest - 1) % SIZE as vectorised does."""
