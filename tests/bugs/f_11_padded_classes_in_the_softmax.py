"""Speech recognition with CTC: the output layer is cut by classes over tp, parts are padded to one width so that they can be
gathered. After Megatron-LM's padded vocabulary (make-vocab-size-divisible-by) and FAULTS C19 (shard-local sizes): the padding
is cut off after the log-softmax instead of before it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, FRAMES, FEATURES, WIDTH, CLASSES = 6, 14, 4, 7, 13


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Gathered(torch.autograd.Function):
    """Parts of all ranks along the last dimension; what follows is the same on every rank."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(FEATURES, WIDTH, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def encode(self, sound):
        x = F.gelu(self.front(sound.mT)).mT
        return self.gru(self.norm(x))[0]

    def forward(self, sound):
        return self.head(self.encode(sound))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recogniser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sound": torch.randn(ROWS, FRAMES, FEATURES, generator=g),
            "frames": torch.randint(9, FRAMES + 1, (ROWS,), generator=g),
            "text": torch.randint(1, CLASSES, (ROWS, 4), generator=g),
            "letters": torch.randint(1, 5, (ROWS,), generator=g),
        }

    @staticmethod
    def ctc(logp, rows):
        return F.ctc_loss(
            logp.transpose(0, 1), rows["text"], rows["frames"], rows["letters"], reduction="none"
        ).sum()

    def loss_sum(self, model, rows):
        return self.ctc(model(rows["sound"]).log_softmax(-1), rows), rows["letters"].sum()

    def distribute(self, model, ctx):
        for name in ("weight", "bias"):
            part = getattr(model.head, name).detach().chunk(ctx.world_size)[ctx.rank]
            setattr(model.head, name, nn.Parameter(part.clone()))
        return model

    def log_probabilities(self, logits):
        return logits[..., :CLASSES].log_softmax(-1)

    def step(self, model, batch, ctx):
        logits = model.head(Copied.apply(model.encode(batch["sound"])))
        widest = -(-CLASSES // ctx.world_size)
        logits = Gathered.apply(F.pad(logits, (0, widest - logits.shape[-1])))
        loss = self.ctc(self.log_probabilities(logits), batch)
        (loss / batch["letters"].sum()).backward()


class Buggy(Clean):
    def log_probabilities(self, logits):
        return logits.log_softmax(-1)[..., :CLASSES]


EXPECT = dict(
    right=[
        r"loss|log.?prob|softmax|logits|partition|normali[sz]|classes|vocabular|padd",
        r"wrong|differ|directional|direction|padd|too many|extra|not (that|those) of|not the reference|deviat|is not right|forward|higher|larger|changed",
    ],
    place=[
        r"head",
        r"gru|front|norm",
        r"(all|every|each) ranks?|ranks? \W?[012]",
        r"loss|softmax|logits",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"(output|forward) of (the )?(front|norm|gru|encoder) (is|was) wrong|first wrong .{0,20}(front|norm|gru)",
        r"mean of (the )?(rank |ranks' )?means",
        r"detach|no_grad",
        r"only (on )?(the last rank|rank 2)\b",
    ],
)
WHY = (
    "13 classes are cut in parts of 5, 5 and 3; the last part is padded with two zero logits, and the log-softmax runs over 15 instead of 13 classes: each frame's "
    "partition sum has 2 too much. The loss value and all gradients are wrong, equally on all ranks; all modules up to the head have right outputs."
)
