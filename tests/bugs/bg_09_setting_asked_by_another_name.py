"""A tiny GPTNeoXForCausalLM of transformers as a pipeline of two stages (layers 0 and 1, layer 2 with norm and head), four micro-batches of uneven size, all forwards before all backwards. The last stage runs the library's layers; the first one,
which holds all micro-batches at once, checkpoints attention and feed-forward of each layer apart and puts the layer together itself. The divisor is the number of predicted tokens.

The bug: the hand-made layer asks the config for the residual's kind by a name that it does not have and gets the default, one branch after the other; the model's branches are parallel. After TransformerLensOrg/TransformerLens issue 1644
(GPTNeoX bridge ignores use_parallel_residual) and deepspeedai/DeepSpeed PR 2446.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
WORDS, TOKENS, WIDTH, ROWS = 11, 7, 8, 9
PARTS = [(0, 3), (3, 4), (4, 6), (6, 9)]
LENGTHS = [7, 5, 6, 7, 3, 7, 4, 7, 2]


def token_loss(logits, rows):
    place = torch.arange(1, TOKENS)
    target = rows["ids"][:, 1:].masked_fill(place >= rows["length"][:, None], -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten(), reduction="sum")


class Clean:
    setting = "use_parallel_residual"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPTNeoXConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=12,
            num_hidden_layers=3,
            num_attention_heads=2,
            rotary_pct=0.5,
            max_position_embeddings=TOKENS,
            initializer_range=0.5,
            use_parallel_residual=True,
            tie_word_embeddings=False,
        )
        config._attn_implementation = "eager"
        return GPTNeoXForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, TOKENS), generator=g)
        return {"ids": ids, "length": torch.tensor(LENGTHS)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        return token_loss(logits, rows), int((rows["length"] - 1).sum())

    def distribute(self, model, ctx):
        trunk = model.gpt_neox
        if ctx.rank == 0:
            trunk.layers[2] = trunk.final_layer_norm = model.lm_head = nn.Identity()
        else:
            trunk.embed_in = trunk.layers[0] = trunk.layers[1] = nn.Identity()
        return model

    def apart(self, layer, x, **extra):
        def look(x):
            return layer.attention(layer.input_layernorm(x), **extra)[0]

        def think(x):
            return layer.mlp(layer.post_attention_layernorm(x))

        seen = checkpoint(look, x, use_reentrant=False)
        parallel = getattr(layer.attention.config, self.setting, False)
        thought = checkpoint(think, x if parallel else x + seen, use_reentrant=False)
        return x + seen + thought

    def run(self, model, x, stage):
        trunk, places = model.gpt_neox, torch.arange(TOKENS)[None]
        future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        extra = {
            "attention_mask": torch.zeros(1, 1, TOKENS, TOKENS, dtype=x.dtype).masked_fill(
                future, torch.finfo(x.dtype).min
            ),
            "position_embeddings": trunk.rotary_emb(x, position_ids=places),
        }
        if stage == 0:
            for layer in trunk.layers[:2]:
                x = self.apart(layer, x, **extra)
            return x
        return model.lm_head(trunk.final_layer_norm(trunk.layers[2](x, **extra)))

    def step(self, model, batch, ctx):
        count = int((batch["length"] - 1).sum())
        parts = [{k: v[low:high] for k, v in batch.items()} for low, high in PARTS]
        if ctx.rank == 0:
            made = []
            for rows in parts:
                x = self.run(model, model.gpt_neox.embed_in(rows["ids"]), 0)
                dist.send(x.detach().contiguous(), 1)
                made.append(x)
            for x in made:
                grad = torch.empty_like(x)
                dist.recv(grad, 1)
                x.backward(grad)
            return
        came, losses = [], []
        dtype = model.lm_head.weight.dtype
        for rows in parts:
            x = torch.empty(len(rows["ids"]), TOKENS, WIDTH, dtype=dtype)
            dist.recv(x, 0)
            came.append(x.requires_grad_())
            losses.append(token_loss(self.run(model, x, 1), rows) / count)
        for x, loss in zip(came, losses, strict=True):
            loss.backward()
            dist.send(x.grad, 0)


class Buggy(Clean):
    setting = "parallel_residual"


EXPECT = dict(
    right=[
        r"(?i)layers?\.?\s?(0|1)|post_attention_layernorm|mlp|stage 0|first stage|rank 0",
        r"(?i)forward|input|residual|value|computes",
    ],
    place=[r"(?i)post_attention_layernorm|layers?\.?\s?0|\bapart\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|never (sent|summed)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (first|last) micro.?batch|other micro.?batch",
        r"(?i)layers\.2(\.\w+)* (goes|is) first wrong|(?<!not )attention (goes|is) first wrong",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|recomput\w* (gives|has|uses|makes) (an)?other|detached",
        r"(?i)(?<!not )the forward is right|wrong backward",
    ],
)
WHY = (
    "`apart` (stage 0, rank 0, layers 0 and 1) reads the attribute parallel_residual of the config, which does not exist (it is use_parallel_residual, True), so the default False makes the layer sequential: post_attention_layernorm and mlp get x + "
    "attention(x) and not x. The forward goes wrong first in layers.0 at the input of post_attention_layernorm (layers.0.attention and input_layernorm are right), in all micro-batches and rows, and everything after it, layer 2 and the head on rank "
    "1, gets wrong inputs. All parameters' gradients are wrong. Layer 2 itself, the pipeline's sends, checkpointing (it recomputes what it computed), labels, divisor are right. Fix: the right name."
)
