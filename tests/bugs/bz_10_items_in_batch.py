"""The Trainer's token-weighted loss under data and tensor parallelism (2 x 2 processes): a small Llama (transformers) has its MLPs cut by torch's parallelize_module over the tensor ranks, the number of label tokens of
the whole window (two micro-batches) is gathered with accelerate, each micro-batch's summed loss is divided by it and multiplied by the data parallel size, and the gradients are averaged over the data ranks.

The bug: accelerate's gather runs over all processes, and tensor ranks hold the same rows, so that every token is counted twice; the division by the non-data-parallel size is missing. After transformers'
Trainer._get_num_items_in_batch, which had to be corrected for parallelism configurations with tensor or context parallel ranks (num_items_in_batch // non_data_parallel_size).
"""

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCABULARY = 7, 6, 23


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=32,
            initializer_range=0.3,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        return LlamaForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        padding = torch.arange(LENGTH) >= lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(padding, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        logits = model(input_ids=rows["ids"], use_cache=False).logits.flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()

    def distribute(self, model, ctx):
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        for layer in model.model.layers:
            parallelize_module(layer, ctx.mesh["tp"], plan)
        return model

    def get_num_items_in_batch(self, micro_batches, ctx):
        num_items = sum((m["labels"] != -100).sum() for m in micro_batches)
        num_items = gather(num_items).sum()
        return num_items // ctx.axes["tp"]

    def step(self, model, batch, ctx):
        PartialState(cpu=True)
        size = ctx.axes["dp"]
        mine = {k: v.tensor_split(size)[ctx.coords["dp"]] for k, v in batch.items()}
        micro_batches = [{k: v.tensor_split(2)[n] for k, v in mine.items()} for n in range(2)]
        num_items_in_batch = self.get_num_items_in_batch(micro_batches, ctx)
        for p in model.parameters():
            p.grad = None
        for rows in micro_batches:
            loss, _ = self.loss_sum(model, rows)
            (loss / num_items_in_batch * size).backward()
        for p in model.parameters():
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(grad, group=ctx.group("dp"))
            grad /= size


class Buggy(Clean):
    def get_num_items_in_batch(self, micro_batches, ctx):
        num_items = sum((m["labels"] != -100).sum() for m in micro_batches)
        return gather(num_items).sum()


EXPECT = dict(
    right=[
        r"(1/2|0\.5|half|factor (of )?(2|two)|twice|two times|2 times|doubl|2x|too small|scal|divi(sor|ded)|denominator|too large)",
        r"tensor|\btp\b|count|num_items|items|token|denominator|divisor|world|all (four|4|ranks|processes)|duplicat|replica|same rows|group",
    ],
    place=[
        r"get_num_items_in_batch|num_items",
        r"gather",
        r"count|denominator|divisor|divid",
        r"all (parameters|gradients|ranks)|every (rank|parameter|gradient)|each (rank|parameter)",
    ],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|reduced (twice|again)",
        r"mean of (the )?means|(own|local) (count|denominator|tokens)",
        r"micro.?batch.{0,20}(lost|dropped|overwritten)|only the last micro.?batch|divided by the number of micro.?batches",
        r"row.?parallel.{0,30}wrong|mlp.{0,20}(is )?wrong|forward.{0,20}wrong",
    ],
)
WHY = (
    "gather collects the label count of all four processes; the two tensor ranks of a data rank have the same rows, so the sum is twice the tokens of the batch. The loss is divided by it, and every gradient on every rank is "
    "exactly half of the right one; reduction, accumulation and tensor parallelism are right. A right cause says that all gradients are half, as the token count (denominator) counts the tensor ranks' tokens twice. "
    "Fix: divide by the tensor parallel size, or gather over the data parallel group."
)
