"""Speech recognition with CTC and a frame-wise auxiliary loss; gradients are accumulated in a flat main_grad buffer. Modelled on the
fairseq/ESPnet/NeMo reports on CTC reductions (torch's reduction="mean" divides each utterance by its own target length before the
mean): written with "mean" times the rows, where the sum over the window's target letters was meant.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"asr": {"axes": {"dp": 3}}}}
ROWS, FRAMES, MELS, WIDTH, LETTERS, TARGETS, MICRO_BATCHES = 13, 20, 5, 8, 7, 5, 2


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.shrink = nn.Conv1d(MELS, WIDTH, 2, stride=2)
        self.norm, self.body = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ctc, self.phone = nn.Linear(WIDTH, LETTERS), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.norm(F.gelu(self.shrink(x.mT).mT))
        x = x + torch.tanh(self.body(x))
        return self.ctc(x).log_softmax(-1), self.phone(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "ctc": lambda m, r: (self.ctc_sum(m(r["x"])[0], r), r["n_letters"].sum()),
            "phone": lambda m, r: (self.phone_sum(m(r["x"])[1], r), (r["n_frames"] // 2).sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Recogniser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FRAMES, MELS, generator=g),
            "n_frames": 2 * torch.randint(9, FRAMES // 2 + 1, (ROWS,), generator=g),
            "letters": torch.randint(1, LETTERS, (ROWS, TARGETS), generator=g),
            "n_letters": torch.randint(1, 5, (ROWS,), generator=g),
            "phone": torch.randint(3, (ROWS, FRAMES // 2), generator=g),
        }

    @staticmethod
    def ctc_sum(log_probs, rows, reduction="sum"):
        return F.ctc_loss(
            log_probs.transpose(0, 1),
            rows["letters"],
            rows["n_frames"] // 2,
            rows["n_letters"],
            reduction=reduction,
        )

    @staticmethod
    def phone_sum(logits, rows):
        valid = torch.arange(FRAMES // 2) < (rows["n_frames"] // 2)[:, None]
        return (F.cross_entropy(logits.mT, rows["phone"], reduction="none") * valid).sum()

    def loss_sum(self, model, rows):
        log_probs, phone = model(rows["x"])
        letters, n = rows["n_letters"].sum(), len(rows["x"])
        return n * (
            self.ctc_sum(log_probs, rows) / letters
            + self.phone_sum(phone, rows) / (rows["n_frames"] // 2).sum()
        ), n

    def ctc_share(self, log_probs, rows, window):
        return self.ctc_sum(log_probs, rows) / window["n_letters"].sum()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        main_grad = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=ctx.dtype)
        views = dict(
            zip(model.parameters(), main_grad.split([p.numel() for p in model.parameters()]))
        )
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            log_probs, phone = model(rows["x"])
            loss = self.ctc_share(log_probs, rows, batch)
            (loss + self.phone_sum(phone, rows) / (batch["n_frames"] // 2).sum()).backward()
            for param, view in views.items():
                view += param.grad.flatten()
                param.grad = None
        dist.all_reduce(main_grad)
        for param, view in views.items():
            param.grad = view.view_as(param)


class Buggy(Clean):
    def ctc_share(self, log_probs, rows, window):
        return self.ctc_sum(log_probs, rows, "mean") * len(rows["x"]) / len(window["x"])


EXPECT = dict(
    right=[
        r"ctc",
        r"row|utterance|length|weigh|coefficient|factor|letters|normali[sz]",
        r"differ|unequal|uneven|own|each|per.?row|vary|various|between|not (all )?(alike|the same|equal)|\d\.\d|mean|weigh",
    ],
    place=[r"ctc", r"rows?"],
    wrong=[
        r"phone (term|loss)\S* .{0,25}(is|was|has) (wrong|lost|scaled|missing|counted)",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"phone\.(weight|bias) (is|are|has|have) (a )?wrong",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "In the ctc term each utterance is divided by its own number of letters and by the number of utterances, instead of by all letters "
    "of the batch: rows with few letters weigh too much, rows with many too little (factor mean length / own length). ctc.* and the "
    "shared shrink, norm and body are wrong on all ranks; the phone term and its head are right, and so are forward and reduction."
)
