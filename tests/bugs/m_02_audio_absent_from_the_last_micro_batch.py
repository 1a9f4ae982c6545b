"""Text with optional audio, data parallel by hand: hooks after accumulation sum each gradient over the ranks during the last of four
micro-batches. After FAULTS C14-03 (pytorch issue 128949) and Megatron-LM issues about overlap_grad_reduce with modules that not every
micro-batch uses: the audio tower runs only when a micro-batch has audio.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, MICRO_BATCHES, SOUND, WIDTH, TOKENS, CLASSES = 24, 4, 5, 8, 13, 4


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(SOUND, 11), nn.Linear(11, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.outer(F.gelu(self.inner(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.audio = nn.Embedding(TOKENS, WIDTH), Tower()
        self.block, self.out = Block(), nn.Linear(WIDTH, CLASSES)

    def forward(self, words, sound, has_sound, tower):
        x = self.words(words)
        if tower:
            x = x + self.audio(sound) * has_sound[:, None]
        return self.out(self.block(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        place = torch.arange(ROWS) % (ROWS // 3)
        spoken = (torch.rand(ROWS, generator=g) < 0.7) | (place % 3 == 0)
        return {
            "words": torch.randint(TOKENS, (ROWS,), generator=g),
            "sound": torch.randn(ROWS, SOUND, generator=g),
            "has_sound": spoken
            & (place < 6),  # of each rank's eight rows the last two are text only
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows, tower=True):
        logits = model(
            rows["words"], rows["sound"], rows["has_sound"].to(rows["sound"].dtype), tower
        )
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        self.last = False

        def reduce(param):
            if self.last:
                dist.all_reduce(param.grad)

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(reduce)
        return model

    def needs_tower(self, rows):
        return True

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            self.last = i == MICRO_BATCHES - 1
            loss, _ = self.loss_sum(model, rows, self.needs_tower(rows))
            (loss / ROWS).backward()


class Buggy(Clean):
    def needs_tower(self, rows):
        return bool(rows["has_sound"].any())


EXPECT = dict(
    right=[
        r"audio",
        r"(not|never|n't|no|missing|without|lacks?|un|skip\w*|left|only|outside)[ -]?.{0,50}(reduc|summed|synchroni|averag|"
        r"combin|own rows|shared between)|"
        r"differ\w*|partial|own (rows|share|part)|local|last micro",
    ],
    place=[r"audio"],
    wrong=[
        r"(words|block|out)\.\S+ (is|are|has|have) (a )?wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"only (the )?(first|last) micro-?batch",
    ],
)
WHY = (
    "The hooks reduce during the last micro-batch only, and there no rank runs the audio tower, so its hooks never fire with the flag "
    "set: audio.* keeps on each rank the gradient of that rank's own rows of the first three micro-batches and is never summed over "
    "the ranks. words, block and out are right."
)
