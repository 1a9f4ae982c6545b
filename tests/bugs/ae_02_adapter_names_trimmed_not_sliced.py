"""One frozen BERT encoder shared by several tenants: each row of a batch names the LoRA adapter it belongs to (peft's mixed batches, `adapter_names=[...]`, one of them "__base__" for the rows of the control group), with a common classifier
that is trained on all rows. Two data ranks with 5 and 4 rows, micro-batches of 2, 2, 1 and 2, 2 rows; every batch is built whole and cut with accelerate's `slice_tensors`, as accelerate's dispatching data loader does it.

The bug: `slice_tensors` cuts tensors only and leaves the list of strings whole, so every rank and every micro-batch still holds the names of the full batch. peft then complains that there are more names than rows, and the list is trimmed
to the number of rows: always the first names of the full batch, whatever rows were taken. After huggingface/accelerate #3849 / PR #3850 (non-tensor values under dispatch_batches pass through unsliced) and #1816.
"""

import torch
import torch.distributed as dist
from accelerate.utils import slice_tensors
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
LENGTH, WORDS, CLASSES = 6, 17, 4
TENANTS = ["north", "south", "east", "__base__"]
PARTS = [[(0, 2), (2, 4), (4, 5)], [(5, 7), (7, 9)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=18,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="eager",
        )
        lora = LoraConfig(r=2, lora_alpha=4, target_modules=["query", "value"], lora_dropout=0.0)
        self.encoder = get_peft_model(
            BertModel(config, add_pooling_layer=False), lora, adapter_name=TENANTS[0]
        )
        for name in TENANTS[1:3]:
            self.encoder.add_adapter(name, lora)
        self.classifier = nn.Linear(12, CLASSES)
        for name, p in self.encoder.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.4)
            p.requires_grad_("lora_" in name)
        self.eval()  # peft takes adapter_names in evaluation mode only; there is no dropout anyway

    def forward(self, ids, names):
        hidden = self.encoder(input_ids=ids, adapter_names=names).last_hidden_state
        return self.classifier(hidden.mean(1))


def names_of(tenant):
    return [TENANTS[t] for t in tenant.tolist()]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "ids": torch.randint(WORDS, (rows, LENGTH), generator=g),
            "tenant": torch.tensor([0, 1, 3, 2, 1, 2, 2, 0, 1]),
            "label": torch.randint(CLASSES, (rows,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], names_of(rows["tenant"]))
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def names_for(self, names, low, high):
        return names[low:high]

    def step(self, model, batch, ctx):
        collated = {
            "ids": batch["ids"],
            "label": batch["label"],
            "adapter_names": names_of(batch["tenant"]),
        }
        for low, high in PARTS[ctx.rank]:
            mine = slice_tensors(collated, slice(low, high))
            names = self.names_for(mine["adapter_names"], low, high)
            logits = model(mine["ids"], names)
            loss = F.cross_entropy(logits, mine["label"], reduction="sum") / len(batch["label"])
            loss.backward()
        for p in model.parameters():
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def names_for(self, names, low, high):
        return names[: high - low]


EXPECT = dict(
    right=[
        r"(?i)lora|adapter|tenant|encoder",
        r"(?i)(other|wrong|foreign|different|another|mis|first|not (the )?(own|right)|unlike|differ)",
        r"(?i)rows?|micro.?batch|batch|names?|input|forward|adapter_names|tenant",
    ],
    place=[r"(?i)lora|adapter|tenant|query|value|encoder"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|forward agrees|wrong only in the backward",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)only the last micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)only (on )?rank 1\b",
        r"(?i)labels? (is|are) (wrong|of other rows)",
    ],
)
WHY = (
    "Rows 0 to 8 belong to north, south, base, east, south, east, east, north, south. Every micro-batch runs under the names of the first rows of the full batch instead: north, south for two rows, north for one. Right are rows 0 and 1 "
    "(rank 0, first micro-batch) and, by chance, rows 7 and 8 (rank 1, second micro-batch: north, south fits); rank 0's rows 2, 3 and 4 and rank 1's rows 5 and 6 go through a foreign adapter. So rank 0's second "
    "and third and rank 1's first micro-batch are wrong, rows 0, 1, 7 and 8 are right. 'east' is used by no row at all: its lora_A and lora_B have a zero gradient; north and south get the gradients of foreign rows and miss some of their own, "
    "and the classifier sees wrong features for the wrong rows: every trained parameter is wrong, equally on both ranks (the sum is right). Input ids, labels, divisor 9 and reduction are right. The error is in the forward of the LoRA layers "
    "(query and value of the first layer on). Fix: slice the list of names by the rows of the rank and the micro-batch, or carry the tenant as a tensor."
)
