"""Pretraining of Mixtral (transformers, its routers replaced by an own class as patched training repositories do) under FSDP2 on three ranks, sum of gradients, two micro-batches each. To the loss of the next token comes the z-loss of the routers (Zoph et al. 2022, "ST-MoE"): the square of the logsumexp of a router's logits, over all tokens
and layers, collected with forward hooks on the routers.

The bug: the router overwrites `router_logits` by their softmax before it picks the experts, and returns that. The z-loss is then taken of probabilities. Origin: huggingface/transformers issue 45120 ("Double softmax in MoE router load-balancing loss": Mixtral, Qwen2-MoE, Qwen3-MoE and others returned probabilities as router_logits), and the patched copies
of these routers.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, MICRO, LAYERS, WEIGHT = 11, 6, 29, 2, 2, 0.1


class Router(MixtralTopKRouter):
    overwrite = False

    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states.flatten(0, -2), self.weight)
        probs = router_logits.softmax(-1)
        if self.overwrite:
            router_logits = probs
        top, chosen = probs.topk(self.top_k, dim=-1)
        return router_logits, top / top.sum(-1, keepdim=True), chosen


def keep(module, args, output):
    module.kept = output[0]


class Clean:
    overwrite = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = MixtralForCausalLM(
            MixtralConfig(
                vocab_size=WORDS,
                hidden_size=12,
                intermediate_size=16,
                num_hidden_layers=LAYERS,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=4,
                num_local_experts=5,
                num_experts_per_tok=2,
                max_position_embeddings=16,
                initializer_range=0.4,
                attn_implementation="eager",
                experts_implementation="eager",
            )
        )
        for layer in model.model.layers:
            layer.mlp.gate.__class__ = Router
            layer.mlp.gate.register_forward_hook(keep)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"text": torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)}

    def loss_sum(self, model, rows):
        text = rows["text"]
        logits = model(input_ids=text[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
        routers = [m for m in model.modules() if isinstance(m, Router)]
        z = sum(r.kept.logsumexp(-1).square().sum() for r in routers)
        for r in routers:
            r.kept = None
        return loss + WEIGHT * z / LAYERS, text[:, 1:].numel()

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            layer.mlp.gate.overwrite = self.overwrite
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = batch["text"].tensor_split(ctx.world_size)[ctx.rank]
        count = torch.tensor(mine[:, 1:].numel())
        dist.all_reduce(count, group=ctx.group("dp"))
        for m in range(MICRO):
            model.set_requires_gradient_sync(m == MICRO - 1)
            loss, _ = self.loss_sum(model, {"text": mine.tensor_split(MICRO)[m]})
            (loss / count).backward()


class Buggy(Clean):
    overwrite = True


EXPECT = dict(
    right=[
        r"(?i)router|gate\b|z.?loss|auxiliary|term|logits",
        r"(?i)softmax|prob|logits|gate|router|term|auxiliary|z.?loss|output",
    ],
    place=[r"(?i)gate\b|router|z.?loss|auxiliary|second term|term of the loss|mlp"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)goes wrong in .{0,40}(self_attn|embed|norm|experts)|first wrong .{0,40}(self_attn|embed|norm|experts)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their|the) own|number of (rows|tokens)|wrong normali[sz]er",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(labels?|targets?|masks?) (is|are) (wrong|other|shifted)",
        r"(?i)shard(ed|s)? (wrong|missing)|own shard",
        r"(?i)experts? (chosen|selected) (is|are) (wrong|other)",
    ],
)
WHY = (
    "The routers return the softmax of their logits in place of the logits (first output), so the z-loss is the square of the logsumexp of probabilities. The weights and the choice of experts come from the same softmax and are right, and so are the hidden states, the logits of the model and the cross entropy; only the first output of model.layers.*.mlp.gate is wrong, "
    "and with it the z-loss term and its gradient. Wrong gradients: the weights of both gates most directly, and everything below a gate (attention, norms, experts of layer 0, embeddings), for the z-loss goes back through the hidden states. Right: what lies above the last gate: the experts of layer 1, the final norm, lm_head. The same on all ranks, in every micro-batch. "
    "Divisors, reduction, accumulation are right. Fix: keep the softmax in a variable of its own and return the logits."
)
