"""Training a tiny LlamaForCausalLM under hybrid sharding (FSDP2, two replicas of two shards), two micro-batches per rank. For speed the RMS norms of the model are replaced by one fused call (F.rms_norm) when the model is distributed.

The bug: the replacement is made with the small number that the fused norm has by default, 1e-6, not with the one of the configuration, 1e-5. Where the hidden state is small, which it is after the embedding of a model at its initialisation, that is a
difference of some percent. After apache/tvm PR 15856 and NVIDIA/cutlass PR 1112 (hard-coded epsilon in the RMS norm kernel) and meta-pytorch/torchtune PR 29 (norm_eps not propagated everywhere).
"""

import types

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

TOPOLOGY = {"pools": {"train": {"axes": {"replica": 2, "shard": 2}}}}
VOCABULARY, TOKENS, ROWS = 13, 6, 11
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 7), (7, 9)], [(9, 10), (10, 11)]]


def fuse_norm(module, eps=1e-6):
    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, eps)

    module.forward = types.MethodType(forward, module)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=TOKENS,
            rms_norm_eps=1e-5,
            initializer_range=0.01,
        )
        config._attn_implementation = "eager"
        return LlamaForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits[:, :-1]
        ahead = rows["ids"][:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), ahead, reduction="sum"), len(ahead)

    def fuse(self, norm):
        fuse_norm(norm, norm.variance_epsilon)

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):
                self.fuse(module)
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss * ctx.world_size / (ROWS * (TOKENS - 1))).backward()


class Buggy(Clean):
    def fuse(self, norm):
        fuse_norm(norm)


EXPECT = dict(
    right=[r"(?i)norm|epsilon|\beps\b", r"(?i)forward|epsilon|\beps\b|setting|config|output|value"],
    place=[r"(?i)norm|epsilon|\beps\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|reduced over",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|from micro.?batch|state left",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone",
        r"(?i)backward of .{0,30} is wrong while|forward is right|wrong backward formula|detach",
        r"(?i)labels? .{0,20}(is|are) wrong|wrong mask|recomput|dropout|lower precision|dtype",
    ],
)
WHY = (
    "All RMS norms (input_layernorm and post_attention_layernorm of both layers and the final norm) are replaced by F.rms_norm with eps 1e-6, the default of fuse_norm, and the model's configuration says rms_norm_eps = 1e-5. With hidden states of "
    "mean square about 1e-4 the norms' outputs are some percent too large, on all ranks, in all micro-batches and rows. The forward goes wrong at the first norm, layers.0.input_layernorm; all gradients are wrong by a few percent. "
    "Sharding, replication, labels, divisor 55 are right. Fix: fuse_norm(norm, norm.variance_epsilon)."
)
