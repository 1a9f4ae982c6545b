"""transformers' CLIPSeg: a decoder over the hidden states of a frozen CLIP image tower, conditioned
on a prompt vector (FiLM). Rows over dp (2, 3 and 2 of 5 images); on the ranks the frozen tower runs
once for all rows of the rank, its states are kept, and the decoder is trained on them in
micro-batches of two with gradients summed by hand.

Bug: the kept states are those with the numbers in extract_layers; the list of hidden states begins
with the embeddings, so that it should be the number plus one. After the "+1" that the library's own
forward has, and which own loops over cached features leave out.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import CLIPSegConfig, CLIPSegForImageSegmentation

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
IMAGES, SIDE, WIDTH = 5, 8, 6


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 41)
        config = CLIPSegConfig(
            text_config=dict(
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=8,
                vocab_size=20,
                max_position_embeddings=8,
            ),
            vision_config=dict(
                hidden_size=12,
                num_hidden_layers=4,
                num_attention_heads=2,
                intermediate_size=10,
                image_size=SIDE,
                patch_size=4,
            ),
            projection_dim=WIDTH,
            reduce_dim=8,
            extract_layers=[0, 2, 3],
            conditional_layer=0,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=9,
        )
        config._attn_implementation = "eager"
        model = CLIPSegForImageSegmentation(config)
        for name, p in model.named_parameters():
            if "norm" not in name and "layrnorm" not in name:
                nn.init.normal_(p, std=0.25)
        for p in model.clip.parameters():
            p.requires_grad_(False)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 410)
        return {
            "image": torch.randn(IMAGES, 3, SIDE, SIDE, generator=g),
            "prompt": torch.randn(IMAGES, WIDTH, generator=g),
            "mask": (torch.rand(IMAGES, SIDE, SIDE, generator=g) < 0.4).to(
                torch.get_default_dtype()
            ),
        }

    def summed(self, logits, mask):
        return F.binary_cross_entropy_with_logits(logits, mask.to(logits.dtype), reduction="sum")

    def loss_sum(self, model, rows):
        out = model(pixel_values=rows["image"], conditional_embeddings=rows["prompt"])
        return self.summed(out.logits, rows["mask"]), rows["mask"].numel()

    def states(self, model, image):
        with torch.no_grad():
            out = model.clip.vision_model(image, output_hidden_states=True)
        return [out.hidden_states[i + 1] for i in model.extract_layers]

    def step(self, model, batch, ctx):
        own = torch.arange(IMAGES).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        kept = self.states(model, batch["image"][own])
        for places in torch.arange(len(own)).split(2):
            features = [state[places] for state in kept]
            logits = model.decoder(features, batch["prompt"][own[places]]).logits
            loss = self.summed(logits, batch["mask"][own[places]])
            (loss / batch["mask"].numel()).backward()
        for p in model.decoder.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def states(self, model, image):
        with torch.no_grad():
            out = model.clip.vision_model(image, output_hidden_states=True)
        return [out.hidden_states[i] for i in model.extract_layers]


EXPECT = dict(
    right=[
        r"hidden.?states?|features?|activations?|layers?|extract_layers|states",
        r"off.by.one|\+\s*1|plus one|shift|earlier|one (layer|block) (too|early|before)|previous|"
        r"wrong (layer|index|state)|index|instead of|embedding",
        r"extract_layers|hidden_states|\bstates\b|tower|vision|clip|encoder",
    ],
    place=[r"\bstates\b", r"extract_layers", r"hidden_states", r"vision_model"],
    wrong=[
        r"film.{0,40}(wrong|swapped|missing)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"no_grad.{0,40}(wrong|should|cuts|lost)",
        r"(prompt|mask).{0,30}(row|order|index).{0,20}(wrong|mismatch|misalign)",
        r"(micro.?batch|rank).{0,30}mean of means",
        r"revers(ed|al).{0,40}(wrong|missing)",
    ],
)
WHY = """out.hidden_states[0] is the embedding before the first block; the output of block i is
hidden_states[i + 1], which CLIPSeg's own forward takes. Buggy.states takes hidden_states[i]: the
decoder is fed the states one block too early (for 0 the bare embeddings). The decoder itself, loss,
divisor and reduction are right; all decoder gradients are wrong. A right cause says the features
are of the wrong (previous) layer. Fix: hidden_states[i + 1]."""
