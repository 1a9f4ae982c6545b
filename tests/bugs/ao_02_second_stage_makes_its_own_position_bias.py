"""A transformers T5 encoder in a pipeline of two stages with three micro-batches (all forwards, then all backwards) and uneven rows: the first rank has the embedding and the blocks 0 and 1, the second the blocks 2 and 3, the final norm
and a token head. The first stage sends the hidden states and the relative position bias and receives the gradients of both. At the end the gradients of the stages are summed over the pipe, so that both ranks have them all. Divisor: all
labels.

The bug: the stages hand on only the hidden states. In T5 the bias is learned in the first block alone and shared by the others; a later block that is given none makes zeros (position_bias is None). The blocks 2 and 3 attend without the
bias. After huggingface/transformers #10221 and #13397 (the bias is computed in the first layer and has to be handed to the others).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Stack

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
VOCABULARY, TOKENS, WIDTH, HEADS, CLASSES = 13, 7, 8, 2, 5
PARTS = [(0, 3), (3, 5), (5, 9)]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=4,
            d_ff=12,
            num_layers=4,
            num_heads=HEADS,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=6,
            dropout_rate=0.0,
            use_cache=False,
            attn_implementation="eager",
        )
        self.encoder = T5Stack(config)
        self.head = nn.Linear(WIDTH, CLASSES)
        bias = self.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
        nn.init.normal_(bias.weight, std=1.0)

    def lower(self, ids):
        hidden, bias = self.encoder.embed_tokens(ids), None
        for block in self.encoder.block[:2]:
            hidden, bias = block(hidden, position_bias=bias)[:2]
        return hidden, bias

    def upper(self, hidden, bias):
        for block in self.encoder.block[2:]:
            hidden, bias = block(hidden, position_bias=bias)[:2]
        return self.head(self.encoder.final_layer_norm(hidden))


def tag_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    hands_bias = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tagger()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][1]
        labels = torch.randint(CLASSES, (rows, TOKENS), generator=g)
        labels[torch.rand(rows, TOKENS, generator=g) < 0.3] = -100
        return {"ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g), "labels": labels}

    def loss_sum(self, model, rows):
        logits = model.upper(*model.lower(rows["ids"]))
        return tag_loss(logits, rows["labels"]), int((rows["labels"] != -100).sum())

    def step(self, model, batch, ctx):
        count = int((batch["labels"] != -100).sum())
        names = ["hidden", "bias"] if self.hands_bias else ["hidden"]
        dtype, kept = model.head.weight.dtype, []
        for low, high in PARTS:
            if ctx.rank == 0:
                out = dict(zip(["hidden", "bias"], model.lower(batch["ids"][low:high])))
                for name in names:
                    dist.send(out[name].detach().contiguous(), 1)
                kept.append(out)
            else:
                shape = {"hidden": (high - low, TOKENS, WIDTH), "bias": (1, HEADS, TOKENS, TOKENS)}
                got = {}
                for name in names:
                    got[name] = torch.empty(shape[name], dtype=dtype)
                    dist.recv(got[name], 0)
                    got[name].requires_grad_()
                logits = model.upper(got["hidden"], got.get("bias"))
                kept.append((tag_loss(logits, batch["labels"][low:high]), got))
        for entry in kept:
            if ctx.rank == 1:
                loss, got = entry
                (loss / count).backward()
                for name in names:
                    dist.send(got[name].grad.contiguous(), 0)
            else:
                back = [torch.empty(entry[name].shape, dtype=dtype) for name in names]
                for grad in back:
                    dist.recv(grad, 1)
                torch.autograd.backward([entry[name] for name in names], back)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=ctx.group("pp"))


class Buggy(Clean):
    hands_bias = False


EXPECT = dict(
    right=[
        r"(?i)block(s)?[ .\[]*2|second stage|rank 1|last stage|SelfAttention|attention|position.?bias|upper",
        r"(?i)forward|input|position.?bias|relative",
        r"(?i)wrong|differ|missing|lack|without|not (handed|passed|sent|given|received)|never|other|zero|not (the )?(right|same)",
    ],
    place=[
        r"(?i)block[ .\[]*2|position.?bias|relative_attention_bias|rank 1|second stage|last stage"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|wrong divisor|mean of means",
        r"(?i)divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)rank 0('s)? forward.{0,20}wrong|block[ .\[]*[01]\b.{0,25}forward.{0,10}wrong",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped)|only (in )?(the )?(first|last) micro.?batch",
        r"(?i)buffer .{0,30}(reused|overwritten)|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "Rank 1 (second stage), all micro-batches and rows: block 2 is called with position_bias None, has no relative_attention_bias of its own and makes a bias of zeros, which block 3 gets as well; both attend without the learned "
    "bias. The hidden states received are right; the forward goes wrong in encoder.block.2.layer.0.SelfAttention (its missing input position_bias). Rank 0's forward is right. As a consequence every gradient is wrong: the ones of "
    "rank 1 (blocks 2 and 3, final norm, head) by the wrong forward, those of rank 0 (embedding, blocks 0 and 1) by the wrong gradient that comes back, and encoder.block.0...relative_attention_bias lacks in addition the parts of "
    "blocks 2 and 3. Divisor, micro-batches, transport of the hidden states and the sum over the pipe are right. Fix: send the bias along with the hidden states and its gradient back."
    " (The pattern 'forward is right' in EXPECT means the forward of all ranks as a whole.)"
)
