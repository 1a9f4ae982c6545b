"""A BERT encoder (transformers) probed by a learned mixture of all its hidden states, in a
pipeline of two stages.

Each stage adds up its part of the mixture and the last one has the sum; two micro-batches of
unlike size. The second stage collects its hidden states as output_hidden_states does, beginning
with its input, which the first stage has already counted as its last one. After weighted-layer-
sum probes (SUPERB) moved to pipeline stages.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
LAYERS, FIRST, DIM, CLASSES = 4, 2, 12, 5


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=31,
            hidden_size=DIM,
            num_hidden_layers=LAYERS,
            num_attention_heads=3,
            intermediate_size=17,
            max_position_embeddings=9,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.mixture = nn.Parameter(torch.randn(LAYERS + 1) * 0.5)
        self.classifier = nn.Linear(DIM, CLASSES)
        with torch.no_grad():
            for p in self.bert.parameters():
                p.add_(torch.randn_like(p) * 0.1)

    def forward(self, ids):
        states = self.bert(input_ids=ids, output_hidden_states=True).hidden_states
        weights = self.mixture.softmax(0)
        mixed = sum(w * h for w, h in zip(weights, states, strict=True))
        return self.classifier(mixed.mean(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(91 + self.seed)
        return Probe()

    def batch(self):
        g = torch.Generator().manual_seed(101 + self.seed)
        return {
            "ids": torch.randint(31, (7, 6), generator=g),
            "y": torch.randint(CLASSES, (7,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["ids"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        layers = model.bert.encoder.layer
        first = dist.get_rank(ctx.group("pp")) == 0
        for i in range(LAYERS):
            if (i < FIRST) != first:
                layers[i] = nn.Identity()
        if first:
            model.classifier = nn.Identity()
        else:
            model.bert.embeddings = nn.Identity()
        return model

    def first_stage(self, model, ids):
        h = model.bert.embeddings(input_ids=ids)
        states = [h]
        for layer in model.bert.encoder.layer[:FIRST]:
            h = layer(h)
            states.append(h)
        weights = model.mixture.softmax(0)[: FIRST + 1]
        return h, sum(w * s for w, s in zip(weights, states, strict=True))

    def last_stage(self, model, h, mixed):
        weights = model.mixture.softmax(0)
        for i, layer in enumerate(model.bert.encoder.layer[FIRST:], start=FIRST + 1):
            h = layer(h)
            mixed = mixed + weights[i] * h
        return model.classifier(mixed.mean(1))

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        rank = dist.get_rank(group)
        peer = dist.get_global_rank(group, 1 - rank)
        ids, ys = batch["ids"].tensor_split(2), batch["y"].tensor_split(2)
        kept = []
        for part, y in zip(ids, ys, strict=True):
            if rank == 0:
                out = torch.stack(self.first_stage(model, part))
                dist.send(out.detach().contiguous(), peer)
                kept.append(out)
            else:
                wire = torch.empty(2, *part.shape, DIM, dtype=model.mixture.dtype)
                dist.recv(wire, peer)
                wire.requires_grad_()
                loss = F.cross_entropy(self.last_stage(model, *wire.unbind()), y, reduction="sum")
                (loss / len(batch["y"])).backward()
                kept.append(wire)
        for t in kept:
            if rank == 0:
                grad = torch.empty_like(t)
                dist.recv(grad, peer)
                t.backward(grad)
            else:
                dist.send(t.grad.contiguous(), peer)
        dist.all_reduce(model.mixture.grad, group=group)


class Buggy(Clean):
    def last_stage(self, model, h, mixed):
        states = [h]
        for layer in model.bert.encoder.layer[FIRST:]:
            h = layer(h)
            states.append(h)
        weights = model.mixture.softmax(0)[FIRST:]
        mixed = mixed + sum(w * s for w, s in zip(weights, states, strict=True))
        return model.classifier(mixed.mean(1))


EXPECT = {
    "right": [
        (
            r"twice|double|again|both stages|two times|duplicat|second time|already (counted|"
            r"added|includ)"
        ),
        (
            r"hidden state|boundary|mixture|layer sum|input of (the )?(second|last|next)|"
            r"stage.?0'?s? last|weighted sum|received"
        ),
    ],
    "place": [
        r"last_stage",
        r"states ?= ?\[h\]",
        r"\bmixture\b",
        r"softmax\(0\)\[FIRST",
        r"\[FIRST:\]",
    ],
    "wrong": [
        r"softmax over (the|its) own|softmax (is )?(taken )?(only )?over (the )?stage",
        r"mixture\S* (gradient|grad)\S* (is )?(not reduced|reduced twice|summed twice)",
        r"micro.?batch",
        r"gradient of the (hidden state|mixture|skip) (is )?not (sent|returned)|detach",
        r"attention mask",
    ],
}

WHY = (
    "The hidden state at the stage boundary is the last one of stage 0 and the input of stage "
    "1; stage 1 starts its list with its input, so this state enters the mixture twice, with "
    "weight 2 * w[FIRST]. The forward is wrong, so all gradients are: those of the "
    "classifier, of every layer and the embeddings, and of the mixture weights, with that of "
    "entry FIRST most. A right cause says that the boundary hidden state is counted (added) "
    "in both stages. Fix: stage 1 adds only the outputs of its own layers."
)
