"""Transducer speech model, data parallel by hand on two ranks (two micro-batches each, uneven, one flat all-reduce at the end): encoder frames and prediction states meet in a joint network; the transducer loss is an own autograd Function
that computes losses and gradients together in the forward (as the GPU libraries do). Every utterance has a weight, and a frame classifier adds 0.3 times its loss. The divisor is the number of utterances.

The bug: the backward of the Function hands back the gradients of the forward as they are and never looks at the gradient it is given: weights of the utterances and the divisor have no effect on the
transducer term. As fixed in pytorch/audio PR
1532 for its numpy transducer (grads.mul(grad_output)), compare HawkAaron/warp-transducer's PyTorch binding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
FRAMES, LABELS, FEATURES, WORDS, WIDTH = 4, 2, 3, 5, 6
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 9)]]


def transducer(logp, labels):
    """Minus log probability of the labels for every row; word 0 is the blank."""
    total = []
    for row, words in zip(logp, labels.tolist()):
        alpha = {(0, 0): row.new_zeros(())}
        for t in range(FRAMES):
            for u in range(LABELS + 1):
                ways = []
                if t > 0:
                    ways.append(alpha[t - 1, u] + row[t - 1, u, 0])
                if u > 0:
                    ways.append(alpha[t, u - 1] + row[t, u - 1, words[u - 1]])
                if ways:
                    alpha[t, u] = torch.logsumexp(torch.stack(ways), 0)
        total.append(-alpha[FRAMES - 1, LABELS] - row[FRAMES - 1, LABELS, 0])
    return torch.stack(total)


class TransducerLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, as_it_is):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            costs = transducer(leaf.log_softmax(-1), labels)
            (ctx.grads,) = torch.autograd.grad(costs.sum(), leaf)
        ctx.as_it_is = as_it_is
        return costs.detach()

    @staticmethod
    def backward(ctx, grad_costs):
        if ctx.as_it_is:
            return ctx.grads, None, None
        return ctx.grads * grad_costs[:, None, None, None], None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.GRU(FEATURES, WIDTH, batch_first=True)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.prediction = nn.Linear(WIDTH, WIDTH)
        self.joint = nn.Linear(WIDTH, WORDS)
        self.frames = nn.Linear(WIDTH, WORDS)

    def forward(self, sound, labels):
        heard, _ = self.encoder(sound)
        said = torch.cat([torch.zeros_like(labels[:, :1]), labels], 1)
        said = self.prediction(torch.cumsum(self.embed(said), 1))
        return self.joint(torch.tanh(heard[:, :, None] + said[:, None])), self.frames(heard)


class Clean:
    as_it_is = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "sound": torch.randn(rows, FRAMES, FEATURES, generator=g),
            "labels": torch.randint(1, WORDS, (rows, LABELS), generator=g),
            "frame": torch.randint(WORDS, (rows, FRAMES), generator=g),
            "weight": 0.4 + torch.rand(rows, generator=g),
        }

    def frame_loss(self, scores, rows):
        return F.cross_entropy(scores.flatten(0, 1), rows["frame"].flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        joint, frames = model(rows["sound"], rows["labels"])
        costs = transducer(joint.log_softmax(-1), rows["labels"])
        return (costs * rows["weight"]).sum() + 0.3 * self.frame_loss(frames, rows), len(costs)

    def step(self, model, batch, ctx):
        count = len(batch["labels"])
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            joint, frames = model(rows["sound"], rows["labels"])
            costs = TransducerLoss.apply(joint, rows["labels"], self.as_it_is)
            loss = (costs * rows["weight"]).sum() + 0.3 * self.frame_loss(frames, rows)
            (loss / count).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            p.grad.copy_(part.view_as(p))


class Buggy(Clean):
    as_it_is = True


EXPECT = dict(
    right=[
        r"(?i)transducer|joint|utterance|rows?\b|loss",
        r"(?i)backward|gradient|hands? (back|on)|scale|weight|divisor|divid|factor|times"
        r"|coefficient",
        r"(?i)TransducerLoss|joint|transducer|costs?\b|loss|utterance|rows?\b",
    ],
    place=[r"(?i)TransducerLoss|transducer|joint|costs?\b|loss"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong) (in|at|on)",
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)frames\.(weight|bias) (is|are) wrong|(frame|0\.3) (loss|term) is (wrong|missing)",
    ],
)
WHY = (
    "The forward (joint, frames, the costs of all utterances) is right on both ranks. The backward of TransducerLoss ignores the gradient it is given, weight[r] / 9 for row r, and gives the logits of "
    "the joint network the gradient of the unweighted, undivided "
    "cost: row r is too large by 9 / weight[r], its own factor for each row, in all micro-batches on both ranks. So joint, prediction and embed have gradients of about nine times the size and "
    "somewhat other direction, the encoder the same plus the right part of the frame "
    "classifier; frames is right. The weights, the 0.3 of the frame loss, the flat all-reduce and the accumulation are right. Fix: return grads * grad_costs[:, None, None, None]."
)
