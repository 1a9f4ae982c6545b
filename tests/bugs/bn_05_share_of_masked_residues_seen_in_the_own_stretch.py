"""A protein language model, transformers' ESM with token_dropout, learns masked residues under context parallelism on three ranks (4, 4 and 3 of eleven columns; two micro-batches of three and two
proteins of unlike length). Positions are those of the whole protein, keys and values are gathered from all ranks, the loss is divided by the number of masked residues of the batch, the gradients are
summed over the ranks. ESM zeroes the embeddings of masked residues and scales the others by 0.88 / (1 - share of masked residues in the protein).

The bug: the ranks call the library's embedding module on their stretch of ids and mask, and so the share is that of the own stretch. After the class of reports about per-sequence statistics under
sequence sharding (and ESM's own issues on token_dropout, whose mask ratio depends on what attention mask it is handed).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import EsmConfig, EsmForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, PAD, MASK, WIDTH, HEADS, LENGTH, ROWS = 15, 1, 14, 8, 2, 11, 5


class Everywhere(torch.autograd.Function):
    """The stretches of all ranks side by side; the gradients of all ranks are summed on the way back."""

    @staticmethod
    def forward(ctx, x, start, length, group):
        ctx.start, ctx.size, ctx.group = start, x.shape[2], group
        whole = x.new_zeros(*x.shape[:2], length, x.shape[3])
        whole[:, :, start : start + x.shape[2]] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, :, ctx.start : ctx.start + ctx.size], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = EsmConfig(
            vocab_size=WORDS,
            mask_token_id=MASK,
            pad_token_id=PAD,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=13,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=LENGTH + 3,
            initializer_range=0.3,
            position_embedding_type="absolute",
            emb_layer_norm_before=False,
            token_dropout=True,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        model = EsmForMaskedLM(config)
        model.esm.contact_head = nn.Identity()
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(2, MASK, (ROWS, LENGTH), generator=g)
        length = torch.tensor([11, 9, 10, 11, 9])
        masked = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
        for row, columns in enumerate([[1, 2], [0, 5, 6], [3], [4, 6, 9], [2, 8]]):
            masked[row, columns] = True
        inside = torch.arange(LENGTH) < length[:, None]
        labels = ids.masked_fill(~masked, -100)
        ids = ids.masked_fill(masked, MASK).masked_fill(~inside, PAD)
        return {"ids": ids, "inside": inside.long(), "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["inside"]).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, int((rows["labels"] != -100).sum())

    def embed(self, layer, ids, inside, positions, group):
        counts = torch.stack([(ids == layer.mask_token_id).sum(-1), inside.sum(-1)])
        dist.all_reduce(counts, group=group)
        masked = (ids == layer.mask_token_id)[..., None]
        x = layer.word_embeddings(ids).masked_fill(masked, 0.0)
        share = counts[0].float() / counts[1]
        x = (x * (1 - 0.15 * 0.8) / (1 - share)[:, None, None]).to(x.dtype)
        x = x + layer.position_embeddings(positions)
        return x * inside[..., None]

    def attend(self, block, x, outside, start, group):
        layer = block.self
        size = layer.attention_head_size
        y = block.LayerNorm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, size)).transpose(1, 2)
            for f in (layer.query, layer.key, layer.value)
        )
        k = Everywhere.apply(k, start, LENGTH, group)
        v = Everywhere.apply(v, start, LENGTH, group)
        scores = (q * size**-0.5 @ k.transpose(2, 3)).masked_fill(
            outside[:, None, None], float("-inf")
        )
        return block.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), x)

    def logits(self, model, part, ctx):
        group = ctx.group("cp")
        columns = torch.arange(LENGTH).tensor_split(ctx.world_size)[ctx.rank]
        positions = (part["inside"].cumsum(1) * part["inside"] + PAD)[:, columns]
        x = self.embed(
            model.esm.embeddings,
            part["ids"][:, columns],
            part["inside"][:, columns],
            positions,
            group,
        )
        for layer in model.esm.encoder.layer:
            x = self.attend(layer.attention, x, part["inside"] == 0, int(columns[0]), group)
            x = layer.feed_forward_chunk(x)
        return model.lm_head(model.esm.encoder.emb_layer_norm_after(x)), columns

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        count = (batch["labels"] != -100).sum()
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            logits, columns = self.logits(model, part, ctx)
            labels = part["labels"][:, columns].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100, reduction="sum")
            (loss / count).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)


class Buggy(Clean):
    def embed(self, layer, ids, inside, positions, group):
        return layer(input_ids=ids, attention_mask=inside, position_ids=positions)


EXPECT = dict(
    right=[
        r"embed",
        r"mask(ed)? (ratio|share|token)|share|ratio|token.?dropout|mask_ratio|src_lengths|scal(e|ed|ing)|count|masked residues",
        r"own|local|stretch|shard|slice|part of|per rank|each rank|cp|context|columns|not (all.?)?reduced|whole",
    ],
    place=[r"\bembed\b", r"embeddings", r"mask_ratio", r"token.?dropout"],
    wrong=[
        r"gradients? .{0,30}(not (been )?(all.?)?reduced|reduced (twice|again))",
        r"divi(ded|des) by (its|their) own (number|count|labels|tokens)|mean of means|wrong divisor",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|(keys|values) .{0,20}(not gathered|missing)|position(s|_ids) .{0,20}(wrong|from zero|local)",
    ],
)
WHY = (
    "Buggy.embed calls EsmEmbeddings on the own stretch of ids and attention mask; with token_dropout it scales the unmasked embeddings by 0.88 / (1 - masked / length), and both counts are of the stretch, not of the "
    "whole protein. A rank whose stretch has more masked residues than the protein's average scales too much, one with fewer too little; the first wrong value is the embeddings' output, on every rank and in nearly "
    "every row; position embeddings, the gather of keys and values, the divisor and the all-reduce of the gradients are right. All gradients are wrong. Fix: sum both counts over the context-parallel group before the "
    "ratio (Clean.embed)."
)
