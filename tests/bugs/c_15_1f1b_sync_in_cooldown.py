"""A 1F1B pipeline beside data parallelism; the last backward of a step also sums the gradients over dp.
After FAULTS C12-10 (picotron PR 5): the sync flag is handled in the cool-down loop only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_BATCHES = 12, 5, 13, 8, 3


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 11),
            nn.Linear(WIDTH, 11),
            nn.Linear(11, WIDTH),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(3)})
        self.final_norm, self.final_proj = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x):
        """Whatever part of the model is here."""
        x = self.embedding(x) if hasattr(self, "embedding") else x
        for layer in self.layers.values():
            x = layer(x)
        return self.final_proj(self.final_norm(x)) if hasattr(self, "final_proj") else x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    @staticmethod
    def loss_of(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.loss_of(model(rows["ids"]), rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        if ctx.coords["pp"] == 0:
            del model.final_norm, model.final_proj, model.layers["2"]
        else:
            del model.embedding, model.layers["0"], model.layers["1"]
        return model

    def step(self, model, batch, ctx):
        stage, stages = ctx.coords["pp"], ctx.axes["pp"]
        group = ctx.group("pp")
        peer = dist.get_global_rank(group, 1 - stage)
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        rows = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            for i in range(MICRO_BATCHES)
        ]
        held, sent = [], []

        def forward(i):
            if stage == 0:
                held.append((None, model(rows[i]["ids"])))
                sent.append((dist.isend(x := held[-1][1].detach().contiguous(), peer), x))
                return
            x = torch.empty(*rows[i]["ids"].shape, WIDTH, dtype=ctx.dtype)
            dist.recv(x, peer)
            x.requires_grad_()
            held.append((x, self.loss_of(model(x), rows[i]["labels"])))

        def backward(sync):
            x, out = held.pop(0)
            if stage == 0:
                grad = torch.empty_like(out)
                dist.recv(grad, peer)
                out.backward(grad)
            else:
                (out / batch["labels"].numel()).backward()
                sent.append((dist.isend(x.grad, peer), x))
            if sync:
                for param in model.parameters():
                    dist.all_reduce(param.grad, group=ctx.group("dp"))

        warm_up = min(stages - stage - 1, MICRO_BATCHES)
        steady = MICRO_BATCHES - warm_up
        for i in range(warm_up):
            forward(i)
        for i in range(steady):
            forward(warm_up + i)
            backward(sync=self.sync_in_steady_state(i == steady - 1 and warm_up == 0))
        for i in range(warm_up):
            backward(sync=i == warm_up - 1)
        for work, _ in sent:
            work.wait()

    def sync_in_steady_state(self, last_of_all):
        return last_of_all


class Buggy(Clean):
    def sync_in_steady_state(self, last_of_all):
        return False


EXPECT = dict(
    right=[
        r"final_norm|final_proj|layers\.2|(last|second) stage|stage 1|pp\W{0,3}1|ranks? \W?1\W",
        (
            r"(not|never|un|without being) ?-?((all-?)?reduced|summed|added|synchroni[sz]ed)|missing|own (part|share|rows|"
            r"gradient)|partial|lacks?|only (its|the|their) (own |local )?(rows|part|gradient)|no (all.?)?reduc|(local|own) "
            r"(part|gradient|rows)|differ\w* (between|on|across)|skip"
        ),
    ],
    place=[r"final_norm|final_proj|layers\.2", r"\bdp\b", r"stage"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"(embedding|layers\.[01])\S* (is|are|was|were) (not|never|wrong)",
        r"mean of (the )?means",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"forward (is|was) wrong",
    ],
)
WHY = (
    "The last stage has no warm-up and so no cool-down micro-batches; the flag that makes the last backward sum "
    "over dp is never set there, so each dp rank of stage 1 keeps the gradient of its own rows."
)
