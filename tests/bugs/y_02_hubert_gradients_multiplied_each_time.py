"""HuBERT-style pretraining (masked prediction of cluster numbers) on transformers' HubertModel, DDP of three, three micro-batches to a step. The loss of a micro-batch is a SUM over its masked frames; DDP averages;
afterwards the gradients are multiplied by ranks / (masked frames of all ranks) so that the result is the mean over masked frames.

The bug: the multiplication stands inside the loop over micro-batches, with the number of the current micro-batch, as in transformers' examples/pytorch/speech-pretraining/run_wav2vec2_pretraining_no_trainer.py,
where `multiply_grads(model.module.parameters(), num_processes / num_losses)` runs after each backward and before `if (step + 1) % gradient_accumulation_steps == 0`. The buffer already holds the earlier
micro-batches, which are multiplied again each time.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import HubertConfig, HubertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SAMPLES, FRAMES, CLUSTERS, MICRO = 14, 42, 9, 7, 3
MASKED = [5, 2, 3, 6, 1, 4, 2, 7, 3, 2, 5, 4, 1, 6]


class Pretraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.hubert = HubertModel(
            HubertConfig(
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                conv_dim=(6, 8),
                conv_kernel=(4, 3),
                conv_stride=(2, 2),
                num_feat_extract_layers=2,
                feat_extract_norm="layer",
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
                hidden_dropout=0.0,
                activation_dropout=0.0,
                attention_dropout=0.0,
                feat_proj_dropout=0.0,
                layerdrop=0.0,
                initializer_range=0.2,
                attn_implementation="eager",
            )
        )
        self.clusters = nn.Linear(12, CLUSTERS)

    def forward(self, wave, masked):
        return self.clusters(self.hubert(wave, mask_time_indices=masked).last_hidden_state)


def masked_loss(model, rows):
    logits = model(rows["wave"], rows["masked"])
    return F.cross_entropy(logits[rows["masked"]], rows["cluster"][rows["masked"]], reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pretraining()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        order = torch.rand(ROWS, FRAMES, generator=g).argsort(1).argsort(1)
        return {
            "wave": torch.randn(ROWS, SAMPLES, generator=g),
            "masked": order < torch.tensor(MASKED)[:, None],
            "cluster": torch.randint(CLUSTERS, (ROWS, FRAMES), generator=g),
        }

    def loss_sum(self, model, rows):
        return masked_loss(model, rows), rows["masked"].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def multiply_gradients(self, model, frames, ctx):
        frames = frames.clone()
        dist.all_reduce(frames)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(ctx.world_size / frames.item())

    def step(self, model, batch, ctx):
        mine = {
            k: v.tensor_split(ctx.world_size)[ctx.rank].tensor_split(MICRO)
            for k, v in batch.items()
        }
        frames = 0
        for m in range(MICRO):
            rows = {k: v[m] for k, v in mine.items()}
            masked_loss(model, rows).backward()
            frames = frames + rows["masked"].sum()
        self.multiply_gradients(model, frames, ctx)


class Buggy(Clean):
    def step(self, model, batch, ctx):
        mine = {
            k: v.tensor_split(ctx.world_size)[ctx.rank].tensor_split(MICRO)
            for k, v in batch.items()
        }
        for m in range(MICRO):
            rows = {k: v[m] for k, v in mine.items()}
            masked_loss(model, rows).backward()
            self.multiply_gradients(model, rows["masked"].sum(), ctx)


EXPECT = dict(
    right=[
        r"micro.?batch",
        r"factor|scale|scaled|multipl|divid|divisor|denominator|weigh|count|normalis|normaliz",
        r"again|each (time|micro)|every (time|micro)|repeated|twice|more than once|earlier|first|own|accumul|unequal|differ|per micro",
    ],
    place=[r"micro.?batch"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(reduced|all-reduced) (twice|again)",
        r"only (on )?(rank|the clusters|the head|the encoder)",
        r"last micro.?batch\S* (is |are |was )?(lost|dropped|missing)",
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"each rank .{0,20}own (count|number|frames|denominator)",
    ],
)
WHY = (
    "After each micro-batch the whole gradient buffer is multiplied by 3 / (masked frames of that micro-batch over all ranks). So the sum of micro-batch 3 is divided by its own frames F3, that of micro-batch 2 by F2*F3/3 and that of "
    "micro-batch 1 by F1*F2*F3/9, where all three should be divided by the frames of the window, F1+F2+F3 = 51. Rows of the ranks are 5, 5 and 4, cut 2/2/1, 2/2/1 and 2/1/1: F1 = (5+2)+(4+2)+(5+4) = 22, F2 = (3+6)+(7+3)+1 = 20, "
    "F3 = 1+2+6 = 9; the weights against the right ones are 51*9/(22*20*9) = 0.116, 51*3/(20*9) = 0.85 and 51/9 = 5.67. The last micro-batch is far too heavy, the first nearly lost. All parameters, all ranks alike; the "
    "reduction over ranks, the masks, the forward and the sums within a micro-batch are right. The fix is to count over the window and to multiply once, after the last micro-batch."
)
