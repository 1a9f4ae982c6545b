"""Padding-free fine-tuning of a small Llama (transformers) in the style of DataCollatorWithFlattening / TRL packing: sequences lie one after another in a pack, `position_ids` start anew with each, and transformers finds the borders from them
(masking_utils.find_packed_sequence_indices) and builds a block-diagonal causal mask. FSDP2 over three ranks, sum of gradients, one pack per forward.

The bug: a pack that is not full is filled up, and for it the collator also hands over an `attention_mask` with zeros at the filling, as every collator does. transformers looks for borders only `if position_ids is not None and attention_mask is None`:
with a mask, all sequences of the pack see those before them. Origin: that condition in masking_utils.py and the reports on packing that silently attends across examples (transformers and TRL packing threads).
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, BUDGET = 23, 12
LENGTHS = [5, 7, 4, 5, 6, 6, 3, 9, 5, 4, 6]  # rank 0: 5+7, 4+5; rank 1: 6+6, 3+9; rank 2: 5+4, 6
ROWS, LONGEST = len(LENGTHS), max(LENGTHS)
IGNORE = -100


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=12,
                intermediate_size=18,
                num_hidden_layers=2,
                num_attention_heads=3,
                num_key_value_heads=3,
                max_position_embeddings=BUDGET,
                initializer_range=0.4,
                attn_implementation="eager",
                use_cache=False,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LONGEST), generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        places = torch.arange(LONGEST)
        logits = model(input_ids=rows["ids"]).logits[:, :-1]  # causal: filling comes after
        targets = rows["ids"].masked_fill(places >= rows["length"][:, None], IGNORE)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, int((rows["length"] - 1).sum())

    def distribute(self, model, ctx):
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def packs(self, rows):
        """Greedy: a new pack where the next sequence does not fit."""
        groups, room = [], 0
        for i, n in enumerate(rows["length"].tolist()):
            if n > room:
                groups.append([])
                room = BUDGET
            groups[-1].append(i)
            room -= n
        return [self.collate(rows, g) for g in groups]

    def mask(self, used):
        return {}

    def collate(self, rows, members):
        ids = torch.zeros(1, BUDGET, dtype=torch.long)
        places, targets = torch.zeros_like(ids), torch.full_like(ids, IGNORE)
        at = 0
        for i in members:
            n = int(rows["length"][i])
            ids[0, at : at + n] = rows["ids"][i, :n]
            places[0, at : at + n] = torch.arange(n)
            targets[0, at : at + n - 1] = rows["ids"][i, 1:n]
            at += n
        return {"input_ids": ids, "position_ids": places, **self.mask(at)}, targets

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        packs = self.packs(mine)
        count = sum((targets != IGNORE).sum() for _, targets in packs)
        dist.all_reduce(count, group=ctx.group("dp"))
        assert len(packs) == 2  # FSDP: as many forwards on every rank
        for inputs, targets in packs:
            logits = model(**inputs).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            (loss / count).backward()


class Buggy(Clean):
    def mask(self, used):
        if used == BUDGET:
            return {}
        return {"attention_mask": (torch.arange(BUDGET) < used).long()[None]}


EXPECT = dict(
    right=[
        r"(?i)attention|forward|mask|activation|leak|across|see|cross",
        r"(?i)pack|forward|attention|sequence|document|mask|border|bound",
        r"(?i)ranks? \(?0|rank 0|ranks? \(?2|rank 2|not full|padd|fill",
    ],
    place=[r"(?i)attention|mask|forward|layers?\W{0,2}0|self_attn"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)",
        r"(?i)divided by (its|their) own|mean of (the )?means|wrong divisor|divisor is wrong",
        r"(?i)rank 1 (is|was|computes?|has) .{0,20}(wrong|differ)|ranks? 0, ?1 and 2|all (three )?ranks (compute|run) .{0,20}wrong",
        r"(?i)(rows?|tokens?) .{0,20}(lost|missing|never read|read twice)",
        r"(?i)targets? (is|are|was|were) (wrong|other|shifted)",
    ],
)
WHY = (
    "Packs are [5,7], [4,5] on rank 0, [6,6], [3,9] on rank 1 and [5,4], [6] on rank 2 (budget 12). Full ones (all of rank 1, the first of rank 0) get no mask and are right. The second pack of rank 0 (4+5=9 tokens) and both of rank 2 (9 and 6 tokens) have filling and so an attention_mask; transformers then does not look for borders in position_ids, "
    "and the second sequence of such a pack attends to the first: row 3 on rank 0 and row 9 on rank 2. (Rotary positions still start anew, so it sees row 2 / row 8 at the same positions as itself.) The first sequence of a pack and the pack with the single row 10 are right, since attention is causal. "
    "So the forward is wrong, from the first attention layer on, in rows 3 and 9 only; their gradients are those of another function, all parameters on all ranks (FSDP shards) are wrong (with seed 0 by 14 to 55 percent of the maximum). Targets, count (49), divisor and the reduction are right. Rank 1 contributes rightly. Fix: no attention_mask with packed position_ids."
)
