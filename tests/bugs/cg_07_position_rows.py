"""OPT (transformers, small config) in two pipeline stages, data parallel beside it: a mesh of dp 2
x pp 2.

The first stage embeds the tokens and runs the first layer, the second runs the second layer, the
final norm and the head. The stages call the parts of the transformers model themselves, since its
forward cannot be cut.

The bug: the first stage looks the positions up in ``embed_positions.weight`` itself. OPT's table
(like BART's) has two rows more than there are positions and its own forward adds an offset of 2,
which is left out. After stage wrappers and inference ports of OPT that produced fluent nonsense
for this.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import OPTConfig, OPTForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}

ROWS, LENGTH, WORDS, WIDTH = 7, 9, 31, 12


def embed(decoder, ids):
    places = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.ones_like(ids)
    return decoder.embed_tokens(ids) + decoder.embed_positions(mask, position_ids=places)


def embed_rows(decoder, ids):
    places = torch.arange(ids.shape[1]).expand_as(ids)
    return decoder.embed_tokens(ids) + F.embedding(places, decoder.embed_positions.weight)


class Clean:
    embed = staticmethod(embed)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(8 + self.seed)
        config = OPTConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=3,
            ffn_dim=19,
            max_position_embeddings=LENGTH + 2,
            dropout=0.0,
            attention_dropout=0.0,
            layerdrop=0.0,
            init_std=0.2,
            use_cache=False,
            pad_token_id=1,
            bos_token_id=2,
            eos_token_id=2,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        return OPTForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(9 + self.seed)
        ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=g)
        end = torch.randint(5, LENGTH + 1, (ROWS, 1), generator=g)
        return {"ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) >= end, -100)}

    def cost(self, logits, labels):
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits
        return self.cost(logits, rows["labels"]), (rows["labels"][:, 1:] != -100).sum()

    def distribute(self, model, ctx):
        decoder = model.model.decoder
        if ctx.coords["pp"] == 0:
            model.lm_head = decoder.final_layer_norm = None
            decoder.layers[1] = torch.nn.Identity()
        else:
            decoder.embed_tokens = decoder.embed_positions = None
            decoder.layers[0] = torch.nn.Identity()
        return model

    def layer(self, module, hidden):
        causal = (
            torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(hidden.shape[0], 1, -1, -1)
        )
        return module(hidden, attention_mask=causal)

    def step(self, model, batch, ctx):
        data, pipe = ctx.group("dp"), ctx.group("pp")
        ranks = dist.get_process_group_ranks(pipe)
        count = (batch["labels"][:, 1:] != -100).sum()
        mine = {k: torch.tensor_split(v, 2)[ctx.coords["dp"]] for k, v in batch.items()}
        decoder, kept = model.model.decoder, []
        for ids, labels in zip(*(torch.tensor_split(v, 2) for v in mine.values()), strict=True):
            if ctx.coords["pp"] == 0:
                hidden = self.layer(decoder.layers[0], self.embed(decoder, ids))
                dist.send(hidden.detach().contiguous(), ranks[1], group=pipe)
                kept.append((hidden, None))
            else:
                got = torch.empty(*ids.shape, WIDTH, dtype=model.lm_head.weight.dtype)
                dist.recv(got, ranks[0], group=pipe)
                got.requires_grad_(True)
                hidden = decoder.final_layer_norm(self.layer(decoder.layers[1], got))
                kept.append((got, self.cost(model.lm_head(hidden), labels) / count))
        for hidden, loss in kept:
            if loss is None:
                back = torch.empty_like(hidden)
                dist.recv(back, ranks[1], group=pipe)
                hidden.backward(back)
            else:
                loss.backward()
                dist.send(hidden.grad.contiguous(), ranks[0], group=pipe)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=data)


class Buggy(Clean):
    embed = staticmethod(embed_rows)


EXPECT = dict(
    right=[
        r"position",
        (
            r"offset|\+ ?2|by two|two rows|shift|first two|rows? 0|wrong "
            r"rows?|(bypass|without|skip|instead of).{0,60}forward"
        ),
    ],
    place=[
        r"embed_rows",
        r"embed_positions",
        r"\bembed\b",
        r"first stage|stage 0|position (table|embedding)",
    ],
    wrong=[
        r"padding|attention mask",
        r"divis(or|ion)|normali[sz]|token count",
        r"(position.{0,40}restart|restart.{0,40}micro)",
        r"micro-?batch.{0,40}(order|swapped|lost)|tied",
    ],
)

WHY = (
    "OPTLearnedPositionalEmbedding holds two rows more than positions and adds an offset of "
    "2 in its forward; the stage reads embed_positions.weight with the bare positions, so "
    "position p uses row p instead of row p + 2. The gradient of embed_positions.weight "
    "falls on rows 0 to LENGTH - 1 instead of 2 to LENGTH + 1, and since each token gets "
    "another position vector the activations and so all other gradients of both stages are "
    "wrong too. Micro-batches, hand-over between the stages, divisor and the sum over dp are "
    "right. A right cause says that the position table is read without the model's offset of "
    "two. The fix is to call decoder.embed_positions itself, or to add its offset."
)
