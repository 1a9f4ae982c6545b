"""Hand-written 1F1B pipeline beside data parallelism; gradients are reduced in hooks while a flag is
up. After FAULTS C12-10 (picotron PR 5): the flag is handled in the cool-down loop alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}

ROWS, LENGTH, WIDTH, VOCABULARY, MICRO_BATCHES = 12, 5, 8, 14, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, 7, batch_first=True)
        self.out = nn.Linear(7, WIDTH)

    def forward(self, x):
        return x + self.out(self.gru(self.norm(x))[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(3)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


class DataParallel:
    def __init__(self, model, group):
        self.require_sync, self.group = False, group
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.hook)

    def hook(self, param):
        if self.require_sync:
            dist.all_reduce(param.grad, group=self.group)


class Clean:
    num_microbatches = MICRO_BATCHES

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def cross_entropy(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.cross_entropy(model(rows["ids"]), rows["labels"]), rows["labels"].numel()

    def distribute(self, model, ctx):
        if ctx.coords["pp"] == 0:
            model.norm = model.head = None
            del model.layers["2"]
        else:
            model.embed = None
            del model.layers["0"], model.layers["1"]
        self.ddp = DataParallel(model, ctx.group("dp"))
        return model

    def sync_now(self, done, in_cool_down):
        """Whether the backward after `done` others is the one that reduces."""
        return done == MICRO_BATCHES - 1

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        micro = [
            {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            for i in range(MICRO_BATCHES)
        ]
        peers = dist.get_process_group_ranks(ctx.group("pp"))
        stage, last = ctx.coords["pp"], len(peers) - 1
        pending, sent, counts = [], [], {"forward": 0, "backward": 0}

        def send(tensor, to):
            tensor = tensor.detach().contiguous()
            sent.append((dist.isend(tensor, peers[to]), tensor))

        def receive(like, source):
            tensor = torch.empty(len(like), LENGTH, WIDTH, dtype=ctx.dtype)
            dist.recv(tensor, peers[source])
            return tensor

        def forward():
            rows = micro[counts["forward"]]
            counts["forward"] += 1
            x = rows["ids"] if stage == 0 else receive(rows["ids"], stage - 1).requires_grad_()
            out = model(x)
            if stage == last:
                out = self.cross_entropy(out, rows["labels"]) / (ROWS * LENGTH)
            else:
                send(out, stage + 1)
            pending.append((x, out))

        def backward(in_cool_down):
            self.ddp.require_sync = self.sync_now(counts["backward"], in_cool_down)
            counts["backward"] += 1
            x, out = pending.pop(0)
            out.backward(None if stage == last else receive(x, stage + 1))
            if stage:
                send(x.grad, stage - 1)

        warm_up = min(last - stage, MICRO_BATCHES)
        for _ in range(warm_up):
            forward()
        for _ in range(MICRO_BATCHES - warm_up):
            forward()
            backward(in_cool_down=False)
        for _ in range(warm_up):
            backward(in_cool_down=True)
        for work, _ in sent:
            work.wait()


class Buggy(Clean):
    def sync_now(self, done, in_cool_down):
        return in_cool_down and done == MICRO_BATCHES - 1


EXPECT = dict(
    right=[
        r"not (been )?(all.?)?(reduced|summed|synchroni)|never (been )?(all.?)?(reduced|summed|synchroni)"
        r"|missing (all.?)?(reduc|sum|sync)|no (all.?)?(reduc|sync)|unreduced|unsynchroni|own (rows|part"
        r"|share|gradient)|lacks?|keeps?|partial|without .{0,20}(reduc|sum)|only its|other ranks? (rows|part)",
        r"\bdp\b|data.?parallel|ranks? \[?1|ranks? \[?3|stage|layers\.2|head",
    ],
    place=[
        r"layers\.2|head|\bnorm\b",
        r"(last|second) stage|stage 1|pp ?[=:] ?1",
        r"ranks? \[?(1|3)\b",
    ],
    wrong=[
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"averag|mean of (the )?means",
        r"(embed|layers\.[01])\S* (is|are) (not|never) (been )?(all.?)?(reduced|summed)",
        r"forward (pass )?(is wrong|differs)",
        r"first stage (is|does) (not|never)",
    ],
)

WHY = (
    "The last stage has no cool-down micro-batches, so its flag never goes up: on ranks 1 and 3 "
    "layers.2, norm and head keep the sum over their own dp rank's rows; stage 0 is right."
)
