"""transformers' Qwen3 trained with selective language modelling (Rho-1): of the labelled tokens of
a row only the 60 % with the greatest excess loss over a reference model's are learnt from. DDP
over three ranks (4, 4, 3 of 11 rows), micro-batches of two rows with no_sync. The single process
picks row by row; the ranks pick for the whole micro-batch at once from padded matrices.

Bug: the padded version ranks all columns. A column without a label has loss 0 and reference 0,
that is an excess of 0, and so comes before all the tokens that the model already does better
than the reference. After token-selection losses written on top of reduction="none".
"""

import math

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, T, WORDS, SHARE = 11, 9, 19, 0.6
LENGTHS = [9, 5, 7, 4, 8, 6, 9, 3, 5, 7, 8]


def chosen_number(labelled):
    return max(1, math.ceil(SHARE * labelled))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        config = Qwen3Config(
            vocab_size=WORDS,
            hidden_size=12,
            intermediate_size=15,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=4,
            max_position_embeddings=32,
            initializer_range=0.25,
            tie_word_embeddings=True,
            use_cache=False,
        )
        return Qwen3ForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 310)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        labels = ids[:, 1:].clone()
        before = math.log(WORDS) + 0.8 * torch.randn(ROWS, T, generator=g)
        for row, length in enumerate(LENGTHS):
            labels[row, length:] = -100
            labels[row, : length // 4] = -100
        before = before.masked_fill(labels == -100, 0.0)
        return {"ids": ids[:, :-1].contiguous(), "labels": labels, "before": before}

    def token_losses(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="none"
        )
        return loss.view_as(rows["labels"])

    def loss_sum(self, model, rows):
        losses, total, count = self.token_losses(model, rows), 0.0, 0
        for row, labels, before in zip(losses, rows["labels"], rows["before"], strict=True):
            here = labels != -100
            loss, old = row[here], before[here]
            top = (loss.detach() - old).topk(chosen_number(len(loss))).indices
            total, count = total + loss[top].sum(), count + top.numel()
        return total, count

    def pick(self, loss, rows):
        excess = loss.detach() - rows["before"]
        excess = excess.masked_fill(rows["labels"] == -100, float("-inf"))
        place = excess.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return place < self.numbers(rows)[:, None]

    def numbers(self, rows):
        labelled = (rows["labels"] != -100).sum(-1)
        return torch.tensor([chosen_number(int(n)) for n in labelled])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        dp, total = ctx.axes["dp"], int(self.numbers(batch).sum())
        parts = torch.arange(ROWS).tensor_split(dp)[ctx.coords["dp"]].split(2)
        for i, part in enumerate(parts):
            model.require_backward_grad_sync = i == len(parts) - 1
            rows = {k: v[part] for k, v in batch.items()}
            loss = self.token_losses(model, rows)
            loss = (loss * self.pick(loss, rows)).sum()
            (loss * dp / total).backward()


class Buggy(Clean):
    def pick(self, loss, rows):
        excess = loss.detach() - rows["before"]
        place = excess.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return place < self.numbers(rows)[:, None]


EXPECT = dict(
    right=[
        r"ignor|unlabel|without (a )?label|-100|pad|mask|not labelled|label",
        r"excess|select|rank|pick|top|chosen|argsort|order|choice",
        r"label|-100|pad|ignor|-?inf|zero|mask",
    ],
    place=[r"\bpick\b", r"\bexcess\b", r"argsort", r"masked_fill"],
    wrong=[
        r"(count|total|normali|divid).{0,30}(wrong|local|own)",
        r"(missing|not|never|twice).{0,20}(all.?)?reduc",
        r"no_sync.{0,30}(wrong|miss|early|late)",
        r"reference (loss|model).{0,40}(detach|gradient|stale)",
        r"attention mask.{0,30}(missing|wrong)",
    ],
)
WHY = """pick ranks the excess loss over all columns of the padded matrix. Where the label is -100
cross_entropy gives 0 and the stored reference loss is 0, hence an excess of 0, which is greater
than that of every labelled token on which the model beats the reference (negative excess). The
columns without a label take places among the chosen number, add nothing to the loss, and
labelled tokens that should be learnt from are dropped. Fix: excess = -inf where label == -100."""
