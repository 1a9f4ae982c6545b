"""FSDP2 on three ranks with initialisation on rank 0: the others build the model on the meta device, make it empty storage (zeros) and receive the state dict of rank 0 by broadcast; then fully_shard (gradients summed, two micro-batches,
sync at the last). The attention has rotary frequencies in a buffer that is not persistent.

The bug: a buffer with persistent=False is not part of the state dict, so that the frequencies stay zero on ranks 1 and 2 and all positions have the angle zero there. As in hiyouga/LlamaFactory PR #10820 (non-persistent buffer sync for
init_on_rank0), NovaSky-AI/SkyRL issue #1709 and the zeros of huggingface/transformers PR #45050.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, WIDTH, HEADS = 6, 10, 8, 2
PARTS = [[(0, 1), (1, 3)], [(3, 5), (5, 6)], [(6, 9), (9, 11)]]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        half = WIDTH // HEADS // 2
        self.register_buffer(
            "inv_freq", 0.8 ** torch.arange(half, dtype=torch.float64), persistent=False
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def turn(self, x):
        angle = torch.arange(x.shape[2])[:, None] * self.inv_freq.to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        o = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = Attention()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.norm(self.attention(self.embed(ids))))


class Clean:
    buffers_too = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        return F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum"), len(logits)

    def distribute(self, model, ctx):
        group = ctx.group("dp")
        if ctx.rank > 0:
            model = model.to("meta").to_empty(device="cpu")
            with torch.no_grad():
                for t in [*model.parameters(), *model.buffers()]:
                    t.zero_()
        loaded = model.state_dict()
        if self.buffers_too:
            loaded.update(model.named_buffers())
        for t in loaded.values():
            dist.broadcast(t.detach(), dist.get_global_rank(group, 0), group=group)
        mesh = DeviceMesh.from_group(group, "cpu")
        for module in (model.attention, model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        return model

    def step(self, model, batch, ctx):
        tokens = batch["labels"].numel()
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / tokens).backward()


class Buggy(Clean):
    buffers_too = False


EXPECT = dict(
    right=[
        r"(?i)attention|inv_freq|rotary|buffer",
        r"(?i)ranks? .{0,8}1|ranks? .{0,8}2|rank 0 .{0,40}(right|alone|only|has)"
        r"|not (on )?rank 0|ranks other than|other ranks|\bbetween ranks|across ranks",
        r"(?i)forward|output|buffer|inv_freq|frequenc|state|value",
        r"(?i)differ|wrong|unlike|not (the )?(same|equal|right)|empty|zero|uninitiali|other"
        r"|deviat|goes wrong",
    ],
    place=[r"(?i)attention|inv_freq|buffer"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)(never|not) (been )?(all.?)?(reduced|summed)|(reduced|summed|counted) (twice"
        r"|again)|requires_gradient_sync.{0,30}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own"
        r"|divide factor .{0,10}wrong",
        r"(?i)goes wrong (first )?(in|at) (embed|norm\b|head)|embed .{0,20}(output"
        r"|forward).{0,10}wrong",
        r"(?i)weights? .{0,20}(differ|are unlike|not the same) .{0,12}(between|on|across)"
        r"|labels? .{0,20}(is|are) wrong",
        r"(?i)on rank 0 .{0,20}(forward|output) .{0,10}wrong|all (three )?ranks .{0,20}forward"
        r"|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "attention.inv_freq is [1, 0.8] on rank 0 and [0, 0] on ranks 1 and 2, where queries and keys are therefore not turned (attention without positions). The forward goes wrong inside `attention` (after qkv, at the input of "
    "attention.out) on ranks 1 and 2, for all their rows (3-5 and 6-10) and micro-batches; norm, head, loss follow, and all gradients are wrong in direction in all shards after the reduce-scatter, since eight of eleven rows are. "
    "Rank 0 (rows 0-2) is right. Parameters are the same on all ranks; embed and attention.norm/qkv have right outputs; sums, divide factor, divisor 66, sync at the last micro-batch are right. Fix: broadcast or recompute the "
    "non-persistent buffers after to_empty."
)
