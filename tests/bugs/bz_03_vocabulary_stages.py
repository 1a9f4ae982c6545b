"""A pipeline of three stages whose output layer is cut by vocabulary over all stages ("vocabulary parallelism" for balanced pipelines): the last stage broadcasts its hidden states, every stage computes its
7 of 21 logits with a softmax over its own words, and the stages then exchange maxima and sums once; the factor own sum / global sum turns the local softmax into its part of the whole. The gradient of the
hidden states is summed over the stages and goes back down the pipeline. GPipe order, three micro-batches, labels with padding.

The bug: the factor is laid over the difference of local softmax and one-hot label, not over the softmax only, so that the label's part is shrunk. After the practice of the rescaled (online softmax) output
pass in pipeline vocabulary parallelism, where softmax and label terms are computed ahead of the exchange and only the first may be rescaled.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, STAGES, MICRO = 7, 5, 21, 6, 3, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(STAGES)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks.values():
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
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        logits = model(rows["ids"]).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()

    def distribute(self, model, ctx):
        stage = ctx.coords["pp"]
        model.blocks = nn.ModuleDict({str(stage): model.blocks[str(stage)]})
        if stage > 0:
            del model.embed
        if stage < STAGES - 1:
            del model.norm
        own = model.head.weight.detach().chunk(STAGES)[stage].clone()
        model.head.weight = nn.Parameter(own)
        return model

    def output_pass(self, softmax, label, factor):
        """The gradient of the own logits, from the softmax over the own words."""
        return softmax * factor - label

    def head_gradients(self, model, hidden, labels, ctx):
        stage, group = ctx.coords["pp"], ctx.group("pp")
        weight = model.head.weight.detach()
        logits = hidden @ weight.t()
        top = logits.amax(-1, keepdim=True)
        exponentials = (logits - top).exp()
        total = exponentials.sum(-1, keepdim=True)
        softmax = exponentials / total
        words = stage * len(weight) + torch.arange(len(weight))
        label = (labels[:, None] == words).to(softmax)
        whole_top = top.clone()
        dist.all_reduce(whole_top, op=dist.ReduceOp.MAX, group=group)
        own = total * (top - whole_top).exp()
        whole = own.clone()
        dist.all_reduce(whole, group=group)
        grad = self.output_pass(softmax, label, own / whole) * (labels != -100)[:, None]
        grad_hidden = grad @ weight
        dist.all_reduce(grad_hidden, group=group)
        return grad.t() @ hidden, grad_hidden

    def step(self, model, batch, ctx):
        stage, group = ctx.coords["pp"], ctx.group("pp")
        for p in model.parameters():
            p.grad = None
        count = (batch["labels"] != -100).sum()
        block, weight = model.blocks[str(stage)], model.head.weight
        kept = []
        for n in range(MICRO):
            ids = batch["ids"].tensor_split(MICRO)[n]
            labels = batch["labels"].tensor_split(MICRO)[n].flatten()
            if stage == 0:
                x = model.embed(ids)
            else:
                x = weight.new_empty(*ids.shape, WIDTH)
                dist.recv(x, stage - 1)
                x.requires_grad_()
            y = block(x)
            if stage < STAGES - 1:
                dist.send(y.detach(), stage + 1)
                hidden = weight.new_empty(labels.numel(), WIDTH)
            else:
                y = model.norm(y)
                hidden = y.detach().flatten(0, 1).clone()
            kept.append((x, y, hidden, labels))
        for x, y, hidden, labels in kept:
            dist.broadcast(hidden, STAGES - 1, group=group)
            grad_weight, grad_hidden = self.head_gradients(model, hidden, labels, ctx)
            grad_weight = grad_weight / count
            weight.grad = grad_weight if weight.grad is None else weight.grad + grad_weight
            if stage == STAGES - 1:
                grad = (grad_hidden / count).view_as(y)
            else:
                grad = torch.empty_like(y)
                dist.recv(grad, stage + 1)
            y.backward(grad)
            if stage > 0:
                dist.send(x.grad, stage - 1)


class Buggy(Clean):
    def output_pass(self, softmax, label, factor):
        return (softmax - label) * factor


EXPECT = dict(
    right=[
        r"label|target|one.?hot|softmax|logit|cross.?entropy|factor|rescal|normali[sz]|output (layer|pass|gradient)|head",
        r"factor|scal|shrunk|shrink|too (small|large)|multipl|own (sum|normali|share|part|words)|share|label|target|one.?hot",
    ],
    place=[
        r"output_pass",
        r"head_gradients",
        r"head\.weight|the head|output layer|logits",
        r"grad_hidden|hidden",
    ],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|reduced (twice|again)|counted (twice|3 times|three times)",
        r"denominator|divisor of the tokens|mean of means|wrong count|number of (valid )?tokens",
        r"micro.?batch.{0,20}(lost|dropped|overwritten|order|wrong)|wrong micro.?batch",
        r"(send|recv|receive).{0,40}(wrong|order|lost)",
        r"forward.{0,30}is wrong",
    ],
)
WHY = (
    "Each stage's softmax over its own seven words has to be multiplied by own sum / whole sum, and the one-hot label is then subtracted as it is. output_pass multiplies the difference, so that the label's "
    "part of the gradient of the logits is shrunk by the factor (about a third) on the stage that has the label. The gradient of the head's weight is wrong on all three stages, and through grad_hidden, which is "
    "summed over the stages, so is everything before it, in all micro-batches; the exchange itself is right. A right cause says that the label term (or the gradient of the logits in the output pass) is scaled "
    "by the factor of the softmax. Fix: softmax * factor - label."
)
