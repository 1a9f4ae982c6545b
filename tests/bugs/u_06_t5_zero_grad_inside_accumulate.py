"""T5 of transformers with accelerate's gradient accumulation over three micro-batches; loss over the tokens of all ranks, times accumulation steps and
ranks, because backward() and DDP divide. The optimizer is prepared by accelerate, so its zero_grad() knows about the accumulation.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SOURCE, TARGET, VOCABULARY, MICROS = 10, 7, 6, 37, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = T5Config(
            num_layers=2, num_heads=2, d_model=12, d_kv=6, d_ff=20, vocab_size=VOCABULARY, dropout_rate=0.0,
            decoder_start_token_id=0, relative_attention_num_buckets=8,
        )  # fmt: skip
        return T5ForConditionalGeneration(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)

        def padded(width):
            lengths = torch.randint(2, width + 1, (ROWS, 1), generator=g)
            return torch.randint(1, VOCABULARY, (ROWS, width), generator=g), torch.arange(
                width
            ) < lengths

        ids, mask = padded(SOURCE)
        labels, valid = padded(TARGET)
        return {"ids": ids * mask, "mask": mask, "labels": labels.masked_fill(~valid, -100)}

    def loss_sum(self, model, rows):
        labels = rows["labels"]
        out = model(input_ids=rows["ids"], attention_mask=rows["mask"], labels=labels)
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICROS)
        model = self.accelerator.prepare_model(model)
        self.optimizer = self.accelerator.prepare_optimizer(
            torch.optim.SGD(model.parameters(), lr=0.1)
        )
        return model

    def before_window(self):
        self.optimizer.zero_grad()

    def before_micro_batch(self):
        pass

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        self.before_window()
        for i in range(MICROS):
            micro = {k: v.tensor_split(MICROS)[i] for k, v in mine.items()}
            with self.accelerator.accumulate(model):
                self.before_micro_batch()
                loss, _ = self.loss_sum(model, micro)
                self.accelerator.backward(loss * MICROS * ctx.world_size / count)


class Buggy(Clean):
    def before_window(self):
        pass

    def before_micro_batch(self):
        self.optimizer.zero_grad()


EXPECT = dict(
    right=[
        r"micro.?batch|backward|accumulat|call",
        r"lost|missing|only the last|no part|not (in|part|counted)|never (count|enter|add|arrive)|zeroe?d?|wiped|dropped|cleared|discard|thrown|overwrit|\b0 times",
    ],
    place=[r"micro.?batch|backward|zero_grad|accumulat"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in",
        r"(own|local) (count|denominator|divisor)",
        r"missing all.?reduc|stays? on (its|their) rank",
        r"(counted|reduced|summed|added) (twice|again)",
        r"only the first (micro|backward)|last (micro.?batch|backward) is (lost|missing|no part)",
        r"rows? .{0,20}read twice|gradient of other targets",
    ],
)
WHY = (
    "optimizer.zero_grad() stands at the top of the accumulate block. accelerate skips it in micro-batches that do not synchronise, and lets it through in the one that does, the last: there it wipes what "
    "micro-batches 0 and 1 have accumulated, on every rank. What is reduced is the last micro-batch's gradient alone, of each rank, rightly scaled and averaged; the first two (7 of the 10 rows) "
    "are missing in every parameter. Forward, loss, divisor and the reduction are right; zero_grad belongs after the optimizer's step or before the window."
)
