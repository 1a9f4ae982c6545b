"""A SigLIP vision tower on two ranks in front of a Gemma decoder (both of transformers) on three; image features are normalised for Gemma by the square root of its width on the decoder's ranks, and their gradient goes back to the
tower. After PaliGemma / Gemma 3 and the scale of image features among scaled embeddings.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import GemmaConfig, GemmaForCausalLM, SiglipVisionConfig, SiglipVisionModel

TOPOLOGY = {"pools": {"vision": {"axes": {"dp": 2}}, "text": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, IMAGE, PATCH = 10, 6, 29, 12, 6, 3
PATCHES = (IMAGE // PATCH) ** 2
SCALE = WIDTH**-0.5


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=WIDTH,
                intermediate_size=18,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_channels=2,
                image_size=IMAGE,
                patch_size=PATCH,
                attention_dropout=0.0,
                vision_use_head=False,
            )
        )
        self.text = GemmaForCausalLM(
            GemmaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=6,
                intermediate_size=22,
                max_position_embeddings=16,
                use_cache=False,
                initializer_range=0.2,
            )
        )


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Captioner()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "pixels": torch.randn(ROWS, 2, IMAGE, IMAGE, generator=g),
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def features(model, rows):
        return model.vision(pixel_values=rows["pixels"]).last_hidden_state

    @staticmethod
    def text_loss(model, image, rows):
        words = model.text.get_input_embeddings()(rows["ids"])
        logits = model.text(inputs_embeds=torch.cat([image, words], 1)).logits[:, PATCHES:]
        return F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        image = self.features(model, rows) * SCALE
        return self.text_loss(model, image, rows), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        delattr(model, "text" if ctx.pool == "vision" else "vision")
        return model

    def returned(self, received, scaled):
        return received.grad

    def step(self, model, batch, ctx):
        n, i = ctx.axes["dp"], ctx.coords["dp"]
        own = torch.arange(ROWS).tensor_split(n)[i]
        mine = {k: v[own] for k, v in batch.items()}
        every = torch.zeros(ROWS, PATCHES, WIDTH, dtype=ctx.dtype)  # each row from its one rank
        if ctx.pool == "vision":
            features = self.features(model, mine)
            every[own] = features.detach()
        dist.all_reduce(every)
        back = torch.zeros_like(every)
        if ctx.pool == "text":
            received = every[own].requires_grad_()
            scaled = received * SCALE
            scaled.retain_grad()
            loss = self.text_loss(model, scaled, mine)
            (loss / (batch["labels"] != -100).sum()).backward()
            back[own] = self.returned(received, scaled)
        dist.all_reduce(back)
        if ctx.pool == "vision":
            features.backward(back[own])
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def returned(self, received, scaled):
        return scaled.grad


EXPECT = dict(
    right=[
        r"vision|image|tower|encoder|siglip",
        r"3\.46|0\.28[89]|sqrt|square root|scal(e|ing)\b|\btimes\b|multipl|factors? of|too (large|big)",
    ],
    place=[r"vision|between|features|returned|v_10\S*:\d+"],
    wrong=[
        r"text\S* (is|are|has|have) (a )?(wrong|missing)",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(own|local) (count|denominator|divisor)",
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"gradient of other targets|backward of \S*(encoder|layers|embeddings|post_layernorm)\S* is wrong",
    ],
)
WHY = (
    "The decoder's ranks send back the gradient of the scaled features (what goes into Gemma), not that of the features they received; the factor 1/sqrt(12) of the chain rule is missing. "
    "All gradients of the vision tower, on both of its ranks, are sqrt(12) = 3.464 times what they should be; the decoder's gradients, the forward, the divisor and the reductions are right."
)
