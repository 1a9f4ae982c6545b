"""Translation with transformers' mBART under accelerate (three ranks, accumulation over two micro-batches). The decoder of mBART has no start token of its own: its input is the labels moved by one, and the last token of a row, the code of its language, goes to the front. The collator prepares decoder_input_ids because the
loss is computed outside of the model (label smoothing), as DataCollatorForSeq2Seq does.

The bug: the last token is looked up by the number of labels that are not padding, but the labels are padded with -100, not with the padding token. So the last column is taken, where the rows shorter than the longest of their micro-batch have padding: they begin with the padding token instead of their language. Origin: reports on the
shift_tokens_right of mBART and MBart50 given labels with -100 (the library replaces them first; copies of the function in training scripts do not).
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import MBartConfig, MBartForConditionalGeneration

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SOURCE, TARGET, WORDS, MICRO, IGNORE = 13, 6, 9, 31, 2, -100
PAD, END, CODES, SMOOTH = 1, 2, (28, 29, 30), 0.1


def to_the_right(labels, replaced):
    """The inputs of the decoder: the last token (a language), then the labels but the last."""
    ids = labels.masked_fill(labels == IGNORE, PAD)
    last = ((ids if replaced else labels) != PAD).sum(1, keepdim=True) - 1
    return torch.cat([ids.gather(1, last), ids[:, :-1]], 1)


class Clean:
    replaced = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return MBartForConditionalGeneration(
            MBartConfig(
                vocab_size=WORDS,
                d_model=12,
                encoder_layers=1,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=3,
                encoder_ffn_dim=16,
                decoder_ffn_dim=20,
                max_position_embeddings=16,
                dropout=0.0,
                attention_dropout=0.0,
                activation_dropout=0.0,
                init_std=0.3,
                pad_token_id=PAD,
                eos_token_id=END,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.full((ROWS, TARGET), IGNORE)
        for i in range(ROWS):
            n = int(torch.randint(1, TARGET - 1, (), generator=g))
            labels[i, :n] = torch.randint(3, CODES[0], (n,), generator=g)
            code = CODES[int(torch.randint(len(CODES), (), generator=g))]
            labels[i, n : n + 2] = torch.tensor([END, code])
        length = torch.randint(2, SOURCE + 1, (ROWS, 1), generator=g)
        mask = (torch.arange(SOURCE) < length).long()
        ids = torch.randint(3, CODES[0], (ROWS, SOURCE), generator=g)
        return {"ids": ids.masked_fill(mask == 0, PAD), "mask": mask, "labels": labels}

    @staticmethod
    def smoothed_loss(model, rows, replaced):
        labels = rows["labels"]
        labels = labels[:, : int((labels != IGNORE).sum(1).max())]
        logits = model(
            input_ids=rows["ids"],
            attention_mask=rows["mask"],
            decoder_input_ids=to_the_right(labels, replaced),
            use_cache=False,
        ).logits
        return F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=SMOOTH,
        )

    def loss_sum(self, model, rows):
        loss = self.smoothed_loss(model, rows, True)
        return loss, int((rows["labels"] != IGNORE).sum())

    def distribute(self, model, ctx):
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.setdefault(name, str(ctx.rank))
        os.environ.setdefault("WORLD_SIZE", str(ctx.world_size))
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
        return self.accelerator.prepare(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != IGNORE).sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            with self.accelerator.accumulate(model):
                loss = self.smoothed_loss(model, rows, self.replaced)
                # the average over ranks and the division by accelerate are taken back
                self.accelerator.backward(loss * ctx.world_size * MICRO / count)


class Buggy(Clean):
    replaced = False


EXPECT = dict(
    right=[
        r"(?i)decoder|input|embed|shift|start|first (token|position)|padd",
        r"(?i)input|shift|start|first (token|position|column)|ids|other (words|tokens)|words|padd|language|forward|first wrong",
    ],
    place=[r"(?i)decoder|input_ids|inputs?\b|embed|shared|start|collat"],
    wrong=[
        r"(?i)(?<!encoder's )(?<!encoder )forward (is|values? (are|is)) right|the forward .{0,12}agrees",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their|the) own|number of rows|wrong normali[sz]er",
        r"(?i)targets? (is|are) (wrong|other)|labels? (is|are) (wrong|other)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(goes wrong in|first wrong) .{0,40}model\.encoder",
        r"(?i)backward of \S+ is wrong|wrong adjoint",
    ],
)
WHY = (
    "The first input of the decoder is gathered at (number of labels unlike the padding token) - 1; the labels are padded with -100, so every column counts and the last column of the micro-batch is taken. Rows shorter than the longest of their micro-batch begin with PAD (1) instead of the code of their language (28 to 30); the longest rows are right. "
    "All other decoder inputs are right, so are the source, the labels, the count. With seed 0 the labels are 3, 6, 6 and 8, 9 long on rank 0, 5, 4 and 4, 4 on rank 1, 5, 5 and 6, 5 on rank 2: rows 0, 3, 6 and 12 of the batch are wrong. The forward goes wrong at the embedding of the decoder's inputs, in the first position of the shorter rows, and from there (causal attention) in all their positions. The encoder's forward is right; all gradients are wrong, "
    "the encoder's too through the cross attention; the shared embedding lacks part of the rows of the three codes (its row PAD, the padding_idx, gets none from the input). Equal on all ranks. Divisor, average and accumulation are right. Fix: replace -100 by the padding token before counting."
)
