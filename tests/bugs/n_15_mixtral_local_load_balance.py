"""A Mixtral with the load-balancing loss over the global batch, gradients reduced as one flat buffer over three ranks. After the Qwen note
"Demons in the Detail" and Megatron's global-batch aux loss: the share of tokens per expert is taken in the own batch instead.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, EXPERTS, TOP, COEFFICIENT = 8, 6, 25, 4, 2, 0.6


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=14,
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOP,
            max_position_embeddings=16,
            use_cache=False,
            initializer_range=0.3,
            experts_implementation="eager",
        )
        return MixtralForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "input_ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def forward(model, rows):
        """The summed cross entropy; per layer the summed router probabilities and the tokens per expert."""
        out = model(input_ids=rows["input_ids"], output_router_logits=True)
        labels = rows["labels"].flatten()
        valid = labels != -100
        probability, tokens = [], []
        for logits in out.router_logits:
            logits = logits.reshape(-1, EXPERTS)[valid]
            probability.append(logits.softmax(-1).sum(0))
            chosen = F.one_hot(logits.topk(TOP, -1).indices, EXPERTS)
            tokens.append(chosen.sum((0, 1)).to(logits.dtype))
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels, reduction="sum")
        return loss, torch.stack(probability), torch.stack(tokens), valid.sum()

    def loss_sum(self, model, rows):
        loss, probability, tokens, count = self.forward(model, rows)
        balance = EXPERTS * (probability * tokens / count).sum()
        return loss + COEFFICIENT * balance, count

    def share(self, tokens, count, ctx):
        tokens, count = tokens.clone(), count.clone()
        dist.all_reduce(tokens, group=ctx.group("dp"))
        dist.all_reduce(count, group=ctx.group("dp"))
        return tokens / count

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, probability, tokens, count = self.forward(model, mine)
        balance = EXPERTS * (probability * self.share(tokens, count, ctx)).sum()
        total = (batch["labels"] != -100).sum()
        ((loss + COEFFICIENT * balance) / total).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for grad, piece in zip(grads, flat.split([g.numel() for g in grads])):
            grad.copy_(piece.view_as(grad))


class Buggy(Clean):
    def share(self, tokens, count, ctx):
        return tokens / count


EXPECT = dict(
    right=[
        r"aux|balanc|router|gate|expert|load|loss",
        r"own|local|per.?rank|each rank|its rank|count|frequen|share|fraction|statistic|of the (whole|global)|global batch|not (all.?)?reduced|depends on",
    ],
    place=[r"gate", r"router|balanc|aux|expert"],
    wrong=[
        r"lm_head\S* (is|has|was) (a )?(wrong|missing|partial)",
        r"gradients? (is|are|was|were) (not|never) (been )?(all.?)?(reduced|summed)",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"every (param|gradient)\w* (is|are|has) (off|wrong|scaled)",
        r"rows? (is|are|was|were) (missing|dropped|lost)",
        r"micro.?batch",
    ],
)
WHY = (
    "The load-balancing loss uses each rank's own share of tokens per expert instead of that of the global batch, so the gradient entering the "
    "router logits (gate weights, and through the hidden states the layers below) belongs to other coefficients. The cross-entropy part, lm_head, "
    "the last norm and last experts, count and reduction are right."
)
