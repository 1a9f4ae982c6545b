"""Transformers' OPT from a small config, right-padded rows, cut by hand into two pipeline stages:
the first has the embeddings and layer 0, the second layer 1, the final norm and the head;
micro-batches of unequal size.

Bug: the first stage looks the positions up in embed_positions.weight itself; the module adds an
offset of two to the position first (its table has two rows more), which the stage leaves out.
After hand-made first stages of OPT and BART pipelines (OPTLearnedPositionalEmbedding.offset,
BartLearnedPositionalEmbedding.offset).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import OPTConfig, OPTForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
VOCAB, WIDTH, TIME, ROWS, PAD = 31, 12, 9, 7, 1


class Clean:
    micro = 3

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 71)
        config = OPTConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            word_embed_proj_dim=WIDTH,
            ffn_dim=20,
            num_hidden_layers=2,
            num_attention_heads=3,
            max_position_embeddings=13,
            dropout=0.0,
            attention_dropout=0.0,
            layerdrop=0.0,
            init_std=0.3,
            pad_token_id=PAD,
            bos_token_id=2,
            eos_token_id=2,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
        return OPTForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 700)
        ids = torch.randint(2, VOCAB, (ROWS, TIME), generator=g)
        length = torch.tensor([9, 7, 8, 5, 9, 6, 4])[:, None]
        mask = (torch.arange(TIME) < length).long()
        return {"ids": torch.where(mask.bool(), ids, PAD), "mask": mask}

    @staticmethod
    def labels(rows):
        return torch.where(rows["mask"].bool(), rows["ids"], -100)[:, 1:]

    def token_loss(self, logits, rows):
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            self.labels(rows).flatten(),
            ignore_index=-100,
            reduction="sum",
        )

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
        return self.token_loss(logits, rows), int((self.labels(rows) != -100).sum())

    def distribute(self, model, ctx):
        decoder = model.model.decoder
        if dist.get_rank(ctx.group("pp")) == 0:
            decoder.layers[1] = torch.nn.Identity()
            decoder.final_layer_norm = model.lm_head = None
        else:
            decoder.layers[0] = torch.nn.Identity()
            decoder.embed_tokens = decoder.embed_positions = None
        return model

    def embed(self, decoder, rows):
        return decoder.embed_tokens(rows["ids"]) + decoder.embed_positions(rows["mask"], 0)

    @staticmethod
    def bias(rows, dtype):
        seen = torch.ones(TIME, TIME).tril().bool() & rows["mask"][:, None, None, :].bool()
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        stage, peers = dist.get_rank(group), dist.get_process_group_ranks(group)
        decoder = model.model.decoder
        total = int((self.labels(batch) != -100).sum())
        for lo in range(0, ROWS, self.micro):
            rows = {k: v[lo : lo + self.micro] for k, v in batch.items()}
            if stage == 0:
                x = self.embed(decoder, rows)
                x = decoder.layers[0](x, attention_mask=self.bias(rows, x.dtype))
                dist.send(x.detach().contiguous(), peers[1])
                grad = torch.empty_like(x)
                dist.recv(grad, peers[1])
                x.backward(grad)
            else:
                x = torch.empty(len(rows["ids"]), TIME, WIDTH, dtype=model.lm_head.weight.dtype)
                dist.recv(x, peers[0])
                x.requires_grad_()
                h = decoder.layers[1](x, attention_mask=self.bias(rows, x.dtype))
                logits = model.lm_head(decoder.final_layer_norm(h))
                (self.token_loss(logits, rows) / total).backward()
                dist.send(x.grad.contiguous(), peers[0])


class Buggy(Clean):
    def embed(self, decoder, rows):
        places = (rows["mask"].cumsum(1) - 1).clamp(min=0)
        return F.embedding(rows["ids"], decoder.embed_tokens.weight) + F.embedding(
            places, decoder.embed_positions.weight
        )


EXPECT = dict(
    right=[
        "position|embed_positions|places",
        (
            r"offset|(by|of|plus|\+|first|adds?) (2|two)|two (rows|too|lower|early)"
            r"|shifted|wrong rows?|self\.offset|\+\s?2"
        ),
    ],
    place=[
        r"\bembed\b|def embed",
        "embed_positions",
        "places",
        "OPTLearnedPositionalEmbedding",
        "first stage|stage 0",
    ],
    wrong=[
        "pad(ding)?_idx|padding (token|position)s? (are|is) attended",
        "attention mask (is )?(missing|wrong)",
        "(loss|token) count",
        "positions? (restart|counted) (in|per|from) (each|every|the) (micro|stage)",
        "receive buffer|recv",
        r"embed_scale|scal\w+ of the embedding",
    ],
)
WHY = (
    "OPT's embed_positions is a table with two rows more than positions, and its forward adds "
    "offset = 2 before it looks up. The first stage indexes embed_positions.weight with the "
    "bare position, so each token gets the row of two places earlier: rows 0 and 1 get "
    "gradient that they should not have, the last two used rows get none, and those between "
    "get that of another position. As the activations are wrong, all other gradients of both "
    "stages are wrong too, but by values only. A right cause says that the first stage looks "
    "positions up without the module's offset of two. Fix: call decoder.embed_positions(mask, "
    "0), or add embed_positions.offset."
)
