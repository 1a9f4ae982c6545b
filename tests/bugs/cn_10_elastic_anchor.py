"""transformers' Mamba (tiny) in continual learning: cross entropy plus an elastic anchor (EWC),
lambda/2 sum F (w - w0)^2 with the Fisher values F and the weights w0 of the task before. FSDP2 over
dp (3; 3, 2 and 2 of 7 rows, two micro-batches), matrices are cut along their columns
(shard_placement_fn gives Shard(1) where it divides), all else along dim 0. The gradient of the
anchor is added to the shards by hand after the reduction.

Bug: F and w0 are cut as flat memory, `flatten().tensor_split(n)[rank].view_as(shard)`. That is
right for Shard(0), and of the right size for Shard(1), but of other elements. After optimizers and
regularisers with flat sharded state that meet shard_placement_fn.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import MambaConfig, MambaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, T, ROWS, STRENGTH = 11, 5, 7, 0.3


class Anchored(nn.Module):
    def __init__(self, lm):
        super().__init__()
        self.lm = lm
        for name, p in lm.named_parameters():
            w0 = p.detach() + 0.3 * torch.randn_like(p)
            self.register_buffer("anchor_" + name.replace(".", "_"), w0)
            self.register_buffer("fisher_" + name.replace(".", "_"), torch.rand_like(p))

    def terms(self):
        for name, p in self.lm.named_parameters():
            key = name.replace(".", "_")
            yield p, getattr(self, "anchor_" + key), getattr(self, "fisher_" + key)

    def forward(self, ids):
        return self.lm(input_ids=ids, use_cache=False).logits


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 101)
        config = MambaConfig(
            vocab_size=WORDS,
            hidden_size=6,
            state_size=3,
            expand=2,
            conv_kernel=3,
            time_step_rank=3,
            num_hidden_layers=1,
            initializer_range=0.4,
            residual_in_fp32=False,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        return Anchored(MambaForCausalLM(config))

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1010)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        length = torch.tensor([5, 2, 4, 3, 5, 3, 1])
        wanted = ids[:, 1:].masked_fill(torch.arange(T) >= length[:, None], -100)
        return {"ids": ids[:, :-1], "wanted": wanted}

    def word_loss(self, model, rows):
        logits = model(rows["ids"]).transpose(1, 2)
        return F.cross_entropy(logits, rows["wanted"], reduction="sum")

    def loss_sum(self, model, rows):
        count = (rows["wanted"] != -100).sum()
        anchor = sum((f * (p - w0).square()).sum() for p, w0, f in model.terms())
        return self.word_loss(model, rows) + count * STRENGTH / 2 * anchor, int(count)

    def distribute(self, model, ctx):
        n = ctx.axes["dp"]

        def columns(p):
            return Shard(1) if p.ndim == 2 and p.shape[1] % n == 0 else Shard(0)

        for module in [*model.lm.backbone.layers, model]:
            fully_shard(module, mesh=ctx.mesh["dp"], shard_placement_fn=columns)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        return model

    def own_piece(self, full, p):
        return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None).to_local()

    def pull(self, model):
        for p, w0, f in model.terms():
            moved = p.detach().to_local() - self.own_piece(w0, p)
            p.grad.to_local().add_(STRENGTH * self.own_piece(f, p) * moved)

    def step(self, model, batch, ctx):
        count = (batch["wanted"] != -100).sum()
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for i, part in enumerate(own.tensor_split(2)):
            model.set_requires_gradient_sync(i == 1)
            loss = self.word_loss(model, {k: v[part] for k, v in batch.items()})
            (loss / count).backward()
        self.pull(model)


class Buggy(Clean):
    def own_piece(self, full, p):
        mesh, shard = p.device_mesh, p.to_local()
        return full.flatten().tensor_split(mesh.size())[mesh.get_local_rank()].view_as(shard)


EXPECT = dict(
    right=[
        r"Shard\(1\)|column|dim(ension)?\s*=?\s*1|placement|flat|row.?major|memory|contiguous",
        r"anchor|fisher|\bw0\b|EWC|own_piece|penalty|regulari[sz]|\bpull\b|full",
        r"shard|piece|slice|chunk|elements|cut|split",
    ],
    place=[r"own_piece", r"flatten\(\)", r"view_as", r"\bpull\b", r"shard_placement_fn|columns"],
    wrong=[
        r"(anchor|penalty|pull).{0,40}(added|counted) (twice|three times|once per rank|by all)",
        r"(not|never|missing|twice).{0,25}(all.?|scatter.?)?reduc",
        r"divide.?factor.{0,30}(wrong|missing)",
        r"(gradient_)?sync.{0,30}(wrong|missing|early|late)",
        r"strength.{0,30}(wrong|twice|missing|divid)",
        r"ignored? (index|labels).{0,30}(counted|wrong)",
        r"uneven.{0,40}rows",
    ],
)
WHY = """Matrices are sharded by columns (Shard(1)); Buggy.own_piece takes the rank's stretch of the
flat memory of F and w0, which is a run of rows, and views it in the shard's shape. So the anchor's
gradient, added after the reduction, uses Fisher values and old weights of other elements, for all
matrices; vectors and the convolution (Shard(0)) are right, and so is the cross entropy. A right
cause says that F / w0 are cut flat and not along dim 1. Fix: cut by p.placements."""
