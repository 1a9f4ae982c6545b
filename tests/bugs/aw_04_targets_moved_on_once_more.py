"""Packed fine-tuning of a tiny Qwen2ForCausalLM under fully_shard on two ranks, three micro-batches each. The collator packs documents into rows and makes the targets itself: the target of a token is the next token of its document, and
a document's last token has none (-100), so that nothing is predicted across a border. The library's loss gets the targets and num_items_in_batch, the number of targets of all ranks.

The bug: the targets go in as labels=, and the loss of the library shifts labels by one; as shift_labels= it would leave them alone. Every token learns the token after the next one. After huggingface/transformers PR 44642 (labels are
shifted internally; users shift them before), PR 36607 (shift_labels) and issue 47394 (GitForCausalLM shifts twice).
"""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TOKENS = 14, 9
DOCUMENTS = [[4, 5], [9], [2, 3, 4], [6, 3], [3, 3, 3], [7, 2], [5, 4], [2, 2, 5], [8, 1]]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 8), (8, 9)]]


class Clean:
    keyword = "shift_labels"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=TOKENS,
            initializer_range=0.4,
            tie_word_embeddings=False,
        )
        config._attn_implementation = "eager"
        return Qwen2ForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (len(DOCUMENTS), TOKENS), generator=g)
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
        for row, lengths in enumerate(DOCUMENTS):
            targets[row, torch.tensor(lengths).cumsum(0) - 1] = -100
        return {"ids": ids, "targets": targets}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["targets"].flatten(), reduction="sum")
        return loss, int((rows["targets"] != -100).sum())

    def distribute(self, model, ctx):
        fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
        return model

    def step(self, model, batch, ctx):
        items = int((batch["targets"] != -100).sum())
        for low, high in PARTS[ctx.rank]:
            targets = {"labels": batch["targets"][low:high]}
            targets[self.keyword] = batch["targets"][low:high]
            out = model(
                input_ids=batch["ids"][low:high],
                use_cache=False,
                num_items_in_batch=items,
                **targets,
            )
            (out.loss * ctx.world_size).backward()


class Buggy(Clean):
    keyword = "labels"


EXPECT = dict(
    right=[
        r"(?i)labels?|targets?|cross_entropy|loss",
        r"(?i)shift|moved|next|roll|other (labels?|targets?|numbers?|tokens?|values?)"
        r"|wrong (labels?|targets?)|another|different|off by|by one|(labels?|targets?) (is"
        r"|are) (not|other|wrong)",
        r"(?i)labels?|targets?",
    ],
    place=[r"(?i)loss|cross_entropy|labels?|targets?|lm_head|logit"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)goes wrong in the forward of (model|layers|the model's|embed)|attention .{0,30}wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)packed documents? (attend|see) each other|position.{0,30}wrong",
    ],
)
WHY = (
    "The targets are shifted already (target of token t is t + 1 of the same document, -100 at a document's end) and are shifted again inside the library's loss: token t is trained on the target of t + 1, i.e. on token t + 2, the "
    "-100 stand one place too early, and the last column has none. On both ranks, in all micro-batches and rows. The forward and the logits are right, the loss starts from other targets, so the gradient of the logits and of all "
    "parameters is wrong in direction. At a document's end its last token learns the second token of the next document, its last but one learns nothing. Divisor (all targets of the unshifted mask), sharding and reduce-scatter are "
    "right. Fix: pass shift_labels=targets (and labels too, to ask for the loss)."
)
