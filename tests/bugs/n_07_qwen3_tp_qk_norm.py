"""Qwen3 under DTensor tensor parallelism (Colwise/Rowwise by parallelize_module) and data parallelism of two. q_norm and k_norm act on each
head, so their replicated weights see only the own heads of a tensor rank. After transformers' tensor-parallel plans for Qwen3, where these
norms got "replicated_with_grad_allreduce".
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCABULARY = 7, 9, 41


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=6,
                intermediate_size=22,
                max_position_embeddings=16,
                use_cache=False,
                tie_word_embeddings=False,
                initializer_range=0.2,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "input_ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        logits, labels = model(input_ids=rows["input_ids"]).logits, rows["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        for i in range(len(model.model.layers)):
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                plan[f"model.layers.{i}.{name}"] = ColwiseParallel()
            for name in ("mlp.gate_proj", "mlp.up_proj"):
                plan[f"model.layers.{i}.{name}"] = ColwiseParallel()
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                plan[f"model.layers.{i}.{name}"] = RowwiseParallel()
        return parallelize_module(model, ctx.mesh["tp"], plan)

    def reduce_over_tp(self, model, ctx):
        for name, param in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                dist.all_reduce(param.grad, group=ctx.group("tp"))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / (batch["labels"] != -100).sum()).backward()
        self.reduce_over_tp(model, ctx)
        for param in model.parameters():
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    def reduce_over_tp(self, model, ctx):
        pass


EXPECT = dict(
    right=[
        r"\btp\b|tensor.?parallel|tensor ranks?",
        r"(not|never|n't|no|missing|without|lacks?|un|skip\w*|omit\w*)[ -]?.{0,50}(reduc|summed|sum\b|added|combin|synchron)|partial|"
        r"(own|local) (part|share|heads|contribution|gradient|shard)|only (its|their|the) own",
    ],
    place=[r"q_norm", r"k_norm"],
    wrong=[
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(own|local|wrong) (count|denominator|divisor)",
        r"(not|never) (been )?(all.?)?(reduced|summed) (over|across|in|along) (the )?\W?(dp|data)",
        r"[qkvo]_proj\S* (is|are|has|have|was|were) (a )?(wrong|missing|partial)",
        r"(input_layernorm|post_attention_layernorm|embed_tokens)\S* (is|are|has|have) (a )?(wrong|missing|partial)",
    ],
)
WHY = (
    "q_norm.weight and k_norm.weight are replicated over tp, but each tensor rank applies them only to its own heads; their gradients are "
    "not summed over tp, so each tensor rank keeps the part of its own heads (the ranks differ, their sum is right). All other gradients are right."
)
