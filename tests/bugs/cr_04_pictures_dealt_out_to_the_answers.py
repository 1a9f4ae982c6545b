"""Policy gradient for a small vision-language model: each of 6 prompts is a picture with three
sampled answers, whose rewards are centred within the group. FSDP2 (fully_shard) over two ranks,
3 prompts each, in micro-batches of two prompts and one.

The step encodes each picture once and hands the features to the prompt's three answers, which lie
flat in the batch (prompt after prompt).

Bug: the features are repeated as a block (picture 1, picture 2, picture 1, ..) and not each three
times in a row. After reinforcement learning code for vision-language models that takes `repeat`
for `repeat_interleave` when it expands the pixel features for several generations.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
WORDS, D, PIXELS, PROMPTS, ANSWERS, T, PAD = 11, 7, 9, 6, 3, 5, 0


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(PIXELS, 10)
        self.project = nn.Linear(10, D)

    def forward(self, picture):
        return self.project(F.gelu(self.enter(picture)))


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.cell = nn.GRUCell(D, D)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, WORDS)

    def forward(self, features, ids):
        """Logarithm of the probability of each token after the first."""
        state, out = torch.tanh(features), []
        for at in range(ids.shape[1] - 1):
            state = self.cell(self.words(ids[:, at]), state)
            out.append(self.head(self.norm(state)))
        log_probs = torch.stack(out, 1).log_softmax(-1)
        return log_probs.gather(-1, ids[:, 1:, None])[..., 0]


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = Vision()
        self.writer = Writer()

    def forward(self, picture, ids, spread):
        """ids: prompts, answers, tokens; spread brings features to the flat answers."""
        return self.writer(spread(self.vision(picture), ids.shape[1]), ids.flatten(0, 1))


def one_by_one(features, answers):
    return torch.stack([f for f in features for _ in range(answers)])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 41)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 410)
        ids = torch.randint(1, WORDS, (PROMPTS, ANSWERS, T + 1), generator=g)
        length = torch.randint(2, T + 2, (PROMPTS, ANSWERS, 1), generator=g)
        return {
            "picture": torch.randn(PROMPTS, PIXELS, generator=g),
            "ids": ids.masked_fill(torch.arange(T + 1) >= length, PAD),
            "reward": torch.randn(PROMPTS, ANSWERS, generator=g),
        }

    def objective(self, model, rows, spread):
        log_probs = model(rows["picture"], rows["ids"], spread)
        advantage = rows["reward"] - rows["reward"].mean(1, keepdim=True)
        written = rows["ids"].flatten(0, 1)[:, 1:].ne(PAD)
        return -(log_probs * written * advantage.flatten()[:, None]).sum()

    def loss_sum(self, model, rows):
        return self.objective(model, rows, one_by_one), rows["picture"].shape[0]

    def spread(self, features, answers):
        return features.repeat_interleave(answers, dim=0)

    def distribute(self, model, ctx):
        mesh = DeviceMesh.from_group(ctx.group("dp"), "cpu", mesh_dim_names=("dp",))
        for part in (model.vision, model.writer):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def step(self, model, batch, ctx):
        world = ctx.axes["dp"]
        rows = torch.arange(PROMPTS).tensor_split(world)[ctx.coords["dp"]]
        parts = rows.split(2)
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            own = {k: v[part] for k, v in batch.items()}
            (self.objective(model, own, self.spread) * world / PROMPTS).backward()


class Buggy(Clean):
    def spread(self, features, answers):
        return features.repeat(answers, 1)


EXPECT = dict(
    right=[
        r"spread|repeat|tile|expand|interleav|features?|picture|image",
        r"interleav|order|block|wrong (picture|image|prompt|features|row)|other (prompt|picture|"
        r"image|row)|another|mismatch|misalign|align|permut|belong",
    ],
    place=[r"\bspread\b", r"repeat", r"\bvision\b", r"features"],
    wrong=[
        r"advantage.{0,40}(wrong|misalign|other rank|not centred)",
        r"(set_requires_gradient_sync|sync).{0,40}(wrong|inverted|miss)",
        r"(fsdp|fully_shard).{0,40}averag.{0,30}(twice|missing|wrong)",
        r"padding.{0,30}(counted|scored)",
        r"(uneven|unequal).{0,40}(prompts|rows|tokens)",
    ],
)
WHY = """The answers lie flat, prompt after prompt: p0a0 p0a1 p0a2 p1a0 ... The features of the
pictures must come in the same order (repeat_interleave). Buggy.spread uses features.repeat(3, 1):
p0 p1 p0 p1 p0 p1, so in micro-batches of two prompts half of the answers are conditioned on the
other prompt's picture. A micro-batch of one prompt is right. Rewards, masks, FSDP and the divisor
are right; all parameters get wrong gradients. Fix: features.repeat_interleave(answers, dim=0)."""
