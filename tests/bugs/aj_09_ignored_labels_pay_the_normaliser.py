"""Language model with a vocabulary-parallel head (tp 2, vocabulary of 11 cut into 6 and 5) and data parallelism (dp 2), two micro-batches each. The cross entropy over the cut vocabulary is an own autograd Function (global maximum,
global sum of exponentials, logit of the label from the rank that has it); labels of -100 mark prompt and padding. The divisor is the number of labels of the batch.

The bug: -100 lies in no rank's part of the vocabulary, so its logit is 0 on all ranks as for any label of another rank, and nobody masks the row afterwards: an ignored token has the loss log Z, and its softmax as gradient. As for
losses after Megatron's vocab_parallel_cross_entropy, which has no ignore_index (deepspeedai/DeepSpeed PR 6882 adds one; modelscope/ms-swift PR 9947 puts in a safe label and masks the result).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, TOKENS, VOCABULARY, WIDTH = 7, 5, 11, 6
CUTS = [0, 6, 11]
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 7)]]
IGNORED = [1, 3, 0, 2, 4, 0, 1]


class Enter(torch.autograd.Function):
    """Identity; backward: sum of the gradients of the tensor-parallel ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, low, group, mask_ignored):
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - top[:, None]
        mine = (labels >= low) & (labels < low + logits.shape[1])
        place = torch.where(mine, labels - low, 0)
        target = shifted.gather(1, place[:, None]).squeeze(1) * mine
        total = shifted.exp().sum(1)
        dist.all_reduce(target, group=group)
        dist.all_reduce(total, group=group)
        loss = total.log() - target
        if mask_ignored:
            loss = loss * (labels >= 0)
        ctx.save_for_backward(shifted.exp() / total[:, None], place, mine, labels)
        ctx.mask_ignored = mask_ignored
        return loss

    @staticmethod
    def backward(ctx, grad):
        softmax, place, mine, labels = ctx.saved_tensors
        if ctx.mask_ignored:
            grad = grad * (labels >= 0)
        back = softmax.clone()
        back[torch.arange(len(place)), place] -= mine.to(back.dtype)
        return back * grad[:, None], None, None, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, ids):
        x = self.embed(ids)
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.norm(x + torch.tanh(self.mix(torch.cat([before, x], -1))))


class Clean:
    mask_ignored = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g)
        labels[torch.arange(TOKENS)[None] < torch.tensor(IGNORED)[:, None]] = -100
        return {"ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g), "labels": labels}

    def loss_sum(self, model, rows):
        logits = model.head(model.hidden(rows["ids"]))
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, int((rows["labels"] >= 0).sum())

    def step(self, model, batch, ctx):
        tp, dp = ctx.group("tp"), ctx.group("dp")
        part = dist.get_rank(tp)
        low, high = CUTS[part], CUTS[part + 1]
        total = int((batch["labels"] >= 0).sum())
        for first, end in PARTS[dist.get_rank(dp)]:
            x = Enter.apply(model.hidden(batch["ids"][first:end]), tp)
            logits = F.linear(x, model.head.weight[low:high]).flatten(0, 1)
            labels = batch["labels"][first:end].flatten()
            loss = CutCrossEntropy.apply(logits, labels, low, tp, self.mask_ignored)
            (loss.sum() / total).backward()
        dist.all_reduce(model.head.weight.grad, group=tp)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)


class Buggy(Clean):
    mask_ignored = False


EXPECT = dict(
    right=[
        r"(?i)ignor|-100|mask|padd|prompt|label|tokens?|positions?|loss|cross.?entropy",
        r"(?i)loss|cross.?entropy|logits?|head|softmax|count|contribut|enter",
        r"(?i)ignor|-100|mask|padd|without (a )?label|more (tokens|positions|rows)|should not|extra|additional|loss (itself )?(is|differs|goes)|loss.{0,40}(wrong|differ|larger)",
    ],
    place=[r"(?i)loss|cross.?entropy|label|head|logits"],
    wrong=[
        r"(?i)hidden.{0,20}(forward|output).{0,15}wrong|forward of (embed|mix|norm)",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone",
        r"(?i)only in the backward|adjoint of .{0,20}(gather|sum|enter)",
    ],
)
WHY = (
    "Hidden states and logits are right on all ranks; the loss is wrong. For a label of -100 no tensor-parallel rank has the logit (mine is false, target 0), and without the mask the token has the loss log Z - max and the gradient "
    "softmax on its logits. The ignored positions (1, 3, 0, 2, 4, 0, 1 at the start of rows 0 to 6; 11 of 35) so enter the gradient: they push all logits down. Rows 2 and 5, which have none, are right. dp rank 0: micro-batch 0 has "
    "four of them, micro-batch 1 (row 2) none and is right; dp rank 1: six in micro-batch 0, one in micro-batch 1. Backward and forward of the Function agree with each other. All parameters (head, norm, mix, embed) are wrong, the "
    "same on all ranks. The divisor 24 (labels only), the sums over tp and dp, the cut of the vocabulary and valid tokens are right. Fix: multiply loss and incoming gradient by labels >= 0."
)
