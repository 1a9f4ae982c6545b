"""ELECTRA's discriminator (replaced-token detection) in DDP with an own communication hook which sums, the loss divided by the token count
of the global batch. After pytorch forum and issue threads on comm hooks: with a hook DDP does not divide itself, so the hook decides between sum and average.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import ElectraConfig, ElectraForPreTraining

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY = 7, 9, 39


def sum_hook(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def average_hook(group, bucket):
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(group.size()))


class Clean:
    hook = staticmethod(sum_hook)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ElectraForPreTraining(
            ElectraConfig(
                vocab_size=VOCABULARY,
                embedding_size=10,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=21,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.2,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        replaced = torch.rand(ROWS, LENGTH, generator=g) < 0.3
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(LENGTH) < lengths).long(),
            "replaced": replaced.long(),
        }

    def loss_sum(self, model, rows):
        valid = rows["attention_mask"]
        logits = model(input_ids=rows["input_ids"], attention_mask=valid).logits
        each = F.binary_cross_entropy_with_logits(
            logits, rows["replaced"].to(logits.dtype), reduction="none"
        )
        return (each * valid).sum(), valid.sum()

    def distribute(self, model, ctx):
        model = DistributedDataParallel(model, bucket_cap_mb=0.005, gradient_as_bucket_view=True)
        model.register_comm_hook(dist.group.WORLD, self.hook)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        dist.all_reduce(count, group=ctx.group("dp"))
        (loss / count).backward()


class Buggy(Clean):
    hook = staticmethod(average_hook)


EXPECT = dict(
    right=[
        r"1/3|third|0\.333|3 times|three times|\b3x|factor|scal|divid|divisor|averag|too small|smaller",
        r"world.?size|number of (the )?(dp |data.?parallel )?ranks|\bdp\b|data.?parallel|averag|over the ranks|\branks\b",
    ],
    place=[
        r"(every|all|each) (param|gradient|rank|weight|tensor|bucket)",
        r"reduc|averag|divi|hook",
        r"whole|global|uniform",
    ],
    wrong=[
        r"mean of (the )?(rank |ranks' )?means",
        r"(not|never) (been )?(all.?)?(reduced|summed)",
        r"(counted|reduced|summed) (twice|again)",
        r"(own|local) (count|denominator|number of (valid )?tokens)",
        r"micro.?batch",
        r"only (one|some|a|the) (bucket|param)",
    ],
)
WHY = (
    "The loss is divided by the token count of all ranks, so the gradients must be summed; the communication hook averages, that is, "
    "divides by the world size (3) once more. Every gradient on every rank is a third of the right one."
)
