"""A tiny language model (bag of previous tokens) with LoRA of peft on its embedding and on a linear layer, the base frozen. 2 data x 2 tensor ranks: embedding vocab-parallel (each tensor rank looks up its own half of the vocabulary, in
the base table and in lora_embedding_A, and the outputs are summed over the tensor ranks); the rest is computed by both. Targets padded with -100, two micro-batches. Gradients of the embedding's adapter are summed over all ranks, others
over the data ranks.

The bug: ids of the other half are replaced by local row 0 and the base's output is zeroed for them, but the adapter's isn't: each foreign id adds the LoRA row of the range's first token. After Megatron's VocabParallelEmbedding (input mask) and LoRA
on vocab parallel embeddings (vLLM, NeMo, mcore bridges) that reuse the masked input and forget the output mask.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH = 7, 6, 15, 8


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def body(self, x):
        before = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(torch.tanh(self.fc(x) + before))

    def forward(self, ids):
        return self.body(self.wte(ids))


class SumOverTensorRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LoraConfig(
            r=3, lora_alpha=5, target_modules=["wte", "fc"], init_lora_weights=False
        )
        return get_peft_model(Body(), config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    @staticmethod
    def criterion(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.criterion(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def adapter_delta(self, layer, local, foreign):
        table, up = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
        after_a = F.embedding(local, table.T[self.lo : self.hi])
        after_a = after_a.masked_fill(foreign[..., None], 0)
        return after_a @ up.T * layer.scaling["default"]

    def embed(self, layer, ids, ctx):
        own = torch.arange(VOCABULARY).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        self.lo, self.hi = int(own[0]), int(own[-1]) + 1
        foreign = (ids < self.lo) | (ids >= self.hi)
        local = (ids - self.lo).masked_fill(foreign, 0)
        out = F.embedding(local, layer.base_layer.weight[self.lo : self.hi])
        out = out.masked_fill(foreign[..., None], 0)
        return SumOverTensorRanks.apply(
            out + self.adapter_delta(layer, local, foreign), ctx.group("tp")
        )

    def step(self, model, batch, ctx):
        inner = model.get_base_model()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        total = (batch["labels"] != -100).sum()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for p in trained.values():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            logits = inner.body(self.embed(inner.wte, part["ids"], ctx))
            (self.criterion(logits, part["labels"]) / total).backward()
        for name, p in trained.items():
            if "lora_embedding" in name:
                dist.all_reduce(p.grad, group=ctx.group("tp"))
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def adapter_delta(self, layer, local, foreign):
        table, up = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
        after_a = F.embedding(local, table.T[self.lo : self.hi])
        return after_a @ up.T * layer.scaling["default"]


EXPECT = dict(
    right=[
        r"adapter|lora|delta|embed",
        r"mask|foreign|(first|zeroth) (row|token|column)|row (0|zero)|other (half|rank'?s? (ids|tokens|vocabulary))|not (its )?own|(ids|tokens) (of|from) (the )?other|out(side)? (of )?(its|the) (own )?(range|half|vocabulary)|not zeroed|clamp|partial sum|what (the )?ranks? (put|hand|give|add).{0,20}in|contribution",
    ],
    place=[
        r"adapter_delta",
        r"lora_embedding",
        r"\bembed\b",
        r"SumOverTensorRanks|all.?reduce",
        r"wte",
    ],
    wrong=[
        r"scaling.{0,30}(wrong|twice|missing)|lora_alpha",
        r"(not|never) reduced|reduced twice|missing (all.?)?reduc|gradients? (counted|summed) twice",
        r"divisor|mean of means|own count|padding|-100",
        r"only the last micro.?batch|identity backward|backward.{0,30}(alone|only) .{0,10}wrong",
    ],
)
WHY = (
    "For ids of the other tensor rank's half, the lookup is done at local row 0; the base's row is then zeroed, the LoRA row isn't. So each token's embedding, summed over the two tensor ranks, has one LoRA contribution too many: that of token 0 or of token 8 (the first of "
    "the half that doesn't own it). The embedding differs in the forward on all four ranks, all trained gradients are wrong, most of all columns 0 and 8 of lora_embedding_A, in both micro-batches. A right cause says that the adapter's output for foreign ids is not masked (contributes to the "
    "sum though the rank does not own the token). Fix: masked_fill on after_a."
)
