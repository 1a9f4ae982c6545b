"""A small speech transducer (frame encoder, label predictor with a GRU cell, additive joint network) under DDP on three ranks, seven utterances of unlike lengths (3, 2 and 2), two micro-batches, the
first under no_sync. The model itself sums the lattice with autograd; the step uses a loss function of its own that runs the forward and backward variables and hands back the gradient of the
log-probabilities. DDP averages, so the loss is multiplied by the number of ranks and divided by the seven utterances.

The bug: in the loss function's backward the gradient of emitting a label at frame t with u labels behind goes on with the backward variable at (t + 1, u + 1), as in CTC, although in a transducer an
emission stays in its frame and goes on at (t, u + 1). After reports about home-made RNN-T losses (warp-transducer ports, numba kernels) whose costs agree with the reference while their gradients do not.
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FRAMES, LABELS, FEATURES, WIDTH, VOCABULARY, ROWS = 6, 3, 4, 7, 5, 7
BLANK = 0


class Transducer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.predictor = nn.GRUCell(WIDTH, WIDTH)
        self.joint = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, sound, labels):
        heard = self.encoder(sound)
        state = torch.zeros_like(heard[:, 0])
        said = []
        for u in range(LABELS + 1):
            word = labels[:, u - 1] if u else torch.full_like(labels[:, 0], BLANK)
            state = self.predictor(self.words(word), state)
            said.append(state)
        mixed = torch.tanh(heard[:, :, None] + torch.stack(said, 1)[:, None])
        return self.joint(mixed).log_softmax(-1)  # [rows, frames, labels + 1, vocabulary]


def lattice(log_probs, labels, frames, length):
    """The cost of one utterance, by autograd."""
    alpha = {}
    for t in range(frames):
        for u in range(length + 1):
            ways = []
            if t:
                ways.append(alpha[t - 1, u] + log_probs[t - 1, u, BLANK])
            if u:
                ways.append(alpha[t, u - 1] + log_probs[t, u - 1, labels[u - 1]])
            alpha[t, u] = torch.logsumexp(torch.stack(ways), 0) if ways else log_probs.new_zeros(())
    return -(alpha[frames - 1, length] + log_probs[frames - 1, length, BLANK])


class TransducerLoss(torch.autograd.Function):
    """The summed cost of the utterances; the gradient comes from forward and backward variables."""

    @classmethod
    def emission(cls, beta, t, u):
        return beta[t, u + 1]

    @classmethod
    def of_one(cls, lp, labels, frames, length):
        infinity = float("inf")
        alpha = lp.new_full((frames + 1, length + 2), -infinity)
        beta = lp.new_full((frames + 1, length + 2), -infinity)
        alpha[0, 0] = 0.0
        for t in range(frames):
            for u in range(length + 1):
                if t:
                    alpha[t, u] = torch.logaddexp(
                        alpha[t, u], alpha[t - 1, u] + lp[t - 1, u, BLANK]
                    )
                if u:
                    alpha[t, u] = torch.logaddexp(
                        alpha[t, u], alpha[t, u - 1] + lp[t, u - 1, labels[u - 1]]
                    )
        beta[frames, length] = 0.0
        for t in reversed(range(frames)):
            for u in reversed(range(length + 1)):
                beta[t, u] = beta[t + 1, u] + lp[t, u, BLANK]
                if u < length:
                    beta[t, u] = torch.logaddexp(beta[t, u], beta[t, u + 1] + lp[t, u, labels[u]])
        total = beta[0, 0]
        grad = torch.zeros_like(lp)
        for t in range(frames):
            for u in range(length + 1):
                grad[t, u, BLANK] -= torch.exp(
                    alpha[t, u] + lp[t, u, BLANK] + beta[t + 1, u] - total
                )
                if u < length:
                    grad[t, u, labels[u]] -= torch.exp(
                        alpha[t, u] + lp[t, u, labels[u]] + cls.emission(beta, t, u) - total
                    )
        return -total, grad

    @classmethod
    def costs(cls, log_probs, labels, frames, lengths):
        return [
            cls.of_one(log_probs[n], labels[n].tolist(), int(frames[n]), int(lengths[n]))
            for n in range(len(labels))
        ]

    @classmethod
    def run(cls, ctx, log_probs, labels, frames, lengths):
        pairs = cls.costs(log_probs, labels, frames, lengths)
        ctx.save_for_backward(torch.stack([grad for _, grad in pairs]))
        return torch.stack([cost for cost, _ in pairs]).sum()

    @staticmethod
    def forward(ctx, log_probs, labels, frames, lengths):
        return TransducerLoss.run(ctx, log_probs, labels, frames, lengths)

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return grad * kept, None, None, None


class Clean:
    criterion = TransducerLoss

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Transducer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sound": torch.randn(ROWS, FRAMES, FEATURES, generator=g),
            "labels": torch.randint(1, VOCABULARY, (ROWS, LABELS), generator=g),
            "frames": torch.tensor([6, 4, 5, 3, 6, 5, 4]),
            "lengths": torch.tensor([3, 2, 3, 1, 2, 3, 2]),
        }

    def loss_sum(self, model, rows):
        log_probs = model(rows["sound"], rows["labels"])
        costs = [
            lattice(
                log_probs[n],
                rows["labels"][n].tolist(),
                int(rows["frames"][n]),
                int(rows["lengths"][n]),
            )
            for n in range(len(log_probs))
        ]
        return torch.stack(costs).sum(), len(costs)

    def distribute(self, model, ctx):
        return DDP(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        model.zero_grad()
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            with model.no_sync() if n == 0 else contextlib.nullcontext():
                log_probs = model(part["sound"], part["labels"])
                loss = self.criterion.apply(
                    log_probs, part["labels"], part["frames"], part["lengths"]
                )
                (loss * ctx.world_size / ROWS).backward()


class FrameSynchronousLoss(TransducerLoss):
    @classmethod
    def emission(cls, beta, t, u):
        return beta[t + 1, u + 1]

    @staticmethod
    def forward(ctx, log_probs, labels, frames, lengths):
        return FrameSynchronousLoss.run(ctx, log_probs, labels, frames, lengths)


class Buggy(Clean):
    criterion = FrameSynchronousLoss


EXPECT = dict(
    right=[
        r"FrameSynchronousLoss|TransducerLoss|criterion|loss function|custom (autograd )?function|autograd\.Function|backward (of|formula)|emission|log.?prob",
        r"backward|gradient|derivative|jacobian|adjoint|vjp",
    ],
    place=[
        r"FrameSynchronousLoss|TransducerLoss",
        r"criterion",
        r"emission",
        r"\bapply\b",
        r"loss",
        r"log.?prob",
    ],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(encoder|predictor|joint)('s)? .{0,20}backward formula|forward (of .{0,30})?is wrong|(the )?loss (value )?(itself )?(is|differs|was) (wrong|differ)",
    ],
)
WHY = (
    "FrameSynchronousLoss.emission reads the backward variable at (t + 1, u + 1) where it must be (t, u + 1): an emission in a transducer does not use up its frame. Costs, alpha and beta are right, so the loss is right "
    "on all three ranks and in both micro-batches, and so is the gradient of all blanks; the gradient of the log-probabilities of the labels is wrong (zero in the last frame but at the last label). With it "
    "the gradients of joint, encoder, predictor and words are wrong. DDP's average, no_sync around the first micro-batch and the factor 3 / 7 are right. Fix: return beta[t, u + 1] in emission."
)
