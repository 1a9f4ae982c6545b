"""Speaker verification with a learned scale and bias of the cosine, under FSDP2. After pytorch reports on ignored_params/ignored_modules
(FSDP neither shards nor reduces them) and SigLIP's logit_scale and logit_bias of shapes () and (1,), FAULTS C05: the loop that reduces
the ignored parameters looks for tensors without dimensions.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"speech": {"axes": {"dp": 3}}}}
ROWS, FRAMES, BANDS, WIDTH = 14, 8, 5, 8


class Verifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(BANDS, WIDTH, 3)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, dilation=2)
        self.out = nn.Linear(2 * WIDTH, 7)
        self.log_scale = nn.Parameter(torch.tensor(0.8))
        self.bias = nn.Parameter(torch.tensor([-0.5]))

    def embed(self, x):
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.out(torch.cat([x.mean(2), x.amax(2)], dim=1))

    def forward(self, one, other):
        cosine = F.cosine_similarity(self.embed(one), self.embed(other), dim=1)
        return self.log_scale.exp() * cosine + self.bias


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Verifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        same = torch.rand(ROWS, generator=g) < 0.4
        one = torch.randn(ROWS, BANDS, FRAMES, generator=g)
        noise = torch.randn(ROWS, BANDS, FRAMES, generator=g)
        other = torch.where(same[:, None, None], one + 0.5 * noise, noise)
        return {"one": one, "other": other, "same": same.float()}

    def loss_sum(self, model, rows):
        logits = model(rows["one"], rows["other"])
        loss = F.binary_cross_entropy_with_logits(logits, rows["same"], reduction="sum")
        return loss, len(logits)

    def distribute(self, model, ctx):
        ignored = {p for p in model.parameters() if p.numel() == 1}
        fully_shard(model, mesh=ctx.mesh, ignored_params=ignored)
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
        return model

    @staticmethod
    def left_to_us(param):
        return not isinstance(param, DTensor)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        (self.loss_sum(model, mine)[0] / ROWS).backward()
        for param in model.parameters():
            if self.left_to_us(param):
                dist.all_reduce(param.grad)


class Buggy(Clean):
    @staticmethod
    def left_to_us(param):
        return param.ndim == 0


EXPECT = dict(
    right=[
        r"\bbias\b",
        r"(not|never|n't|no|missing|without|lacks?|un|only|skip\w*)[ -]?.{0,50}(reduc|summed|synchroni|averag|combin|added|"
        r"shard|rows|collective)|"
        r"differ\w*|partial|own (rows|part)|local",
    ],
    place=[r"\bbias\b"],
    wrong=[
        r"(first|second|out)\.\S+ (is|are|has|have) (a )?wrong",
        r"log_scale (is|has|was) (a )?(wrong|not|missing)",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"(all|every) parameters? (is|are) (wrong|not reduced)",
    ],
)
WHY = (
    "bias has shape (1,) and is ignored by FSDP2, but the loop that reduces the ignored parameters takes only those of shape (), so "
    "each rank keeps the gradient of its own rows for bias. log_scale and all sharded parameters are right."
)
