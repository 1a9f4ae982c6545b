"""LoHa adapters (peft LoHaConfig: weight change = (w1a w1b) * (w2a w2b), element by element, times the scaling) on a tiny Llama, DDP on three ranks, two micro-batches each (no_sync for the first), next-token loss over a completion mask,
mean over all completion tokens. The change of the weight is made by an own autograd Function that keeps the four factors and makes the two products anew in the backward, in one buffer, to save memory.

The bug: the backward fills the buffer with grad * (w2a w2b), hands on the gradients of w1a and w1b, and uses the same buffer for w2a and w2b, which need grad * (w1a w1b). A copied line, in the form of the Function HadaWeight of LyCORIS
and peft (PR 956), where the second product is computed in between.
"""

import contextlib
import types

import torch
from peft import LoHaConfig, get_peft_model
from peft.tuners.loha.layer import LoHaLayer
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, LENGTH = 11, 7
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8), (8, 10)]]
PROMPTS = [2, 4, 3, 1, 5, 2, 3, 4, 2, 3]


class ElementwiseProduct(torch.autograd.Function):
    """scaling * (a @ b) * (c @ d); keeps the factors only."""

    @staticmethod
    def forward(ctx, a, b, c, d, scaling, refill):
        ctx.save_for_backward(a, b, c, d)
        ctx.scaling, ctx.refill = scaling, refill
        return (a @ b).mul_(c @ d).mul_(scaling)

    @staticmethod
    def backward(ctx, grad):
        a, b, c, d = ctx.saved_tensors
        grad = grad * ctx.scaling
        buffer = (c @ d).mul_(grad)
        grad_a, grad_b = buffer @ b.T, a.T @ buffer
        if ctx.refill:
            torch.mm(a, b, out=buffer).mul_(grad)
        grad_c, grad_d = buffer @ d.T, c.T @ buffer
        return grad_a, grad_b, grad_c, grad_d, None, None


def delta(self, adapter_name, **_):
    factors = (self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b)
    return ElementwiseProduct.apply(
        *(f[adapter_name] for f in factors), self.scaling[adapter_name], self.refill
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            initializer_range=0.4,
            use_cache=False,
        )
        loha = LoHaConfig(
            r=2, alpha=3, target_modules=["q_proj", "v_proj", "down_proj"], init_weights=False
        )
        self.lm = get_peft_model(LlamaForCausalLM(config), loha)
        for name, p in self.lm.named_parameters():
            if "hada" in name:
                nn.init.normal_(p, std=0.5)

    def forward(self, ids):
        return self.lm(input_ids=ids).logits


def lm_loss(model, rows):
    logits, target = model(rows["ids"])[:, :-1], rows["ids"][:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    return (losses * rows["scored"][:, 1:].flatten()).sum()


class Clean:
    refill = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        prompts = torch.tensor(PROMPTS)
        return {
            "ids": torch.randint(VOCABULARY, (len(PROMPTS), LENGTH), generator=g),
            "scored": torch.arange(LENGTH)[None] >= prompts[:, None],
        }

    def loss_sum(self, model, rows):
        return lm_loss(model, rows), int(rows["scored"].sum())

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, LoHaLayer):
                module.refill = self.refill
                module.get_delta_weight = types.MethodType(delta, module)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int(batch["scored"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (lm_loss(model, rows) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    refill = False


EXPECT = dict(
    right=[
        r"(?i)hada_w2|w2_?a|second (pair|product)|ElementwiseProduct|loha|hada|q_proj|v_proj|down_proj",
        r"(?i)backward|gradient (of|that)|hands? (back|on)|adjoint",
    ],
    place=[r"(?i)hada_w2|ElementwiseProduct|q_proj|v_proj|down_proj"],
    wrong=[
        r"(?i)hada_w1_[ab][^.;]{0,60} (is|are) wrong|all (gradients|parameters) (are )?wrong",
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,30}(wrong|late|early)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|other rows|mask .{0,20}(is )?wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
    ],
)
WHY = (
    "The forward is right on all ranks. In the backward of ElementwiseProduct the buffer is not refilled with grad * (a b) before the gradients of the second pair, so hada_w2_a and hada_w2_b of every adapted module (q_proj, v_proj and "
    "down_proj of both layers) get the gradients for grad * (c d): their direction is wrong, in all rows and micro-batches, equally on all ranks. hada_w1_a and hada_w1_b are right, and so is everything that flows on (the Function gives "
    "no input gradient besides the factors; the base weights are frozen). Divisor (sum of scored tokens), no_sync and DDP's average are right. Fix: compute the first product anew (torch.mm(a, b, out=buffer).mul_(grad)) before grad_c "
    "and grad_d."
)
