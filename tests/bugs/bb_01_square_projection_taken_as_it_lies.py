"""Fine-tuning a tiny GPT2LMHeadModel with LoRA of peft (c_attn and both c_proj of two layers) under DDP on three ranks (2, 1 and 3 micro-batches, no_sync before the last). For training the adapted layers run in one product: the base weight
and the low-rank update are put together first. GPT-2's layers are Conv1D, which keep their weight as (in, out), and the update B @ A is (out, in).

The bug: the one-product path turns the update round where its shape is not that of the weight. The attention's own output projection is square, so there the update goes in as it lies, untransposed. After huggingface/peft issue 3531 (DoRA
unmerge corrupts or crashes on fan_in_fan_out layers: a shape error on c_attn, silent on the square c_proj) and lablup/mlxcel issue 925 (make adapter weight fusion Conv1D-layout aware).
"""

import contextlib
import types

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TOKENS, WIDTH = 17, 7, 8
LENGTHS = [7, 5, 6, 4, 7, 3, 6, 7, 5, 4, 7]
PARTS = [[(0, 2), (2, 3)], [(3, 5)], [(5, 7), (7, 8), (8, 11)]]


def stored_as_rows_of_inputs(base, update, by_size):
    if by_size:
        return update.shape != base.weight.shape
    return isinstance(base, Conv1D)


def one_product(layer, by_size):
    """The forward of an adapted layer with a single matrix product."""

    def forward(self, x, *args, **kwargs):
        base, name = self.get_base_layer(), self.active_adapters[0]
        update = self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]
        if stored_as_rows_of_inputs(base, update, by_size):
            update = update.T
        return x @ (base.weight + update) + base.bias

    layer.forward = types.MethodType(forward, layer)


def text_loss(model, rows):
    place = torch.arange(TOKENS)
    inside = place[None] < rows["length"][:, None]
    out = model(input_ids=rows["ids"], attention_mask=inside.long(), use_cache=False)
    target = rows["ids"].masked_fill(~inside, -100)[:, 1:]
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), target.flatten(), reduction="sum")


class Clean:
    by_size = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            n_embd=WIDTH,
            n_layer=2,
            n_head=2,
            n_inner=12,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.4,
        )
        config._attn_implementation = "eager"
        lora = LoraConfig(
            r=3,
            lora_alpha=5,
            target_modules=["c_attn", "c_proj"],
            fan_in_fan_out=True,
            init_lora_weights=False,
        )
        return get_peft_model(GPT2LMHeadModel(config), lora)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(LENGTHS), TOKENS), generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        return text_loss(model, rows), int((rows["length"] - 1).sum())

    def distribute(self, model, ctx):
        for module in model.modules():
            if hasattr(module, "lora_A") and hasattr(module, "get_base_layer"):
                one_product(module, self.by_size)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        words = int((batch["length"] - 1).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (text_loss(model, rows) * ctx.world_size / words).backward()


class Buggy(Clean):
    by_size = True


EXPECT = dict(
    right=[
        r"(?i)attn(\.|/|\w|\[)*\.?c_proj|c_proj|one_product|update|lora_[AB]",
        r"(?i)transpos|turned|\.T\b|layout|orientation|other places|permut|another (weight|matrix)|"
        r"other weights?|weights? (that|which) (is|are) (not|wrong)|"
        r"forward (is wrong|goes wrong)|goes wrong in|first wrong|wrong (in|at|from)|nowhere|"
        r"gives? what|other formula|another formula",
    ],
    place=[r"(?i)c_proj|one_product|update|bb_01\w*\.py:\d+"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|no_sync.{0,40}(wrong|missing|too)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)c_attn(\.\w+)* .{0,20}(computes|goes wrong|is the first)|mlp\.c_proj .{0,20}(is the first|goes wrong)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)labels? .{0,20}(is|are) wrong|wrong rows|attention.?mask is (wrong|missing)",
    ],
)
WHY = (
    "In transformer.h.0.attn.c_proj and transformer.h.1.attn.c_proj (Conv1D, 8 x 8) the low-rank update lora_B @ lora_A * scaling is added to the weight without being transposed, as the one-product path decides by the shapes "
    "(update.shape != weight.shape) and these are equal for a square layer. Conv1D keeps (in, out), so the update has to be transposed there too. c_attn (8 x 24) and mlp.c_proj (12 x 8) are not square and right. The forward goes wrong at "
    "h.0.attn.c_proj, on all ranks, rows and micro-batches; everything that trains (all lora_A and lora_B) has a wrong gradient. DDP, no_sync, divisor, labels are right. Fix: decide by the kind of the layer (Conv1D / fan_in_fan_out), not "
    "by shape."
)
