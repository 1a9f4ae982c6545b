"""Extractive question answering with transformers' LlamaForQuestionAnswering: the tokenizer of a decoder pads on the left, each micro-batch to its own longest row. Two micro-batches per rank; gradients are summed by hand in one flat buffer.

The bug: the collator pads `input_ids` and `attention_mask` on the left, and takes `start_positions` / `end_positions` as the dataset has them, as numbers of tokens in the row without padding. In the run_qa.py recipe the offsets are computed
after padding; DataCollatorWithPadding leaves label columns alone. Origin: huggingface/transformers question-answering recipes with padding_side="left" (XLNet, decoders).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForQuestionAnswering

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WORDS, QUESTION, SHORTEST, LONGEST, MICRO, PAD = 14, 27, 4, 8, 12, 2, 0


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LlamaForQuestionAnswering(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=16,
                intermediate_size=20,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=LONGEST,
                initializer_range=0.3,
                pad_token_id=PAD,
                attn_implementation="eager",
                use_cache=False,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(SHORTEST, LONGEST + 1, (ROWS,), generator=g)
        # the answer lies in the context, after the question
        start = QUESTION + (torch.rand(ROWS, generator=g) * (length - QUESTION)).long()
        end = start + (torch.rand(ROWS, generator=g) * (length - start)).long()
        ids = torch.randint(1, WORDS, (ROWS, LONGEST), generator=g)
        return {
            "ids": ids * (torch.arange(LONGEST) < length[:, None]),
            "length": length,
            "start": start,
            "end": end,
        }

    @staticmethod
    def span_loss(model, ids, mask, start, end):
        out = model(input_ids=ids, attention_mask=mask)
        total = 0
        for logits, target in ((out.start_logits, start), (out.end_logits, end)):
            logits = logits.masked_fill(mask == 0, torch.finfo(logits.dtype).min)
            total = total + F.cross_entropy(logits, target, reduction="sum")
        return total / 2

    def loss_sum(self, model, rows):
        mask = (torch.arange(LONGEST) < rows["length"][:, None]).long()
        loss = self.span_loss(model, rows["ids"], mask, rows["start"], rows["end"])
        return loss, len(rows["ids"])

    def positions(self, rows, padding):
        return rows["start"] + padding, rows["end"] + padding

    def collate(self, rows):
        """Left padding to the longest row of the micro-batch."""
        width = int(rows["length"].max())
        padding = width - rows["length"]
        ids = torch.full((len(padding), width), PAD)
        for i, n in enumerate(rows["length"].tolist()):
            ids[i, width - n :] = rows["ids"][i, :n]
        mask = (torch.arange(width) >= padding[:, None]).long()
        return ids, mask, *self.positions(rows, padding)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            (self.span_loss(model, *self.collate(part)) / len(batch["ids"])).backward()
        params = [p for p in model.parameters() if p.requires_grad]
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for p, g in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad.copy_(g.view_as(p))


class Buggy(Clean):
    def positions(self, rows, padding):
        return rows["start"], rows["end"]


EXPECT = dict(
    right=[
        r"(?i)target|label|position|span|start|answer|loss",
        r"(?i)target|label|pad|shift|offset|another|other|wrong (token|place|position)|differ",
    ],
    place=[r"(?i)target|label|loss|span|collat|start|end|pad|output|qa_outputs"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"(?i)divided by (its|their) own|mean of (the )?means|divisor (is|was) wrong|wrong divisor",
        r"(?i)rows? .{0,20}(lost|missing|never read|read twice)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|missing|dropped|overwritten)",
        r"(?i)attention mask (is|was) (wrong|missing)",
    ],
)
WHY = (
    "Each micro-batch is padded on the left to its longest row, but start and end stay numbers of the unpadded row. A row that is k tokens shorter than the longest of its micro-batch gets targets k tokens too early (its token start-k, end-k instead of start, end); "
    "rows without padding are right. It happens on all ranks, in every micro-batch with rows of unlike length; the targets never fall on padding, because padding is at most 4 and answers begin at 4 or later. "
    "With seed 0 the shifts are, by rank and micro-batch, [4,0,0] [0,0]; [0,2,2] [0,2]; [1,0] [2,0]: 6 of the 14 rows are wrong, the gradient's projection on the right one is about 0.53. Forward (logits), mask, divisor (14 rows) and reduction are right; the gradient is that of other targets in the padded rows, in all parameters. Right: add the row's padding to both positions."
)
