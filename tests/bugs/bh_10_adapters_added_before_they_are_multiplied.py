"""A tiny CLIPTextModel of transformers (random weights) with two LoRA adapters of peft, `style` and `subject`, both active and both trained, under FSDP2 on two ranks with three micro-batches (the gradients are reduced after the last). For
training the adapted projections compute both updates in one pair of products: the down matrices of the adapters, scaled, are stacked, and so are the up matrices. The loss compares the hidden states with those of a teacher, the divisor is the
number of real tokens of both ranks.

The bug: the matrices are added and not stacked, which is possible as both have the same rank; the product then has the cross terms up_style down_subject and up_subject down_style. After huggingface/peft issues 1155 (A (possible) bug in
lora merging method: add_weighted_adapter) and 3004 and pull request 3013 (eliminate cross-terms bug).
"""

import types

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
WORDS, TOKENS, WIDTH = 13, 6, 8
LENGTHS = [6, 4, 5, 3, 6, 2, 5, 6, 4]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 8), (8, 9)]]
NAMES = ["style", "subject"]


def in_one_pair(layer, stacked):
    """The forward of a layer with several adapters, with two small products for all of them."""

    def forward(self, x, *args, **kwargs):
        down = [self.lora_A[n].weight * self.scaling[n] for n in self.active_adapters]
        up = [self.lora_B[n].weight for n in self.active_adapters]
        if stacked:
            down, up = torch.cat(down), torch.cat(up, 1)
        else:
            down, up = sum(down), sum(up)
        return self.get_base_layer()(x) + F.linear(F.linear(x, down), up)

    layer.forward = types.MethodType(forward, layer)


class Clean:
    stacked = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = CLIPTextConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=TOKENS,
            bos_token_id=0,
            eos_token_id=WORDS - 1,
            pad_token_id=1,
            initializer_factor=4.0,
        )
        settings = dict(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        text = CLIPTextModel(config)
        model = get_peft_model(text, LoraConfig(lora_alpha=3, **settings), adapter_name=NAMES[0])
        model.add_adapter(NAMES[1], LoraConfig(lora_alpha=2, **settings))
        model.base_model.set_adapter(NAMES)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(2, WORDS - 1, (len(LENGTHS), TOKENS), generator=g),
            "teacher": torch.randn(len(LENGTHS), TOKENS, WIDTH, generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        hidden = model(input_ids=rows["ids"]).last_hidden_state
        real = torch.arange(TOKENS)[None] < rows["length"][:, None]
        loss = F.smooth_l1_loss(hidden[real], rows["teacher"][real], reduction="sum")
        return loss, int(rows["length"].sum())

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, nn.Module) and hasattr(module, "lora_A"):
                in_one_pair(module, self.stacked)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        tokens, parts = int(batch["length"].sum()), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            rows = {k: v[low:high] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss * ctx.world_size / tokens).backward()


class Buggy(Clean):
    stacked = False


EXPECT = dict(
    right=[
        r"(?i)q_proj|v_proj|lora|adapter|self_attn|in_one_pair",
        r"(?i)forward|argument|other (value|number)|cross|sum|added|stack|weights?|linear",
    ],
    place=[r"(?i)q_proj|v_proj|lora_[AB]|in_one_pair|adapter|down|\bup\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|too (early|late)\b",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(?i)only (on )?rank [01]\b|other rows|wrong rows|backward formula",
        r"(?i)(embeddings|layer_norm1|k_proj|out_proj|mlp).{0,25}forward.{0,15}goes wrong first|teacher.{0,20}(is|are) wrong",
    ],
)
WHY = (
    "In every adapted layer (q_proj and v_proj of layers 0 and 1) the update must be B_style A_style s_style + B_subject A_subject s_subject; in_one_pair with stacked False adds the scaled A's and the B's first, so it is (B_style + B_subject) (s A_style "
    "+ s A_subject) with two cross terms more. The forward goes wrong in q_proj and v_proj of layer 0, whose input is right, on both ranks, in all micro-batches and rows. lora_A and lora_B of all layers get wrong gradients (the two adapters' lora_B "
    "get the same gradient, and lora_A's differ by the scaling only). FSDP2, the delayed reduction, divisor 41 are right. Fix: torch.cat of the A's along their rows and of the B's along their columns."
)
