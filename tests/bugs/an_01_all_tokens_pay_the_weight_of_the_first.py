"""Context parallelism (cp 3, uneven pieces of 5, 4 and 2 of eleven tokens) for a small recurrent-free language model (embedding, position table, gated block), with a fused head written by hand: a Function computes the token losses
(reduction
none) and, chunk by chunk, the gradient of the logits in the forward. The token losses are weighted by a column of the batch (per-token advantages) and summed. Three micro-batches; the weight gradients are summed over cp.

The bug: the backward of the fused head multiplies what the forward kept by the first entry of the incoming gradient, as if it were one number. As in linkedin/Liger-Kernel issue 968 and PR 1298 (wrong gradients for fused linear cross
entropy with reduction='none': the kernel loads only grad_output[0]).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, TOKENS, VOCABULARY, WIDTH, CHUNK = 5, 11, 9, 6, 4
PIECES = [(0, 5), (5, 9), (9, 11)]
PARTS = [(0, 2), (2, 4), (4, 5)]


class FusedHead(torch.autograd.Function):
    """Token losses of a linear head; the logits never exist for more than CHUNK tokens."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, scalar):
        losses, grads = [], []
        for h, y in zip(hidden.split(CHUNK), labels.split(CHUNK)):
            logits = h @ weight.t()
            losses.append(F.cross_entropy(logits, y, reduction="none"))
            grads.append(logits.softmax(-1) - F.one_hot(y, weight.shape[0]).to(logits.dtype))
        ctx.save_for_backward(hidden, weight, torch.cat(grads))
        ctx.scalar = scalar
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, grad_output):
        hidden, weight, grads = ctx.saved_tensors
        factor = grad_output[0] if ctx.scalar else grad_output[:, None]
        grads = grads * factor
        return grads @ weight, grads.t() @ hidden, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.gate, self.up = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)
        self.head = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.5)

    def forward(self, ids, first=0):
        x = self.embed(ids) + self.places[first : first + ids.shape[1]]
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Clean:
    scalar = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "weight": torch.rand(ROWS, TOKENS, generator=g) * 2 + 0.2,
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]) @ model.head.t()
        losses = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="none")
        return (losses * rows["weight"].flatten()).sum(), rows["labels"].numel()

    def step(self, model, batch, ctx):
        first, last = PIECES[ctx.rank]
        for low, high in PARTS:
            ids, labels, weight = (
                batch[k][low:high, first:last] for k in ("ids", "labels", "weight")
            )
            hidden = model(ids, first).flatten(0, 1)
            losses = FusedHead.apply(hidden, model.head, labels.flatten(), self.scalar)
            ((losses * weight.flatten()).sum() / (ROWS * TOKENS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    scalar = True


EXPECT = dict(
    right=[
        r"(?i)head|FusedHead|loss|token",
        r"(?i)weight(s|ed)?\b|coefficient|factor|advantage|incoming|grad_output|scal",
        r"(?i)backward|adjoint|gradient|token|row|each|first|one (number|value)",
    ],
    place=[r"(?i)FusedHead|fused head|\bhead\b|token loss|loss"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted|of)|positions? (is|are) wrong",
        r"(?i)(gate|up|down)\.(weight|bias) .{0,20}own (backward|adjoint)",
    ],
)
WHY = (
    "The forward and the loss are right on all ranks. In the backward of FusedHead the incoming gradient is a vector, weight / 55 per token; Buggy takes its first entry for all tokens of the call. So on each rank and in each "
    "micro-batch every "
    "token is weighted by the weight of the first token of the first row of the micro-batch at the first place of the rank's piece (rows 0, 2, 4; places 0, 5, 9), not by its own. Only this first token is right. All parameters get "
    "wrong gradients "
    "in direction (head itself and everything before it: gate, up, down, embed, places), the same on all ranks after the sum over cp. The sum over cp, the divisor 55, labels, positions and chunks are right. Fix: multiply the kept "
    "gradient row by row "
    "by grad_output[:, None]."
)
