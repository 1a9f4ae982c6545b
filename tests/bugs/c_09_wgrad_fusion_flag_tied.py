"""Weight gradients added to main_grad inside the linear layer's backward, the rest by a hook.
After FAULTS C11-05 and C11-02 (tied weights): the flag of the fused layer hides the embedding's part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_BATCHES = 10, 4, 14, 8, 2


class FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad.addmm_(grad.flatten(0, -2).T, x.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.zeros_like(weight)  # so that the hook fires


def linear(x, weight):
    return FusedLinear.apply(x, weight) if hasattr(weight, "main_grad") else x @ weight.T


class Linear(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) / inner**0.5)
        self.bias = nn.Parameter(torch.zeros(outer))

    def forward(self, x):
        return linear(x, self.weight) + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), Linear(WIDTH, 21), Linear(21, WIDTH)
        self.mix = nn.Parameter(torch.randn(LENGTH, LENGTH) / 2)

    def forward(self, x):
        x = x + self.mix.tril() @ x
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.final_norm = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.word_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return linear(self.final_norm(x), self.word_embeddings.weight)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def add(self, param):
        if not param.grad_added_to_main_grad or param.zero_out_wgrad:
            param.main_grad.add_(param.grad)  # a fused layer left zeros here
        param.grad = None

    def distribute(self, model, ctx):
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param).detach()
            param.zero_out_wgrad = param is model.word_embeddings.weight
            param.register_post_accumulate_grad_hook(self.add)
        return model

    def gradient_of(self, name, param, ctx):
        return param.main_grad

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for param in model.parameters():
            param.main_grad.zero_()
        for i in range(MICRO_BATCHES):
            for param in model.parameters():
                param.grad_added_to_main_grad = False
            loss, _ = self.loss_sum(
                model, {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            )
            (loss / batch["labels"].numel()).backward()
        for param in model.parameters():
            dist.all_reduce(param.main_grad, group=ctx.group("dp"))


class Buggy(Clean):
    def add(self, param):
        if not param.grad_added_to_main_grad:
            param.main_grad.add_(param.grad)
        param.grad = None


EXPECT = dict(
    right=[
        r"word_embeddings",
        (
            r"missing|lost|lacks?|only (the|one|its)|(one|first|second|input|lookup|embedding|head|output|other|of two|of its)"
            r".{0,30}(use|part|share|call|contribution|path|gradient)|partial|dropped|does not (reach|arrive|get|flow|enter)"
            r"|never (reach|arrive|added|enters)|not (added|counted|accumulated|included|all of)|tied|shared|two (uses|calls)"
            r"|used (twice|more than once|in two)"
        ),
    ],
    place=[r"word_embeddings"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"(not|never) (all-)?reduced|missing (all.?)?reduc",
        r"mean of (the )?means",
        r"rows? (is|are|was|were) (lost|missing|dropped)",
        r"layers\.\d\S* (is|are) wrong",
    ],
)
WHY = (
    "word_embeddings.weight is also the output layer; the fused output layer sets grad_added_to_main_grad, "
    "and the hook then skips .grad, in which the embedding lookup's part is: that part is lost."
)
