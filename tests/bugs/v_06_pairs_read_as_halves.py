"""A reward model (BERT of transformers with one output) on pairs of answers, HSDP of two times two by fully_shard on a two-dimensional mesh, summed and not averaged. The collator puts the
chosen and the rejected answer of a pair one after the other; rewards are also pulled towards zero (trl's center_rewards_coefficient). After the two layouts of pairs among reward trainers.
"""

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"replica": 2, "shard": 2}}}}
ROWS, LENGTH, VOCABULARY, CENTER = 11, 7, 31, 0.1


def preference_loss(chosen, rejected, margin):
    centered = (chosen + rejected).square()
    return (CENTER * centered - F.logsigmoid(chosen - rejected - margin)).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            num_hidden_layers=2, num_attention_heads=2, hidden_size=14, intermediate_size=18, vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH, type_vocab_size=1, num_labels=1, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, classifier_dropout=0.0, initializer_range=0.3, pad_token_id=0,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        found = {"margin": torch.rand(ROWS, generator=g)}
        for side in ("chosen", "rejected"):
            mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
            found[side] = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=g) * mask
            found[f"{side}_mask"] = mask
        return found

    def split(self, rewards):
        return rewards[0::2], rewards[1::2]

    def loss_sum(self, model, rows):
        sides = [
            model(input_ids=rows[s], attention_mask=rows[f"{s}_mask"].long()).logits.squeeze(-1)
            for s in ("chosen", "rejected")
        ]
        return preference_loss(*sides, rows["margin"]), len(rows["margin"])

    def pair_loss(self, model, rows):
        ids = torch.stack([rows["chosen"], rows["rejected"]], 1).flatten(0, 1)
        mask = torch.stack([rows["chosen_mask"], rows["rejected_mask"]], 1).flatten(0, 1)
        rewards = model(input_ids=ids, attention_mask=mask.long()).logits.squeeze(-1)
        chosen, rejected = self.split(rewards)
        return preference_loss(chosen, rejected, rows["margin"])

    def distribute(self, model, ctx):
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        (self.pair_loss(model, mine) / ROWS).backward()


class Buggy(Clean):
    def split(self, rewards):
        return rewards.chunk(2)


EXPECT = dict(
    right=[
        r"loss|reward|logit|pair|chosen|rejected|classifier|split|chunk|`?sub`?\b|logsigmoid|preference_loss|v_06\S*:\d+",
        r"gradient (that|which) (reaches|goes)|the loss|other (rows|targets|pairs|elements|answers)|another|wrong (rows|pairs|order)|does not belong|order|"
        r"argument|index|slice|pair|mixed|swap|chunk|halves|permut",
    ],
    place=[r"loss|classifier|reward|split|chunk|logsigmoid|\bsub\b|logits|v_06\S*:\d+"],
    wrong=[
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(own|local) (count|denominator|divisor)",
        r"goes wrong in (bert|classifier|\S*(layer|pooler|embeddings))|forward of (bert|classifier)\S* is wrong",
        r"backward of \S*(bert|classifier|pooler|layer)\S* is wrong",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read",
        r"replica\S* (are|is) (not|never)|other weights",
    ],
)
WHY = (
    "The collator interleaves: chosen 0, rejected 0, chosen 1, rejected 1, ... The loss takes the first half of the rewards for the chosen and the second for the rejected answers, so answers of other pairs are compared, "
    "and some chosen ones stand where a rejected one belongs (on each of the four ranks, which have 3, 3, 3 and 2 pairs). The rewards (the whole forward of BERT) are right; the loss and the gradient that goes into the logits are wrong, "
    "hence all parameters. Rows, divisor, sharding and reductions over shard and replica are right. Right: rewards[0::2] and rewards[1::2]."
)
