"""A policy with an entropy bonus, the vocabulary of its head cut over two ranks beside two data-parallel replicas. After verl's
vocab_parallel_entropy (a hand-written autograd function that saves the global sum of softmax times logits) and FAULTS C19-01, C07-11:
to save memory the backward computes the sum again, from its own part.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

TOPOLOGY = {"pools": {"actor": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, BONUS = 7, 6, 11, 8, 0.3


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def softmax_parts(logits, group):
    top = logits.amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    exp = (logits - top).exp()
    total = exp.sum(-1, keepdim=True)
    dist.all_reduce(total, group=group)
    return exp / total, total.log() + top


class LogProb(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, start, group):
        probs, log_total = softmax_parts(logits, group)
        own = (labels >= start) & (labels < start + logits.size(-1))
        index = (labels - start).clamp(0, logits.size(-1) - 1)[..., None]
        taken = logits.gather(-1, index) * own[..., None]
        dist.all_reduce(taken, group=group)
        ctx.save_for_backward(probs, index, own)
        return (taken - log_total)[..., 0]

    @staticmethod
    def backward(ctx, grad):
        probs, index, own = ctx.saved_tensors
        one_hot = torch.zeros_like(probs).scatter_(-1, index, own[..., None].to(probs.dtype))
        return (one_hot - probs) * grad[..., None], None, None, None


class Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, group):
        probs, log_total = softmax_parts(logits, group)
        mean = (probs * logits).sum(-1, keepdim=True)
        dist.all_reduce(mean, group=group)
        ctx.save_for_backward(probs, logits, mean)
        return (log_total - mean)[..., 0]

    @staticmethod
    def backward(ctx, grad):
        probs, logits, mean = ctx.saved_tensors
        return probs * (mean - logits) * grad[..., None], None


class EntropyRecomputed(Entropy):
    @staticmethod
    def backward(ctx, grad):
        probs, logits, _ = ctx.saved_tensors
        mean = (probs * logits).sum(-1, keepdim=True)
        return probs * (mean - logits) * grad[..., None], None


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def hidden(self, tokens):
        return self.norm(self.rnn(self.embed(tokens))[0])


class Clean:
    entropy = Entropy

    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "policy": lambda model, rows: (self.sums(model, rows)[0], rows["mask"].sum()),
            "entropy": lambda model, rows: (self.sums(model, rows)[1], rows["mask"].sum()),
        }

    def build(self):
        torch.manual_seed(self.seed)
        model = Policy()
        model.head.weight.data.mul_(4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "mask": torch.arange(LENGTH) < lengths,
            "advantage": torch.randn(ROWS, 1, generator=g),
        }

    @staticmethod
    def weigh(log_probs, entropy, rows):
        policy = -(log_probs * rows["advantage"] * rows["mask"]).sum()
        return policy, -BONUS * (entropy * rows["mask"]).sum()

    def sums(self, model, rows):
        all_log_probs = model.head(model.hidden(rows["tokens"])).log_softmax(-1)
        log_probs = all_log_probs.gather(-1, rows["labels"][..., None])[..., 0]
        return self.weigh(log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1), rows)

    def loss_sum(self, model, rows):
        return sum(self.sums(model, rows)), rows["mask"].sum()

    def distribute(self, model, ctx):
        weight = distribute_tensor(model.head.weight.detach(), ctx.mesh["tp"], [Shard(0)])
        model.head.weight = nn.Parameter(weight)
        return model

    def step(self, model, batch, ctx):
        tp, dp = ctx.group("tp"), ctx.group("dp")
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        weight = model.head.weight.to_local()
        start = 0 if ctx.coords["tp"] == 0 else VOCAB - len(weight)
        logits = CopyToRanks.apply(model.hidden(mine["tokens"]), tp) @ weight.mT
        log_probs = LogProb.apply(logits, mine["labels"], start, tp)
        policy, entropy = self.weigh(log_probs, self.entropy.apply(logits, tp), mine)
        ((policy + entropy) / batch["mask"].sum()).backward()
        for param in model.parameters():
            grad = param.grad.to_local() if param is model.head.weight else param.grad
            dist.all_reduce(grad, group=dp)


class Buggy(Clean):
    entropy = EntropyRecomputed


EXPECT = dict(
    right=[
        r"entropy|head|logits",
        r"backward|gradient (at|of|into|entering|that enters)|adjoint|derivative|own (part|shard|slice|vocabulary)|local|vocab|shard|"
        r"\btp\b|reduc|entropy",
    ],
    place=[r"entropy", r"head", r"logits", r"(all|every|each) ranks?|\btp\b"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|(output|forward) of (the )?\S+ (is|was) wrong",
        r"policy (term|loss)?\S* ?(is|has) (a )?(wrong|scaled|missing)",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"only (the )?(head|embed|rnn|norm)\S* (is|are) wrong",
    ],
)
WHY = (
    "In the backward of the entropy, the sum of softmax times logits runs over the rank's own 6 or 5 words instead of all 11, so the "
    "gradient of the entropy term at the logits is wrong on all ranks. Forward and policy term are right; head.weight and everything "
    "before it are wrong."
)
