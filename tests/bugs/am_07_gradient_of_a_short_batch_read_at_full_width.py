"""Speech-to-text encoder-decoder in a pipeline of two stages (pp 2) with two replicas (dp 2): BertModel as encoder on the first stage, GPT2LMHeadModel with cross attention on the second (transformers, tiny, from configs), three
micro-batches each, all forwards first. Micro-batches are cut to their longest input. States and their gradients travel in flat buffers of the largest size. Every rank holds both parts; gradients are summed over dp and pp at the end.
The divisor is the number of target tokens.

The bug: on the first stage the received gradient buffer is viewed in the shape of the largest micro-batch (rows, full width, channels) and then cut to the own rows and width, but the sender wrote the gradient of a shorter micro-batch
densely. So rows behind the first get pieces of others. As in deepspeedai/DeepSpeed issue 4777 (pipeline buffers take the shape of the first micro-batch) and hpcaitech/ColossalAI issue 5940 (input shape varies).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
FRAMES, SOUNDS, TOKENS, WORDS, WIDTH = 8, 17, 4, 13, 8
PARTS = [[(0, 3), (3, 5), (5, 8)], [(8, 10), (10, 13), (13, 14)]]
LENGTHS = [8, 6, 4, 8, 5, 5, 3, 5, 7, 6, 6, 8, 4, 6]
MOST = 3


class SpeechToText(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = BertModel(
            BertConfig(
                vocab_size=SOUNDS,
                hidden_size=WIDTH,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=FRAMES,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                attn_implementation="eager",
            ),
            add_pooling_layer=False,
        )
        self.decoder = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS,
                n_positions=TOKENS,
                n_embd=WIDTH,
                n_layer=1,
                n_head=2,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=1,
                eos_token_id=1,
                add_cross_attention=True,
                initializer_range=0.3,
                use_cache=False,
                attn_implementation="eager",
            )
        )


def cut(rows):
    """The inputs up to the longest of these rows, and their mask."""
    longest = int(rows["length"].max())
    mask = (torch.arange(longest)[None] < rows["length"][:, None]).long()
    return rows["sound"][:, :longest] * mask, mask


def encode(model, rows):
    ids, mask = cut(rows)
    return model.encoder(input_ids=ids, attention_mask=mask).last_hidden_state


def decode_loss(model, states, rows):
    logits = model.decoder(
        input_ids=rows["word"], encoder_hidden_states=states, encoder_attention_mask=cut(rows)[1]
    ).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), rows["word"][:, 1:].flatten(), reduction="sum"
    )


class Clean:
    full_width = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return SpeechToText()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        return {
            "sound": torch.randint(1, SOUNDS, (rows, FRAMES), generator=g),
            "length": torch.tensor(LENGTHS),
            "word": torch.randint(WORDS, (rows, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = decode_loss(model, encode(model, rows), rows)
        return loss, len(rows["word"]) * (TOKENS - 1)

    def distribute(self, model, ctx):
        return model

    def send(self, x, peer):
        buffer = x.new_zeros(MOST * FRAMES * WIDTH)
        buffer[: x.numel()] = x.detach().flatten()
        dist.send(buffer, peer)

    def receive(self, shape, dtype, peer, full_width=False):
        buffer = torch.empty(MOST * FRAMES * WIDTH, dtype=dtype)
        dist.recv(buffer, peer)
        if full_width:
            return buffer.view(MOST, FRAMES, WIDTH)[: shape[0], : shape[1]].contiguous()
        return buffer[: shape.numel()].view(shape).clone()

    def step(self, model, batch, ctx):
        pp, dp = ctx.group("pp"), ctx.group("dp")
        stage = dist.get_rank(pp)
        peer = dist.get_global_rank(pp, 1 - stage)
        dtype = next(model.parameters()).dtype
        count = len(batch["word"]) * (TOKENS - 1)
        parts = [
            {k: v[low:high] for k, v in batch.items()} for low, high in PARTS[dist.get_rank(dp)]
        ]
        if stage == 0:
            sent = [encode(model, rows) for rows in parts]
            for states in sent:
                self.send(states, peer)
            for states in sent:
                states.backward(self.receive(states.shape, dtype, peer, self.full_width))
        else:
            shapes = [torch.Size((*cut(rows)[0].shape, WIDTH)) for rows in parts]
            received = [self.receive(shape, dtype, peer) for shape in shapes]
            for states, rows in zip(received, parts):
                states.requires_grad_(True)
                (decode_loss(model, states, rows) / count).backward()
            for states in received:
                self.send(states.grad, peer)
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=dp)
            dist.all_reduce(p.grad, group=pp)


class Buggy(Clean):
    full_width = True


EXPECT = dict(
    right=[
        r"(?i)backward|gradient|hand(s|ed)? (back|on|over)|sent back|receiv|returns?",
        r"(?i)encoder|stage|pipeline|pp\b|cut|boundary|states|receiv",
    ],
    place=[r"(?i)encoder|stage|pipeline|pp\b|cut|boundary|states"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(dropped|never read|overwritten)",
        r"(?i)forward (is|goes) wrong|goes wrong in the forward|(labels?|targets?) .{0,15}(wrong|shifted)",
        r"(?i)decoder.{0,40} (is|are) wrong|decoder's gradients? .{0,15}wrong",
        r"(?i)gradient of (another|the next|the previous|an earlier) micro.?batch|order of (the )?micro.?batches",
    ],
)
WHY = (
    "Forward, decoder and its gradients are right on all ranks. Stage 0 receives the gradient of the encoder's output in a flat buffer of 3 x 8 x 8; the sender wrote (rows, width, 8) densely, the receiver views it as (3, 8, 8) and cuts. "
    "With width 8 (replica 0, micro-batches 0 and 1; replica 1, micro-batch 1) this is right. With a smaller width the first row is right and later rows read at the wrong place: replica 0 micro-batch 2 (rows 5, 6, 7; width 5): rows 6 and "
    "7; replica 1 micro-batch 0 (rows 8, 9; width 7): row 9; replica 1 micro-batch 2 has one row (13, width 6) and is right. They get other rows' gradients, at shifted positions, or zeros from the buffer's end. So only the encoder's "
    "parameters are wrong, in direction, after the sums equally on all ranks. The order of micro-batches, divisor 42, masks and both all-reduces are right. Fix: buffer[: shape.numel()].view(shape)."
)
