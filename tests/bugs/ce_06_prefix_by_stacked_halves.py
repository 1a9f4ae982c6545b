"""Prefix tuning together with full tuning of transformers' GPT-2: a small network makes keys and
values of 3 virtual tokens for each of 3 layers. FSDP2 over 2 ranks, 2 micro-batches each.

The keys and values are made once a step; micro-batches read a leaf of them, whose summed
gradient is sent through the prefix network at the end.

The bug: the prefix network's output holds key 0, value 0, key 1, value 1, ... (the order of
peft's PrefixEncoder, which is split by twos). The step's own code takes the first half as the
keys and the second half as the values of all layers. After mix-ups of the two orders of
`past_key_values` (stacked and by layer) in prefix tuning code (P-tuning v2).
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
LAYERS, HEADS, DIM, VIRTUAL, VOCAB, TIME = 3, 2, 10, 3, 17, 6


class PrefixEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(VIRTUAL, 5))
        self.hidden = nn.Linear(5, 7)
        self.out = nn.Linear(7, LAYERS * 2 * DIM)

    def forward(self):
        """(2 * layers, heads, virtual tokens, head dim): key, value of layer 0, of layer 1, ..."""
        flat = self.out(torch.tanh(self.hidden(self.tokens))) * 2
        return flat.view(VIRTUAL, LAYERS * 2, HEADS, DIM // HEADS).permute(1, 2, 0, 3)


class PrefixedGpt2(nn.Module):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=12,
            n_embd=DIM,
            n_layer=LAYERS,
            n_head=HEADS,
            n_inner=13,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
        self.gpt = GPT2LMHeadModel(config)
        self.prefix = PrefixEncoder()


def pairs_of_layers(states):
    return [(states[2 * i], states[2 * i + 1]) for i in range(LAYERS)]


def logits_after_prefix(gpt, tokens, pairs):
    rows = len(tokens)
    cache = DynamicCache()
    for i, (key, value) in enumerate(pairs):
        cache.update(key.expand(rows, -1, -1, -1), value.expand(rows, -1, -1, -1), i)
    mask = torch.ones(rows, VIRTUAL + tokens.shape[1], dtype=torch.long)
    return gpt(input_ids=tokens, attention_mask=mask, use_cache=True, cache=cache).logits


def summed_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 61)
        return PrefixedGpt2()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 62)
        tokens = torch.randint(1, VOCAB, (7, TIME + 1), generator=g)
        return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        logits = logits_after_prefix(model.gpt, rows["tokens"], pairs_of_layers(model.prefix()))
        return summed_loss(logits, rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        fully_shard(model.gpt, mesh=ctx.mesh)
        fully_shard(model.prefix, mesh=ctx.mesh)
        return model

    def keys_and_values(self, states):
        return pairs_of_layers(states)

    def step(self, model, batch, ctx):
        total = batch["labels"].numel()
        lo, hi = [(0, 4), (4, 7)][ctx.rank]
        states = model.prefix()
        leaf = states.detach().requires_grad_()
        for tokens, labels in zip(
            batch["tokens"][lo:hi].split(2), batch["labels"][lo:hi].split(2), strict=True
        ):
            logits = logits_after_prefix(model.gpt, tokens, self.keys_and_values(leaf))
            (summed_loss(logits, labels) * ctx.world_size / total).backward()
        states.backward(leaf.grad)


class Buggy(Clean):
    def keys_and_values(self, states):
        keys, values = states.chunk(2)
        return list(zip(keys, values, strict=True))


EXPECT = dict(
    right=[
        r"prefix|virtual|past|cache",
        r"key",
        r"value",
        (
            r"half|halves|order|interleav|layout|swap|mix|wrong layer|chunk|stacked|alternat|"
            r"mis-?assign|permut|as (the )?(keys|values)"
        ),
    ],
    place=[r"keys_and_values", r"prefix", r"chunk", r"cache|past_key_values"],
    wrong=[
        r"detach|leaf gradient|gradient (of|to) the prefix (is )?(lost|missing|not)",
        r"position(s|_ids)?|mask",
        r"divided|world_size|averag",
        r"tied|wte",
        r"reduced (in|for) (every|each) micro|no_sync|requires_gradient_sync",
    ],
)

WHY = """The prefix states alternate key and value, layer by layer; chunk(2) takes the first three
(key 0, value 0, key 1) for the keys and the last three (value 1, key 2, value 2) for the
values. Only layer 0's key and layer 2's value are where they belong. All gradients are
wrong, since attention to the virtual tokens is another one: in prefix most, in all GPT-2
layers by it. Sharding, scaling and the leaf that collects the micro-batches are right. A
right cause says that keys and values of the prefix are split in halves and not by layer
(interleaved). The fix: states[2 * i] and states[2 * i + 1]."""
