"""Distillation with hints: a frozen tiny BERT of four layers (transformers) teaches a student of two layers. The student runs as a pipeline of two stages (embedding and first layer on rank 0, second layer and head on rank 1), three
micro-batches; each stage adds the mean squared distance between its output and the state behind the corresponding teacher layer (second and fourth), stage 1 also the cross entropy. Activations go to rank 1, their gradients come
back; at the end the gradients of all parameters are summed over the stages.

The bug: output_hidden_states has the embedding output at index 0, and the hints are read at the zero-based number of the teacher layer (1 and 3): the state before the layer, not behind it. The off-by-one of
huawei-noah/Pretrained-Language-Model issue 166 (mapping of hidden states) and of the question goombalab/phi-mamba issue 4 (hidden_states[0] is the embedding output).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
ROWS, LENGTH, WORDS, WIDTH, CLASSES, HINT = 7, 5, 13, 8, 4, 0.6
PARTS = [(0, 2), (2, 3), (3, 7)]
LAYERS = [1, 3]  # teacher layers (from 0) whose outputs the student's layers imitate


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.5)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        config = BertConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=4,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
            attn_implementation="eager",
        )
        self.teacher = BertModel(config, add_pooling_layer=False).requires_grad_(False)

    def hint(self, ids, stage, entrance=False):
        with torch.no_grad():
            states = self.teacher(input_ids=ids, output_hidden_states=True).hidden_states
        return states[LAYERS[stage] + (0 if entrance else 1)]

    def hint_loss(self, x, ids, stage, entrance=False):
        target = self.hint(ids, stage, entrance)
        return HINT * F.mse_loss(x, target, reduction="sum") / (LENGTH * WIDTH)

    def first(self, ids):
        return self.layers[0](self.embed(ids) + self.places)

    def second(self, x):
        x = self.layers[1](x)
        return x, self.head(x.mean(1))


class Clean:
    entrance = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pair()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        x = model.first(rows["ids"])
        y, logits = model.second(x)
        loss = F.cross_entropy(logits, rows["labels"], reduction="sum")
        loss = loss + model.hint_loss(x, rows["ids"], 0) + model.hint_loss(y, rows["ids"], 1)
        return loss, len(rows["labels"])

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        peer = dist.get_global_rank(group, 1 - dist.get_rank(group))
        dtype = model.places.dtype
        for low, high in PARTS:
            ids, labels = batch["ids"][low:high], batch["labels"][low:high]
            if dist.get_rank(group) == 0:
                x = model.first(ids)
                dist.send(x.detach().contiguous(), peer, group=group)
                grad = torch.empty_like(x)
                loss = model.hint_loss(x, ids, 0, self.entrance) / ROWS
                dist.recv(grad, peer, group=group)
                torch.autograd.backward([loss, x], [None, grad])
            else:
                x = torch.empty(high - low, LENGTH, WIDTH, dtype=dtype)
                dist.recv(x, peer, group=group)
                x.requires_grad_()
                y, logits = model.second(x)
                loss = F.cross_entropy(logits, labels, reduction="sum")
                loss = loss + model.hint_loss(y, ids, 1, self.entrance)
                (loss / ROWS).backward()
                dist.send(x.grad.contiguous(), peer, group=group)
        for p in model.parameters():
            if p.requires_grad:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    entrance = True


EXPECT = dict(
    right=[
        r"(?i)hint|distill|teacher|loss|target",
        r"(?i)wrong|other|different|differ|not (the )?(same|right)|before|entrance|off by one|earlier|previous|deviat|index|layer",
        r"(?i)hint|distill|teacher|mse|target|term|loss",
    ],
    place=[r"(?i)hint|teacher|target|loss|hidden_state"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)(layers\.[01]|embed|head)[^.]{0,30}(forward|output) (is|goes) wrong|goes wrong in the forward of (layers|embed|head)",
        r"(?i)backward of (layers|embed|head)[^.]{0,30}is wrong|gradient (sent|that comes) back[^.]{0,40}(lost|missing|of another)",
        r"(?i)labels? (is|are) wrong|cross.?entropy (is|goes) wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|swapped)|only (on )?rank [01]\b|only stage [01]\b",
    ],
)
WHY = (
    "The targets of both hint terms are wrong: hidden_states[1] and [3] of the teacher instead of [2] and [4], the states before teacher layers 1 and 3 (from 0) instead of behind them. So the loss is wrong on both ranks, in all "
    "three micro-batches and all rows: on rank 0 the hint of the student's first layer (it reaches embed, places, layers.0), on rank 1 the hint of the second layer (it reaches layers.1 and, through the gradient sent back, embed, "
    "places, layers.0). The head's gradient is right (the hints do not reach it, and logits and cross entropy are right). The student's forward, the transport of activations and gradients, the sum over the stages and the divisor 7"
    " are right. Fix: hidden_states[layer + 1]."
)
