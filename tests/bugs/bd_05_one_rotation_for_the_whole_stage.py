"""A tiny Gemma 3 text model (five layers, three with a sliding window and two with full attention, each kind with its own rotary base) in a pipeline of two stages, layers 0-2 and 3-4, three micro-batches (GPipe). A stage walks through its layers
by hand, so it makes masks and rotary tables itself.

The bug: a stage makes one rotary table, for the kind of its first layer, and hands it to all of its layers; the masks are made per kind. Layers 2 and 4, full attention, rotate with the base of the sliding layers. After reports on Gemma 3's two
rotary bases in ports of the model (tenstorrent/tt-metal issue 22809, NVIDIA/TensorRT-Model-Connect PR 1304).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
VOCABULARY, TOKENS, WIDTH, WINDOW, ROWS = 11, 8, 8, 3, 8
STAGES = [(0, 3), (3, 5)]
TURNS = [(0, 3), (3, 5), (5, 8)]
NEAR, FAR = "sliding_attention", "full_attention"


def token_loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def masks(x):
    ago = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    low = torch.finfo(x.dtype).min
    full = x.new_zeros(1, 1, TOKENS, TOKENS).masked_fill(ago < 0, low)
    return {FAR: full, NEAR: full.masked_fill(ago >= WINDOW, low)}


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = Gemma3TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=10,
            num_hidden_layers=5,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            query_pre_attn_scalar=8,
            max_position_embeddings=TOKENS,
            sliding_window=WINDOW,
            layer_types=[NEAR, NEAR, FAR, NEAR, FAR],
            rope_parameters={
                NEAR: {"rope_type": "default", "rope_theta": 20.0},
                FAR: {"rope_type": "default", "rope_theta": 4000.0},
            },
            initializer_range=0.5,
            tie_word_embeddings=False,
            use_cache=False,
        )
        config._attn_implementation = "eager"
        return Gemma3ForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=g)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        return token_loss(logits, rows["ids"]), len(rows["ids"]) * (TOKENS - 1)

    def distribute(self, model, ctx):
        low, high = STAGES[ctx.rank]
        for n in range(len(model.model.layers)):
            if not low <= n < high:
                model.model.layers[n] = torch.nn.Identity()
        if ctx.rank == 0:
            model.model.norm = model.lm_head = None
        else:
            model.model.embed_tokens = None
        return model

    def tables(self, core, x, kinds):
        places = torch.arange(TOKENS)[None]
        made = {kind: core.rotary_emb(x, places, kind) for kind in set(kinds)}
        return [made[kind] for kind in kinds]

    def walk(self, core, x, low, high):
        kinds, mask = core.config.layer_types[low:high], masks(x)
        tables = self.tables(core, x, kinds)
        for layer, kind, table in zip(core.layers[low:high], kinds, tables, strict=True):
            x = layer(x, attention_mask=mask[kind], position_embeddings=table)
        return x

    def step(self, model, batch, ctx):
        core, (low, high) = model.model, STAGES[ctx.rank]
        peer = dist.get_process_group_ranks(ctx.group("pp"))[1 - ctx.rank]
        dtype = next(model.parameters()).dtype
        kept = []
        for first, last in TURNS:
            ids = batch["ids"][first:last]
            if ctx.rank == 0:
                x = self.walk(core, core.embed_tokens(ids), low, high)
                dist.send(x.detach().contiguous(), peer)
                kept.append((x, x))
            else:
                x = torch.empty(len(ids), TOKENS, WIDTH, dtype=dtype)
                dist.recv(x, peer)
                logits = model.lm_head(core.norm(self.walk(core, x.requires_grad_(), low, high)))
                kept.append((x, token_loss(logits, ids) / (ROWS * (TOKENS - 1))))
        for x, y in kept:
            if ctx.rank == 0:
                grad = torch.empty_like(x)
                dist.recv(grad, peer)
                y.backward(grad)
            else:
                y.backward()
                dist.send(x.grad.contiguous(), peer)


class Buggy(Clean):
    def tables(self, core, x, kinds):
        places = torch.arange(TOKENS)[None]
        return [core.rotary_emb(x, places, kinds[0])] * len(kinds)


EXPECT = dict(
    right=[
        r"(?i)rotary|rope|position|attention|self_attn|layers?\.?\s?(2|4)|layer_type|frequenc",
        r"(?i)forward|other (input|argument|value|table|base)|wrong (input|argument|value|table|base|setting|position)|base|theta|receives|is given|angle|handed|setting|position",
    ],
    place=[r"(?i)layers?[.\[ ](2|4)|rotary|rope|position_embeddings|self_attn|attention"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|from micro.?batch|state left|other micro.?batch",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)backward of .{0,30} is wrong|wrong backward|backward formula|adjoint|detach",
        r"(?i)mask (is|are) wrong|wrong mask|labels? .{0,20}(is|are) wrong|recomput|dropout|layers?\.[013]\b.{0,20}(goes wrong first|is the first)",
    ],
)
WHY = (
    "Each stage makes one rotary table of its first layer's kind (sliding_attention, base 20) and hands it to all its layers. Layer 2 (the last of stage 0, rank 0) and layer 4 (the last of stage 1, rank 1) are full_attention and need the "
    "table of base 4000. So the queries and keys of these two layers are rotated by wrong angles, in all micro-batches and rows; the forward goes wrong at the attention of layer 2 on rank 0 (by its argument position_embeddings) and again "
    "in layer 4 on rank 1. Layers 0, 1, 3, the masks, the sends, the divisor 56 are right; all gradients are wrong. Fix: a table for each kind of layer, chosen by layer_types."
)
