"""Multi-token prediction with parallel heads (Gloeckle et al. 2024) on two pools: the trunk (a transformers LlamaModel) on two data ranks with three and two micro-batches, and three head ranks, each with one head (for the next, the second
next and the third next token) and a copy of the common unembedding. A trunk rank sends its hidden states to every head rank, each head runs forward and backward on them and sends the gradient of the hidden states back; the trunk sums these.

The bug: the trunk's backward stands inside the loop over the heads, on the running sum: after head 0 with g0, after head 1 with g0 + g1, after head 2 with g0 + g1 + g2. Since parameter gradients accumulate, the trunk gets 3 g0 + 2 g1 + g2.
It comes from the memory-saving recipe of the paper (detach the hidden states, run the heads one after the other, let d.grad accumulate, walk back through the trunk once), as in ServiceNow/Fast-LLM PR #179 and issue #167, with the last step
indented once too far.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

TOPOLOGY = {"pools": {"trunk": {"axes": {"dp": 2}}, "heads": {"axes": {"head": 3}}}}
LENGTH, WORDS, WIDTH, HEADS = 8, 18, 12, 3
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 7), (7, 8)]]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.silu(self.gate(x)) * self.inner(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            max_position_embeddings=16,
            initializer_range=0.2,
            attn_implementation="eager",
        )
        self.trunk = LlamaModel(config)
        self.heads = nn.ModuleDict({str(k): Head() for k in range(HEADS)})
        self.unembed = nn.Linear(WIDTH, WORDS, bias=False)


def head_loss(head, unembed, hidden, ids, length, ahead):
    """Sum of the cross entropies of the token `ahead` places on, where it is inside the row's length."""
    logits = unembed(head(hidden[:, :-ahead]))
    target = ids[:, ahead:]
    inside = torch.arange(ahead, LENGTH)[None] < length[:, None]
    return F.cross_entropy(
        logits.flatten(0, 1),
        target.masked_fill(~inside, -100).flatten(),
        ignore_index=-100,
        reduction="sum",
    )


def targets(length):
    return sum(int((length - ahead).clamp(min=0).sum()) for ahead in range(1, HEADS + 1))


class Clean:
    after_every_head = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.tensor([8, 5, 7, 6, 8, 4, 8, 6])
        return {"ids": torch.randint(WORDS, (len(length), LENGTH), generator=g), "length": length}

    def loss_sum(self, model, rows):
        hidden = model.trunk(input_ids=rows["ids"], use_cache=False).last_hidden_state
        loss = sum(
            head_loss(
                model.heads[str(k)], model.unembed, hidden, rows["ids"], rows["length"], k + 1
            )
            for k in range(HEADS)
        )
        return loss, targets(rows["length"])

    def distribute(self, model, ctx):
        if ctx.pool == "trunk":
            del model.heads, model.unembed
        else:
            del model.trunk
            for k in range(HEADS):
                if k != ctx.coords["head"]:
                    del model.heads[str(k)]
        return model

    def step(self, model, batch, ctx):
        (self.trunk_step if ctx.pool == "trunk" else self.head_step)(model, batch, ctx)

    def trunk_step(self, model, batch, ctx):
        for low, high in PARTS[ctx.coords["dp"]]:
            hidden = model.trunk(
                input_ids=batch["ids"][low:high], use_cache=False
            ).last_hidden_state
            for head_rank in ctx.pools["heads"]:
                dist.send(hidden.detach().contiguous(), head_rank)
            total = torch.zeros_like(hidden)
            for head_rank in ctx.pools["heads"]:
                part = torch.empty_like(total)
                dist.recv(part, head_rank)
                total += part
                if self.after_every_head:
                    hidden.backward(total, retain_graph=True)
            if not self.after_every_head:
                hidden.backward(total)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))

    def head_step(self, model, batch, ctx):
        k, count = ctx.coords["head"], targets(batch["length"])
        dtype = model.unembed.weight.dtype
        for turn in range(max(len(parts) for parts in PARTS)):
            for source, parts in zip(ctx.pools["trunk"], PARTS):
                if turn >= len(parts):
                    continue
                low, high = parts[turn]
                hidden = torch.empty(high - low, LENGTH, WIDTH, dtype=dtype)
                dist.recv(hidden, source)
                hidden.requires_grad_(True)
                loss = head_loss(
                    model.heads[str(k)],
                    model.unembed,
                    hidden,
                    batch["ids"][low:high],
                    batch["length"][low:high],
                    k + 1,
                )
                (loss / count).backward()
                dist.send(hidden.grad.contiguous(), source)
        dist.all_reduce(model.unembed.weight.grad, group=ctx.group("head"))


class Buggy(Clean):
    after_every_head = True


EXPECT = dict(
    right=[
        r"(?i)trunk",
        r"(?i)head|more than once|repeated|several times|twice|again|three times|3 ?(times|x)|accumulat|running|counted|weight|backward|hidden|gradient (that|which) (comes|arrives|enters)",
        r"(?i)more than once|repeat|several times|twice|again|too often|three times|\b[23] ?(times|x|×)|running|cumulat|accumulated|counted|too (large|much|big)|double|second time|head.{0,60}(weight|share|coefficient|unequal)",
    ],
    place=[r"(?i)trunk"],
    wrong=[
        r"(?i)(heads|unembed)[\w.]* (is|are) wrong|unembed[^.]{0,40}not (been )?(summed|reduced)",
        r"(?i)not (been )?(all.?)?reduced|reduced twice",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|missing (gradient|head)|head [012]'?s? .{0,20}(is|are|was) (lost|missing|dropped)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|counted twice|added again)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)|only (on )?rank [01]\b",
    ],
)
WHY = (
    "All trunk.* parameters (embedding, both layers, final norm) on the trunk ranks 0 and 1 are wrong: in each micro-batch the backward through the trunk runs three times with the running sum of the gradients of the hidden states, so head 0 (next "
    "token) counts three times, head 1 twice, head 2 once. The result is too large (between one and three times) and of another direction, equal on both trunk ranks after the sum. The forward, all losses, the gradients that the head ranks send, "
    "heads.0, heads.1, heads.2 and unembed (on ranks 2, 3, 4) are right, as are the divisor and the reductions. Fix: one hidden.backward(total) after the loop over the heads."
)
