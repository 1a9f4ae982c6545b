"""Trained steering vectors: a frozen tiny Qwen2 gets one trainable vector after each of its two decoder layers, added by a forward hook; rows are prompts, the loss is the cross entropy of the answer token, summed and divided by the rows
of all ranks. DDP on two ranks, three micro-batches each of one to three rows (no_sync before the last).

The bug: the hook was written when a decoder layer of transformers returned a tuple, and adds the vector to output[0] in place. Now the layer returns the tensor itself, and output[0] is the first row of the micro-batch: only that row is
steered. After the steering hooks of steering-vectors/steering-vectors (PR 18) and IBM/vLLM-Hook PR 35 (output[0] if isinstance(output, tuple) else output), andrewargatkiny/dense-attention PR 14.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
TOKENS, VOCABULARY, WIDTH = 5, 11, 8
PARTS = [[(0, 2), (2, 3), (3, 6)], [(6, 9), (9, 11), (11, 12)]]
ROWS = 12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=16,
                initializer_range=0.4,
                bos_token_id=None,
                eos_token_id=None,
            )
        ).requires_grad_(False)
        self.vectors = nn.ParameterList([torch.randn(WIDTH) * 0.3 for _ in range(2)])
        self.takes_tuple = False
        for layer, vector in zip(self.lm.model.layers, self.vectors):
            layer.register_forward_hook(self.hook_of(vector))

    def hook_of(self, vector):
        def steer(layer, args, output):
            if self.takes_tuple:
                hidden = output[0]
                hidden += vector
                return output
            return output + vector

        return steer

    def forward(self, ids):
        return self.lm(input_ids=ids, use_cache=False).logits[:, -1]


class Clean:
    takes_tuple = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "answer": torch.randint(VOCABULARY, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["ids"]), rows["answer"], reduction="sum")
        return loss, len(rows["ids"])

    def distribute(self, model, ctx):
        model.takes_tuple = self.takes_tuple
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = F.cross_entropy(
                    model(batch["ids"][low:high]), batch["answer"][low:high], reduction="sum"
                )
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    takes_tuple = True


EXPECT = dict(
    right=[
        r"(?i)forward|hook|steer|vectors?|layers?|output",
        r"(?i)rows?|first|hook",
        r"(?i)wrong|missing|not (added|steered|applied|the)|only|without|lacks?|differ"
        r"|deviat|left out|hook",
        r"(?i)layers?|vectors?|hook|steer",
    ],
    place=[r"(?i)layers?[. ]?(0|1)|vectors?|hook|decoder layer|steer"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is|agrees|was) (right|correct)|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|no_sync.{0,40}(wrong|missing)",
        r"(?i)(only|just) (on )?rank [01]\b|rank [01] alone",
        r"(?i)all rows .{0,20}wrong|answer.{0,20}(is|are) wrong|attention mask",
    ],
)
WHY = (
    "The decoder layer returns a tensor of shape rows x tokens x width, output[0] is the first row of the micro-batch, and the vector is added in place to that row only. Steered, and right: rows 0, 2, 3 (rank 0) and 6, 9, 11 (rank "
    "1). Not steered: rows 1 (rank 0, micro-batch 0), 4 and 5 (rank 0, micro-batch 2), 7 and 8 (rank 1, micro-batch 0), 10 (rank 1, micro-batch 1). Micro-batches of one row (row 2, row 11) are right. The forward goes wrong at the "
    "output of decoder layer 0 (its hook), then again at layer 1. The gradients of vectors.0 and vectors.1 lack the unsteered rows' share altogether (coefficient 0 for these six rows); the rest of the model is frozen. The divisor 12, "
    "reduction and no_sync are right. Fix: add to output if it is a tensor (and to output[0] only if it is a tuple)."
)
