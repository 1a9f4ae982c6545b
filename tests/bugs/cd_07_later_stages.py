"""transformers' Llama with eager attention in a pipeline of three stages, two micro-batches
(GPipe order).

The stages after the first call the decoder layers directly, with no mask, counting on is_causal
of the attention module; eager attention applies only the mask it is given, so there every
position sees the whole row. After pipeline wrappers that are right with SDPA or flash attention
and are then run with attn_implementation="eager".
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
BOUNDS, DIM, VOCAB = [0, 2, 3, 4], 12, 23


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(111 + self.seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=DIM,
            intermediate_size=19,
            num_hidden_layers=4,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=16,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.15)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(121 + self.seed)
        return {"ids": torch.randint(VOCAB, (5, 7), generator=g)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits[:, :-1]
        labels = rows["ids"][:, 1:]
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ), labels.numel()

    def distribute(self, model, ctx):
        stage = dist.get_rank(ctx.group("pp"))
        for i in range(BOUNDS[-1]):
            if not BOUNDS[stage] <= i < BOUNDS[stage + 1]:
                model.model.layers[i] = nn.Identity()
        if stage > 0:
            model.model.embed_tokens = nn.Identity()
        if stage < 2:
            model.model.norm = nn.Identity()
            model.lm_head = nn.Identity()
        return model

    def mask(self, h, stage):
        t = h.shape[1]
        return torch.full((t, t), torch.finfo(h.dtype).min, dtype=h.dtype).triu(1)[None, None]

    def run_layers(self, model, h, stage):
        positions = torch.arange(h.shape[1])[None]
        rope = model.model.rotary_emb(h, position_ids=positions)
        for layer in model.model.layers[BOUNDS[stage] : BOUNDS[stage + 1]]:
            h = layer(
                h,
                attention_mask=self.mask(h, stage),
                position_ids=positions,
                position_embeddings=rope,
            )
        return h

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        stage = dist.get_rank(group)
        before, after = (dist.get_global_rank(group, (stage + d) % 3) for d in (-1, 1))
        count = batch["ids"][:, 1:].numel()
        kept = []
        for ids in batch["ids"].tensor_split(2):
            if stage == 0:
                h_in, h = None, model.model.embed_tokens(ids)
            else:
                h = h_in = torch.empty(*ids.shape, DIM, dtype=next(model.parameters()).dtype)
                dist.recv(h_in, before)
                h_in.requires_grad_()
            out = self.run_layers(model, h, stage)
            if stage < 2:
                dist.send(out.detach().contiguous(), after)
            else:
                logits = model.lm_head(model.model.norm(out))[:, :-1]
                out = (
                    F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
                    / count
                )
            kept.append((h_in, out))
        for h_in, out in kept:
            grad = None
            if stage < 2:
                grad = torch.empty_like(out)
                dist.recv(grad, after)
            out.backward(grad)
            if stage > 0:
                dist.send(h_in.grad.contiguous(), before)


class Buggy(Clean):
    def mask(self, h, stage):
        if stage > 0:
            return None  # the attention of a decoder is causal by itself
        return super().mask(h, stage)


EXPECT = {
    "right": [
        (
            r"mask|causal|future|later (tokens|positions)|bidirectional|full attention|"
            r"non-?causal|whole row"
        ),
        (
            r"stages? (1|> ?0|one|two|2|after|other|later)|later stage|second|eager|"
            r"layers? (2|3|\[2|after)|non-?first|not (the )?first|None"
        ),
    ],
    "place": [
        r"def mask",
        r"\bmask\b",
        r"attention_mask",
        r"run_layers",
        r"return None",
        r"self_attn",
    ],
    "wrong": [
        r"position|rotary|rope",
        r"micro.?batch (order|swap|mismatch)|wrong micro.?batch",
        r"norm(al(is|iz)\w+)? (by|over) (the )?(own|local)|count",
        r"(hidden state|activation)s? (gradient )?(is )?detach|gradient (is )?not sent",
        r"upper left|kv heads?|repeat",
    ],
}

WHY = (
    "With eager attention the Llama layer applies just the additive mask passed to it and "
    "ignores is_causal, so attention_mask=None on the stages after the first makes their "
    "attention bidirectional: positions see the future tokens. The forward of layers 2 and 3 "
    "is wrong and with it every gradient, on all stages. Stage 0's own mask, the rotary "
    "positions and the pipeline's exchange are right. A right cause says that the causal mask "
    "is missing (None) in the later stages. Fix: build the causal mask on each stage."
)
