"""Tensor parallel attention with a norm of queries and keys, one weight for all heads.
After a Megatron-LM report: the q/k norm's gradient is that of the rank's own heads."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, WIDTH, HEADS, VOCAB = 6, 5, 16, 4, 12


class CopyIn(torch.autograd.Function):
    """Identity forward, SUM over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """SUM over the group forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, size = heads, WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(WIDTH, heads * size, bias=False) for _ in range(3)
        )
        self.q_norm, self.k_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.o_proj = nn.Linear(heads * size, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(WIDTH), Attention(heads)


class Model(nn.Module):
    def __init__(self, heads=HEADS):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(heads) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        logits = self.forward(model, rows["ids"], lambda x: x, lambda x: x)
        return self.token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    @staticmethod
    def forward(model, ids, copy_in, sum_out):
        x = model.embed_tokens(ids)
        for layer in model.layers:
            x = x + sum_out(layer.self_attn(copy_in(layer.input_layernorm(x))))
        return model.lm_head(model.norm(x))

    def distribute(self, model, ctx):
        tp, at = ctx.axes["tp"], ctx.coords["tp"]
        local, state = Model(HEADS // tp).to(ctx.dtype), model.state_dict()
        for name in state:
            if "_proj" in name:
                state[name] = state[name].chunk(tp, dim=int("o_proj" in name))[at]
        local.load_state_dict(state)
        return local

    def step(self, model, batch, ctx):
        tp = ctx.group("tp")
        mine = {k: v.chunk(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        logits = self.forward(
            model, mine["ids"], lambda x: CopyIn.apply(x, tp), lambda x: SumOut.apply(x, tp)
        )
        (self.token_loss(logits, mine["labels"]) / count).backward()
        self.reduce_partial_over_heads(model, tp)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))

    def reduce_partial_over_heads(self, model, tp):
        for name, param in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                dist.all_reduce(param.grad, group=tp)


class Buggy(Clean):
    def reduce_partial_over_heads(self, model, tp):
        pass


EXPECT = dict(
    right=[
        r"not (summed|reduced)|never (summed|reduced)|missing.*(reduc|sum)|own (part|share)|partial"
        r"|unreduced|lacks?.*(reduc|sum)|left out",
        r"[qk]_norm",
        r"\btp\b",
    ],
    place=[r"[qk]_norm"],
    wrong=[r"counted twice|repeated", r"averag", r"\bforward (is )?wrong"],
)
WHY = (
    "q_norm and k_norm are replicated over tp but see only the rank's heads; nobody sums their "
    "gradients over tp (over dp they are summed)."
)
