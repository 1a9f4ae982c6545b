"""A small language model with tied embedding under FSDP2, emptied to the meta device and loaded anew. After verl PR 7835 (to_empty gives
every parameter a storage of its own, a tied lm_head stops being the embedding) and FAULTS C11-06: it is not tied again.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH = 10, 7, 19, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.past, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 13),
            nn.Linear(13, WIDTH),
        )

    def forward(self, x):
        h = self.norm(x)
        mean = h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]
        return x + self.down(F.silu(self.up(h + self.past(mean))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["tokens"]), rows["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def tie(self, model):
        model.head.weight = model.embed.weight

    def distribute(self, model, ctx):
        weights = model.state_dict()
        model.to("meta").to_empty(device="cpu")
        model.load_state_dict(weights)
        self.tie(model)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count)
        (loss / count).backward()


class Buggy(Clean):
    def tie(self, model):
        pass


EXPECT = dict(
    right=[
        r"embed|head",
        r"tie|tied|shared|same (tensor|weight|param)|alias|"
        r"two (names|uses|copies|parameters)|(part|use|path|contribution).{0,40}(head|embed)|separate|"
        r"(head|embed).{0,60}(missing|lack|without|not in|unknown|extra|no longer|new|own param)",
    ],
    place=[r"embed", r"head"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"(blocks|norm)\.\S* (is|are|was|were) (wrong|missing)",
    ],
)
WHY = (
    "Going through the meta device makes new parameters, and head.weight is no longer embed.weight: the tie is cut, though the "
    "values agree. embed.weight has the gradient of its use as embedding only, head.weight that of the head, on all ranks; the sum "
    "of both would be right, and everything else is."
)
