"""A hand-made "ZeRO-3" for a DistilBERT classifier (transformers) on three ranks: every parameter is a DTensor cut along its first dimension (uneven: 8 = 3 + 3 + 2), the step gathers full copies, runs two micro-batches of uneven size
through functional_call, accumulates the gradients of the full copies and puts them back as sharded gradients. The divisor is the number of sentences of all ranks.

The bug: the full gradient is cut with distribute_tensor(grad, mesh, [Shard(0)]), which scatters the first rank's tensor and discards those of the others, instead of from_local(grad, mesh, [Partial()]).redistribute([Shard(0)]). As
asked in pytorch issue 88838 ("does rank 0's tensor win, and all the other ranks' local tensors are discarded?"), compare PR 143883 (src_data_rank).
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.func import functional_call
from torch.nn import functional as F
from transformers import DistilBertConfig, DistilBertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, TOKENS, VOCABULARY, CLASSES = 10, 5, 17, 4
PARTS = [[(0, 3), (3, 4)], [(4, 5), (5, 7)], [(7, 9), (9, 10)]]


class Clean:
    dealt = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return DistilBertForSequenceClassification(
            DistilBertConfig(
                vocab_size=VOCABULARY,
                max_position_embeddings=TOKENS,
                n_layers=2,
                n_heads=2,
                dim=8,
                hidden_dim=12,
                dropout=0.0,
                attention_dropout=0.0,
                seq_classif_dropout=0.0,
                initializer_range=0.3,
                num_labels=CLASSES,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        mesh = DeviceMesh.from_group(ctx.group("dp"), "cpu")
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                shard = distribute_tensor(param.detach(), mesh, [Shard(0)])
                module.register_parameter(name, nn.Parameter(shard))
        return model

    def shard_gradient(self, grad, param):
        mesh, cut = param.device_mesh, param.placements
        if self.dealt:
            return distribute_tensor(grad, mesh, cut)
        return DTensor.from_local(grad, mesh, [Partial()]).redistribute(placements=cut)

    def step(self, model, batch, ctx):
        full = {
            name: param.full_tensor().detach().requires_grad_()
            for name, param in model.named_parameters()
        }
        for low, high in PARTS[ctx.rank]:
            kwargs = {"input_ids": batch["ids"][low:high]}
            logits = functional_call(model, full, (), kwargs).logits
            loss = F.cross_entropy(logits, batch["label"][low:high], reduction="sum")
            (loss / ROWS).backward()
        for name, param in model.named_parameters():
            param.grad = self.shard_gradient(full[name].grad, param)


class Buggy(Clean):
    dealt = True


EXPECT = dict(
    right=[
        r"(?i)ranks? (1|2|1 and 2|1, ?2)|other ranks|first rank|(only|just|alone).{0,20}rank 0|rank 0.{0,30}(only|alone)|rows? (4|5|6|7|8|9)",
        r"(?i)not (been )?(all.?)?(reduced|summed)|never|miss|lost|dropped|discard|left out|absent|only|zero|alone|without|not in",
    ],
    place=[
        r"(?i)reduc|sum|shard|scatter|distribute_tensor|gradients? of (all|every)|all parameters"
    ],
    wrong=[
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)each rank (keeps|has|holds) (only )?its own|own slice",
        r"(?i)reduced twice|summed twice|counted twice|last micro.?batch (only|alone)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)recomput|labels? .{0,20}(is|are) wrong|only (the )?(classifier|pre_classifier|embeddings)",
    ],
)
WHY = (
    "Forward, backward, accumulation over the two micro-batches and the divisor 10 are right on all ranks. distribute_tensor scatters the full gradient of rank 0 over the ranks: every rank's shard holds its slice of rank 0's local "
    "gradient, i.e. of rows 0-3 only. The rows 4-6 of rank 1 and 7-9 of rank 2 are missing from every shard of every parameter, on all ranks; nothing is summed. It is not that each rank keeps its own slice of its own gradient. Fix: "
    "DTensor.from_local(grad, mesh, [Partial()]).redistribute(placements=[Shard(0)]), a reduce-scatter."
)
