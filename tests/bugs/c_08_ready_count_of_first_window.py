"""Micro-batches by a token budget; hooks start a parameter's reduction at its last backward of the window.
After FAULTS C12-09 (SkyRL PR 2146): how many backwards a window has is learned from the first window."""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, BUDGET = 8, 7, 12, 9, 12


class Critic(nn.Module):
    """A value model over token sequences: LSTM and an MLP head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.value = nn.Sequential(nn.Linear(WIDTH, 13), nn.Tanh(), nn.Linear(13, 1))

    def forward(self, ids):
        x, _ = self.lstm(self.embed(ids))
        return self.value(self.norm(x))[..., 0]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Critic()

    def batch(self, step=0):
        g = torch.Generator().manual_seed(self.seed + 1 + step)
        longest = 3 if step == 0 else LENGTH  # answers grow as the policy learns
        lengths = torch.randint(longest - 1, longest + 1, (ROWS,), generator=g)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "returns": torch.randn(ROWS, LENGTH, generator=g),
            "lengths": lengths,
        }

    def loss_sum(self, model, rows):
        mask = torch.arange(LENGTH) < rows["lengths"][:, None]
        error = (model(rows["ids"]) - rows["returns"]) ** 2
        return (error * mask).sum(), rows["lengths"].sum()

    def distribute(self, model, ctx):
        model.expected, model.seen, model.works = None, {}, []

        def ready(param):
            model.seen[param] = model.seen.get(param, 0) + 1
            if model.seen[param] == model.expected:
                work = dist.all_reduce(param.grad, group=ctx.group("dp"), async_op=True)
                model.works.append((param, work))
                work.wait()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(ready)
        return model

    def windows(self, rows):
        """Consecutive rows of at most BUDGET tokens."""
        at, start, tokens = [], 0, 0
        for i, n in enumerate(rows["lengths"].tolist()):
            if tokens and tokens + n > BUDGET:
                at.append(slice(start, i))
                start, tokens = i, 0
            tokens += n
        return [*at, slice(start, len(rows["lengths"]))]

    def expect(self, model, micro_batches):
        model.expected = micro_batches

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        parts = self.windows(mine)
        self.expect(model, len(parts))
        for part in parts:
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in mine.items()})
            (loss / batch["lengths"].sum()).backward()
        self.finish(model, ctx, len(parts))

    def finish(self, model, ctx, micro_batches):
        started = {param for param, _ in model.works}
        for param in model.parameters():
            if param not in started:
                dist.all_reduce(param.grad, group=ctx.group("dp"))
        model.seen, model.works = {}, []


class Buggy(Clean):
    def expect(self, model, micro_batches):
        pass

    def finish(self, model, ctx, micro_batches):
        super().finish(model, ctx, micro_batches)
        if model.expected is None:
            model.expected = micro_batches


EXPECT = dict(
    right=[
        (
            r"step (1|2|two)|second step|later step|micro.?batch|backward|rows|too (early|soon)|before|after (the|its) reduc"
            r"|window|accumulat"
        ),
        (
            r"(not|never|un) ?-?((all-?)?reduced|summed|exchanged|synchroni[sz]ed)|missing|partial|own (part|rows|share|"
            r"micro|gradient)|lacks?|too (early|soon)|before|other rank|lost|(on|at) (its|their|each|the) own rank|stays? (on|local)|only (its|the|their) (own )?(rows|part|own|local)"
            r"|differ\w* (between|on|across)"
        ),
    ],
    place=[r"micro.?batch", r"rows? \W?\d", r"ranks? \W?\d", r"step", r"ranks"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means|own count",
        r"(wrong|fail\w*|differs?) (already )?(at|in) the first step|step 0 (is|was) wrong",
        r"forward (is|was) wrong",
        r"stale (grad|buffer)|not zeroed",
    ],
)
WHY = (
    "The first step has one micro-batch per rank, so from then on every parameter is reduced after its "
    "first backward; in the second step the later micro-batches are added after the sum and stay on their own rank."
)
