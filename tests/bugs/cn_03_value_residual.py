"""A decoder with value residuals (ResFormer: the values of every layer are mixed with those of
layer 0), four layers in two stages of torch.distributed.pipelining (GPipe, two micro-batches of
two rows), each stage under FSDP2 over dp (2; four rows each).

Bug: the stages hand over the hidden state only. The second stage begins its own `first`, so that
its layers are mixed with the values of layer 2 and not of layer 0, and layer 0 hears nothing from
there. After reports on models with cross-layer connections (value residual, shared keys and
values) cut by pipeline scripts made for plain decoders.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2, "dp": 2}}}}
WORDS, D, HEADS, T, ROWS, LAYERS, MICRO = 11, 6, 2, 5, 8, 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm_mlp = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qk, self.value, self.out = nn.Linear(D, 2 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.mix = nn.Parameter(torch.rand(D))
        self.mlp = nn.Sequential(nn.Linear(D, 7), nn.SiLU(), nn.Linear(7, D))

    def forward(self, x, first=None):
        h = self.norm(x)
        q, k = self.qk(h).unflatten(-1, (2 * HEADS, -1)).transpose(1, 2).chunk(2, 1)
        v = self.value(h)
        first = v if first is None else first
        v = torch.lerp(v, first, self.mix).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x)), first


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, WORDS, bias=False)

    def forward(self, x, first=None):
        if self.words is not None:
            x = self.words(x)
        for layer in self.layers.values():
            x, first = layer(x, first)
        if self.head is None:
            return x, first
        return self.head(self.norm(x))


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    handed_over = 2

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        return self.make()

    def make(self):
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 310)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        length = torch.tensor([5, 2, 4, 5, 3, 1, 5, 2])
        wanted = ids[:, 1:].masked_fill(torch.arange(T) >= length[:, None], -100)
        return {"ids": ids[:, :-1], "wanted": wanted}

    def loss_sum(self, model, rows):
        wanted = rows["wanted"]
        return loss_of(model(rows["ids"]), wanted), int((wanted != -100).sum())

    def distribute(self, model, ctx):
        stage, stages = ctx.coords["pp"], ctx.axes["pp"]
        keep = {str(int(i)) for i in torch.arange(LAYERS).tensor_split(stages)[stage]}
        for name in list(model.layers):
            if name not in keep:
                del model.layers[name]
        if stage > 0:
            model.words = None
        if stage < stages - 1:
            model.norm = model.head = None
        dtype = next(model.parameters()).dtype
        for module in [*model.layers.values(), model]:
            fully_shard(module, mesh=ctx.mesh["dp"], reshard_after_forward=False)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        rows = ROWS // ctx.axes["dp"] // MICRO
        ids = torch.empty(rows, T, dtype=torch.long, device="meta")
        x = torch.empty(rows, T, D, dtype=dtype, device="meta", requires_grad=True)
        between = (x,) * self.handed_over
        self.pipe = ScheduleGPipe(
            PipelineStage(
                model,
                stage,
                stages,
                torch.device("cpu"),
                input_args=between if stage else (ids,),
                output_args=between if stage == 0 else (x[..., :1].repeat(1, 1, WORDS),),
                group=ctx.group("pp"),
            ),
            MICRO,
            loss_fn=lambda logits, labels: loss_of(logits, labels) / self.count,
            scale_grads=False,
        )
        self.stage = stage
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        self.count = int((batch["wanted"] != -100).sum())
        if self.stage == 0:
            self.pipe.step(batch["ids"][own])
        else:
            self.pipe.step(target=batch["wanted"][own], losses=[])


class StagedDecoder(Decoder):
    def forward(self, x):
        if self.words is not None:
            x = self.words(x)
        first = None
        for layer in self.layers.values():
            x, first = layer(x, first)
        return x if self.head is None else self.head(self.norm(x))


class Buggy(Clean):
    handed_over = 1

    def make(self):
        return StagedDecoder()


EXPECT = dict(
    right=[
        r"first|value.?residual|\bvalues?\b|\bv1?\b|layers?\.0|mix|cross.?layer",
        r"stage|pipeline|\bpp\b|boundary|hand(ed|s)? over|sent|pass(ed|es)?",
        r"None|own|not (hand|sent|pass|receiv|carr|forward|cross)|never|lost|missing|drop|only "
        r"(the )?(hidden|x\b)|re.?(start|set)|anew|layers?\.2|lacks|local",
    ],
    place=[
        r"StagedDecoder",
        r"first = None",
        r"\bfirst\b",
        r"layers\.2",
        r"layers\.\d\.mix",
        r"layers\.0\.value",
    ],
    wrong=[
        r"(divided|scaled|scale_grads|divide factor).{0,40}(micro|dp|wrong|twice)",
        r"(not|never|missing).{0,25}(all.?|scatter.?)?reduc\w* over dp",
        r"(wrong|other|different) micro.?batch",
        r"(wrong|other|different|same) rows",
        r"causal",
    ],
)
WHY = """Every layer mixes its values with those of layer 0. StagedDecoder.forward takes and returns
the hidden state alone and sets first = None at the entrance of each stage, so in stage 1 the first
values are those of layer 2: layer 2 is mixed with itself (mix gets no gradient), layer 3 with
layer 2, and layer 0's value projection gets nothing from stage 1. A right cause says that the
values of the first layer do not cross the stage boundary. Fix: send (x, first) between stages."""
