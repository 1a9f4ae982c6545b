"""Sentence classification (transformers, BertForSequenceClassification from scratch) on two ranks, gradients summed by hand after three micro-batches each. The gradient that goes into the attention branch of each layer is shrunk by 0.3 (as
GLM and CogView shrink the embedding's, x * a + x.detach() * (1 - a)), here by a tensor hook on the output of attention.output.dense. The divisor is the number of rows of the whole batch.

The bug: the hook multiplies the gradient in place (`g.mul_(0.3)`) instead of giving back a new one. The sum with the residual hands one and the same gradient tensor to both sides, so the residual's gradient shrinks too. PyTorch's
documentation of Tensor.register_hook says that a hook should not modify its argument; compare pytorch/pytorch issue 60456 (hooks on the two branches of a ResNet sum see one gradient).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, TOKENS, VOCABULARY, CLASSES, SHRINK = 11, 6, 17, 3, 0.3
PARTS = [[(0, 2), (2, 3), (3, 6)], [(6, 7), (7, 9), (9, 11)]]


def by_formula(module, inputs, output):
    return output * SHRINK + output.detach() * (1 - SHRINK)


def by_hook(module, inputs, output):
    output.register_hook(lambda g: g * SHRINK)


def by_hook_in_place(module, inputs, output):
    def shrink(g):
        g.mul_(SHRINK)

    output.register_hook(shrink)


class Clean:
    shrinker = staticmethod(by_hook)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=TOKENS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
            initializer_range=0.4,
            attn_implementation="eager",
        )
        model = BertForSequenceClassification(config)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.1)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(3, TOKENS + 1, (ROWS,), generator=g)
        mask = (torch.arange(TOKENS)[None] < length[:, None]).long()
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=g) * mask,
            "mask": mask,
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def branches(self, model):
        return [layer.attention.output.dense for layer in model.bert.encoder.layer]

    def loss(self, model, rows, shrinker):
        handles = [m.register_forward_hook(shrinker) for m in self.branches(model)]
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
        for handle in handles:
            handle.remove()
        return F.cross_entropy(logits, rows["label"], reduction="sum")

    def loss_sum(self, model, rows):
        return self.loss(model, rows, by_formula), len(rows["label"])

    def step(self, model, batch, ctx):
        count = len(batch["label"])
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (self.loss(model, rows, self.shrinker) / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    shrinker = staticmethod(by_hook_in_place)


EXPECT = dict(
    right=[
        r"(?i)backward|gradient",
        r"(?i)attention|residual|LayerNorm|dense|skip|branch|layer",
        r"(?i)hook|in.?place|shr[iu]nk|scaled?|0\.3\b|residual|shared?|alias|wrong|differ|before",
    ],
    place=[r"(?i)attention\.output|attention|residual|hook|LayerNorm|encoder\.layer"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(classifier|pooler)\S* (is|are) wrong|padding",
    ],
)
WHY = (
    "The forward is right. In the backward, on both ranks and for all micro-batches and rows, the hook on the output of attention.output.dense multiplies the gradient by 0.3 in place; the addition (dense output + input_tensor) in front of "
    "attention.output.LayerNorm gave the same tensor to the residual side, so the residual's gradient is 0.3 times the right one as well. What the attention branch gets is right in layer 1 (the last). So the gradients of everything in "
    "and above layer 1 "
    "are right; those of all of layer 0 and of the embeddings are wrong (layer 0's residual once more, at the embeddings). The reduction and the divisor 11 are right. Fix: return g * 0.3."
)
