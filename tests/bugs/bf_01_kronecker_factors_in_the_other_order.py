"""Fine-tuning a tiny LlamaForCausalLM with LoKr of peft (q_proj and down_proj of both layers) under DDP on two ranks, three and two micro-batches of odd size (no_sync before the last). For training the adapted layers do not build the
Kronecker product: the input is laid out as a small matrix that is multiplied from both sides. Divisor: all predicted tokens of both ranks.

The bug: the input is laid out as (columns of w2) x (columns of w1) and the result as (rows of w2) x (rows of w1): that is the product w2 (x) w1, not peft's w1 (x) w2. Shapes agree either way. After cornellius-gp/gpytorch PR 427
(Correct order of Kronecker Product).
"""

import contextlib
import types

import torch
from peft import LoKrConfig, get_peft_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TOKENS, ROWS = 13, 6, 9
PARTS = [[(0, 2), (2, 3), (3, 6)], [(6, 7), (7, 9)]]


def from_both_sides(layer, big_first):
    """Forward of an adapted linear layer that never builds the large update."""

    def forward(self, x, *args, **kwargs):
        name = self.active_adapters[0]
        w1 = self.lokr_w1[name]
        if name in self.lokr_w2:
            w2 = self.lokr_w2[name]
        else:
            w2 = self.lokr_w2_a[name] @ self.lokr_w2_b[name]
        if big_first:
            grid = x.unflatten(-1, (w2.shape[1], w1.shape[1]))
            update = w2 @ grid @ w1.T
        else:
            grid = x.unflatten(-1, (w1.shape[1], w2.shape[1]))
            update = w1 @ grid @ w2.T
        return self.base_layer(x) + self.scaling[name] * update.flatten(-2)

    layer.forward = types.MethodType(forward, layer)


def text_loss(model, rows):
    logits = model(input_ids=rows["ids"], use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), rows["ids"][:, 1:].flatten(), reduction="sum")


class Clean:
    big_first = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
            initializer_range=0.4,
        )
        config._attn_implementation = "eager"
        lokr = LoKrConfig(r=2, alpha=3, target_modules=["q_proj", "down_proj"], init_weights=False)
        return get_peft_model(LlamaForCausalLM(config), lokr)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g)}

    def loss_sum(self, model, rows):
        return text_loss(model, rows), len(rows["ids"]) * (TOKENS - 1)

    def distribute(self, model, ctx):
        for module in model.modules():
            if hasattr(module, "lokr_w1"):
                from_both_sides(module, self.big_first)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (text_loss(model, rows) * ctx.world_size / (ROWS * (TOKENS - 1))).backward()


class Buggy(Clean):
    big_first = True


EXPECT = dict(
    right=[
        r"(?i)q_proj|down_proj|lokr|adapter",
        r"(?i)forward|output|value|computes|layout|order|kron|transpos|permut",
    ],
    place=[r"(?i)q_proj|down_proj|lokr|from_both_sides|adapter"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)labels? .{0,20}(is|are) wrong|wrong rows",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)forward is right|goes wrong (first |only )?in the backward",
        r"(?i)detach|recomput|dropout",
    ],
)
WHY = (
    "In every adapted layer (q_proj and down_proj of layers 0 and 1; q_proj of layer 0 is the first) the update must be kron(w1, w2) x, i.e. x is laid out as (w1 columns, w2 columns) and the result as (w1 rows, w2 rows). from_both_sides "
    "with big_first lays it out as (w2 columns, w1 columns), the result as (w2 rows, w1 rows): kron(w2, w1) x, a permutation of inputs and outputs of the update. The forward is wrong at these layers, on both ranks, all rows and all "
    "micro-batches, so all adapter gradients (lokr_w1, lokr_w2, lokr_w2_a, lokr_w2_b) are wrong. Base weights are frozen. DDP, no_sync, divisor 45, labels and scaling are right. Fix: unflatten to (w1.shape[1], w2.shape[1]) and w1 @ grid "
    "@ w2.T."
)
