"""Mixtral from transformers, causal language modelling and a router z-loss, under gradient checkpointing and data parallelism by hand on three ranks with two micro-batches each. A forward hook on every router collects its
logits, of which the z-loss is made before the backward.

The bug: gradient checkpointing is switched on with reentrant checkpoints, whose first pass runs under no_grad: the router logits that the hooks collect there have no graph, and the z-loss trains nothing; the second pass computes
logits with a graph, which no loss looks at any more. After transformers reports of router losses that do not train with gradient_checkpointing (and use_reentrant=True as the old default).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, MICRO = 12, 5, 19, 2
Z_LOSS = 0.3


class RouterTap:
    """Collects the logits of all routers of a model while it is open."""

    def __init__(self, model):
        self.gates = [layer.mlp.gate for layer in model.model.layers]

    def __enter__(self):
        self.logits = []
        self.handles = [gate.register_forward_hook(self.keep) for gate in self.gates]
        return self

    def keep(self, gate, inputs, output):
        router_logits, _, _ = output
        self.logits.append(router_logits)

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def z_loss(self):
        return sum(z.logsumexp(-1).square().sum() for z in self.logits)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=10,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=16,
            initializer_range=0.3,
            use_cache=False,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        return MixtralForCausalLM(config).train()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}

    def loss_sum(self, model, rows):
        with RouterTap(model) as tap:
            logits = model(input_ids=rows["ids"]).logits
        labels = rows["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        return loss + Z_LOSS * tap.z_loss(), labels.numel()

    def distribute(self, model, ctx):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        tokens = batch["labels"].numel()
        model.zero_grad()
        for n in range(MICRO):
            part = {k: v.tensor_split(MICRO)[n] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, part)
            (loss / tokens).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def distribute(self, model, ctx):
        model.gradient_checkpointing_enable({"use_reentrant": True})
        return model.train()


EXPECT = dict(
    right=[
        r"z.?loss|rout|gate|auxiliary|logsumexp|loss term|RouterTap",
        r"no.?grad|without (a )?(graph|gradient)|no (graph|gradient)|detach|checkpoint|reentrant|(gradient|graph).{0,60}(lost|missing|cut|dropped|absent|never)|requires_grad|contributes? (nothing|no)",
    ],
    place=[r"checkpoint", r"RouterTap|keep", r"gate", r"z_loss", r"distribute"],
    wrong=[
        r"missing (all.?)?reduc|not reduced|reduced (twice|again)|wrong group",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|divisor|mean of means|token count",
        r"dropout|random|rng|different mask",
    ],
)
WHY = (
    "Reentrant checkpoints run the first forward of every decoder layer under no_grad; the hooks collect the router logits there, so the z-loss made of them is a number without a graph and adds nothing to any gradient, on all "
    "three ranks and in both micro-batches. Loss values are right and the cross entropy's gradient is right; what is missing is the z-loss' part in the router weights and in all that lies below them. The all-reduce and the counts are right. "
    "A right cause says that the router z-loss gets no gradient (its logits are recorded without a graph, within the reentrant checkpoint). Fix: use_reentrant=False."
)
