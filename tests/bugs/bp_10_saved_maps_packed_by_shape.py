"""A GPT-2 language model (transformers, eager attention) on two data parallel ranks, two micro-batches of padded rows. To save memory, a saved_tensors_hooks pair packs the causal attention maps that autograd keeps: only the lower triangle is stored, and
unpack puts it back between zeros. Gradients are summed over the ranks, divided by the number of labelled tokens of the whole batch.

The bug: what an attention map is goes by the shape alone, the last two sizes being the sequence's length. Here the width is 6 as well as the length, so that hidden states, and the attention's square projection weight, lose all above the diagonal in the backward. After saved-tensor
compression hooks that select by shape or size (activation compression, offload hooks of several trainers).
"""

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCABULARY = 7, 6, 13


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=6,
            n_layer=2,
            n_head=2,
            n_inner=11,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        config._attn_implementation = "eager"
        return GPT2LMHeadModel(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], use_cache=False).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, (rows["labels"] != -100).sum()

    def is_causal_map(self, t):
        square = t.is_floating_point() and t.dim() >= 2 and t.shape[-2:] == (LENGTH, LENGTH)
        return square and torch.equal(t, t.tril())

    def pack(self, t):
        if not self.is_causal_map(t):
            return t
        rows, cols = torch.tril_indices(LENGTH, LENGTH)
        return t.shape, t.detach()[..., rows, cols]

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        shape, values = packed
        rows, cols = torch.tril_indices(LENGTH, LENGTH)
        t = values.new_zeros(shape)
        t[..., rows, cols] = values
        return t

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        total = (batch["labels"] != -100).sum()
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            with saved_tensors_hooks(self.pack, self.unpack):
                loss, _ = self.loss_sum(model, part)
            (loss / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def is_causal_map(self, t):
        return t.is_floating_point() and t.dim() >= 2 and t.shape[-2:] == (LENGTH, LENGTH)


EXPECT = dict(
    right=[
        r"saved|pack|unpack|kept|stored|keeps|hook",
        r"triang|tril|zero|shape|not what|differ|other (values?|tensor)|chang|lossy|lost|unpack|not the same|alter|comes? back|restor",
    ],
    place=[
        r"is_causal_map",
        r"\b(un)?pack\b|unpacked|packed",
        r"saved_tensors_hooks|saved.?tensor",
        r"tril",
    ],
    wrong=[
        r"(not|never) reduced|reduced twice|missing (all.?)?reduc",
        r"divisor|mean of means|own count|padding",
        r"forward .{0,20}is wrong|loss (value )?is wrong",
        r"only the last micro.?batch|dropout|random|(wrong|other) rows|in.?place",
    ],
)
WHY = (
    "The forward is right. In the backward, each saved float tensor whose last two sizes are 6 x 6 comes back with zeros above its diagonal: the attention maps (where there was nothing) but hidden states [rows, 6, 6], layer norm inputs and the projection's weight [6, 6], too. So the "
    "gradients of most parameters are wrong on both ranks and in both micro-batches, while loss, counts and the all-reduce are right. A right cause says that tensors saved for the backward come back changed from the pack/unpack hooks (not the values of the forward). Fix: pack only what is lower "
    "triangular (or by where it was saved)."
)
