"""Image captioning with three captions per image on a pipeline of two stages: rank 0 holds the vision encoder (transformers ViTModel), rank 1 the decoder with cross-attention (GPT2LMHeadModel). Three micro-batches of 2, 3 and 1 images.
The encoder's states are sent once per image; rank 1 repeats them for the captions (repeat_interleave), which lie image by image, and sends back one gradient per image. Mean over all caption tokens; at the end the gradients of either
stage are broadcast, so that all ranks hold all of them.

The bug: the gradient of the repeated states is folded back as (captions, images) and summed over the first dimension, as if the captions came in whole rounds over the images (repeat), while they lie side by side. As in the confusion of
repeat and repeat_interleave in huggingface/diffusers issues 9215 and 12292, here on the way back.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, ViTConfig, ViTModel

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 2}}}}
VOCABULARY, LENGTH, WIDTH, CAPTIONS, PATCHES = 11, 5, 8, 3, 4
PARTS = [(0, 2), (2, 5), (5, 6)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        vision = ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            image_size=8,
            patch_size=4,
            num_channels=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        text = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=1,
            n_head=2,
            add_cross_attention=True,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.encoder = ViTModel(vision, add_pooling_layer=False)
        self.decoder = GPT2LMHeadModel(text)

    def see(self, images):
        return self.encoder(images).last_hidden_state

    def tell(self, states, captions):
        """The loss of captions (rows of tokens), each with its own copy of the states."""
        logits = self.decoder(input_ids=captions, encoder_hidden_states=states).logits
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1), captions[:, 1:].flatten(), reduction="sum"
        )


class Clean:
    in_rounds = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][1]
        return {
            "image": torch.randn(rows, 2, 8, 8, generator=g),
            "captions": torch.randint(VOCABULARY, (rows, CAPTIONS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        states = model.see(rows["image"]).repeat_interleave(CAPTIONS, 0)
        loss = model.tell(states, rows["captions"].flatten(0, 1))
        return loss, len(rows["image"]) * CAPTIONS * (LENGTH - 1)

    def fold(self, grad):
        if self.in_rounds:
            return grad.unflatten(0, (CAPTIONS, -1)).sum(0)
        return grad.unflatten(0, (-1, CAPTIONS)).sum(1)

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        tokens = len(batch["image"]) * CAPTIONS * (LENGTH - 1)
        sent = []
        for low, high in PARTS:
            if ctx.rank == 0:
                states = model.see(batch["image"][low:high])
                parcel = states.detach().contiguous()
                sent.append((states, parcel, dist.isend(parcel, 1, group=group)))
        for turn, (low, high) in enumerate(PARTS):
            like = torch.empty(high - low, PATCHES + 1, WIDTH, dtype=batch["image"].dtype)
            if ctx.rank == 1:
                dist.recv(like, 0, group=group)
                copies = like.repeat_interleave(CAPTIONS, 0).requires_grad_()
                loss = model.tell(copies, batch["captions"][low:high].flatten(0, 1))
                (loss / tokens).backward()
                dist.send(self.fold(copies.grad).contiguous(), 0, group=group)
            else:
                dist.recv(like, 1, group=group)
                sent[turn][2].wait()
                sent[turn][0].backward(like)
        for stage, module in enumerate((model.encoder, model.decoder)):
            for p in module.parameters():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.broadcast(p.grad, stage, group=group)


class Buggy(Clean):
    in_rounds = True


EXPECT = dict(
    right=[
        r"(?i)encoder|rank 0|ranks? \[?0\]?|first stage|stage 0|earlier stage|images?",
        r"(?i)gradient|backward|hands? (back|on)",
        r"(?i)sent|send|receiv|arriv|hand|pipeline|stage|transport|other rows|another row|rows|images?|fold|order",
    ],
    place=[r"(?i)encoder|stage|rank 0|states|fold|boundary|sent|receiv"],
    wrong=[
        r"(?i)decoder[^.;]{0,40} (is|are) wrong|decoder[^.;]{0,30}gradients? .{0,15}wrong",
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|mask .{0,20}(is )?wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never|swapped)|of another micro.?batch",
        r"(?i)(inside|own backward of|backward of) .{0,20}(ViT|attention|layernorm).{0,20}wrong",
    ],
)
WHY = (
    "Rank 1 folds the gradient of the copies of the encoder's states as (3 captions, images): image i of a micro-batch gets the gradients of the copies i, i + n, i + 2n (n images) instead of 3i, 3i + 1, 3i + 2. In micro-batch 0 (images "
    "0, 1) image 0 gets those of copies 0, 2, 4 and image 1 those of 1, 3, 5; in micro-batch 1 (images 2-4) image 2 gets 0, 3, 6, and so on; micro-batch 2 has one image and is right. The sum over the images of a micro-batch is right, "
    "the assignment to the images is not. The forward and the loss are right, the decoder's gradients (rank 1) are right, and so is the encoder's own backward; only the gradient that rank 0 receives for the states of micro-batches 0 "
    "and 1 is wrong, and with it all gradients of the encoder (on both ranks after the broadcast). The bias of the encoder's last layer norm, which sums over images and patches, stays right. Fix: unflatten as (images, captions) and sum "
    "over the captions."
)
