"""peft's LoRA with a bias on its second matrix (lora_bias=True, r = 3, alpha = 5) on q_proj and
v_proj of a tiny transformers Whisper; everything else is frozen. Five utterances over dp (2),
micro-batches of two. The ranks run the adapted layers in one product: weight and bias of the base
layer and of the adapter are put together first, then one linear map is applied.

Bug: the put-together bias takes the adapter's bias as it is, while peft multiplies all that comes
out of lora_B, its bias too, by scaling = alpha / r. After fused LoRA paths that were written before
lora_bias came.
"""

import types

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from transformers import WhisperConfig, WhisperForConditionalGeneration

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, MELS, FRAMES, WORDS, WIDTH = 5, 4, 10, 14, 6


def one_product(layer, x, *args, **kwargs):
    a, b, base = layer.lora_A["default"], layer.lora_B["default"], layer.base_layer
    scaling = layer.scaling["default"]
    weight = torch.addmm(base.weight, b.weight, a.weight, alpha=scaling)
    bias = torch.add(base.bias, b.bias, alpha=scaling)
    return F.linear(x, weight, bias)


def one_product_plain_bias(layer, x, *args, **kwargs):
    a, b, base = layer.lora_A["default"], layer.lora_B["default"], layer.base_layer
    scaling = layer.scaling["default"]
    weight = torch.addmm(base.weight, b.weight, a.weight, alpha=scaling)
    return F.linear(x, weight, base.bias + b.bias)


class Clean:
    fused = staticmethod(one_product)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 61)
        config = WhisperConfig(
            vocab_size=WORDS,
            num_mel_bins=MELS,
            d_model=8,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=10,
            decoder_ffn_dim=10,
            max_source_positions=FRAMES // 2,
            max_target_positions=WIDTH,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            init_std=0.3,
            attn_implementation="eager",
        )
        model = get_peft_model(
            WhisperForConditionalGeneration(config),
            LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], lora_bias=True),
        )
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.4)
        return model.eval()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 610)
        text = torch.randint(3, WORDS, (ROWS, WIDTH + 1), generator=g)
        text[:, 0] = 1
        length = torch.randint(3, WIDTH + 2, (ROWS, 1), generator=g)
        label = text[:, 1:].masked_fill(torch.arange(1, WIDTH + 1) >= length, -100)
        return {
            "sound": torch.randn(ROWS, MELS, FRAMES, generator=g),
            "text": text[:, :-1],
            "label": label,
        }

    def loss_sum(self, model, rows):
        logits = model(
            input_features=rows["sound"], decoder_input_ids=rows["text"], use_cache=False
        ).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["label"].flatten(), reduction="sum")
        return loss, (rows["label"] != -100).sum()

    def distribute(self, model, ctx):
        for layer in model.modules():
            if isinstance(layer, LoraLinear):
                layer.forward = types.MethodType(self.fused, layer)
        return model

    def step(self, model, batch, ctx):
        count = (batch["label"] != -100).sum()
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / count).backward()
        for p in model.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    fused = staticmethod(one_product_plain_bias)


EXPECT = dict(
    right=[r"bias", r"scal|alpha|\b0\.6|3/5|1\.66|5/3"],
    place=[
        r"one_product(_plain_bias)?",
        r"lora_B\S*bias",
        r"base\.bias \+ b\.bias",
        r"\bfused\b",
        r"lora_bias",
    ],
    wrong=[
        r"(not|never|twice).{0,20}(all.?)?reduc",
        r"scaling.{0,30}(missing|wrong).{0,30}weight",
        r"label|ignore_index|-100",
        r"dropout",
        r"micro.?batch.{0,30}(mean|weight)",
        r"base (weight|layer).{0,30}(wrong|trained)",
    ],
)
WHY = """peft computes base(x) + (lora_B(lora_A(x))) * scaling, and with lora_bias=True lora_B has a
bias, so that scaling = 5/3 multiplies it too. one_product_plain_bias adds b.bias unscaled: the
outputs of q_proj and v_proj are off by a constant vector (so all gradients are wrong a little) and
the gradient of every lora_B bias lacks the factor 5/3 (it comes at 3/5). Weight, loss, reduction
are right. The fix: base.bias + scaling * b.bias."""
