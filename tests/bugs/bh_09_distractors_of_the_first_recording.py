"""Contrastive pretraining of a tiny Wav2Vec2Model of transformers (random weights, no dropout) under DDP on three ranks with unlike micro-batches (no_sync before the last). Masked frames have to find their own latent among four distractors,
frames of the same recording whose places are part of the batch. Latents of a micro-batch lie flat, so the places of recording r have to be moved by r times the number of frames. The divisor is the number of masked frames of all ranks.

The bug: the places are not moved, so all recordings of a micro-batch draw their distractors from the first one. After the sampler of negatives of wav2vec 2.0 (facebookresearch/fairseq issue 3189, huggingface/transformers pull request
12764), which corrects the sampled indices for the batch.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Wav2Vec2Config, Wav2Vec2Model

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SAMPLES, FRAMES, MASKED, DISTRACTORS, WIDTH, ROWS = 53, 8, 3, 4, 6, 10
PARTS = [[(0, 1), (1, 3), (3, 4)], [(4, 7)], [(7, 8), (8, 10)]]


class Pretraining(nn.Module):
    def __init__(self):
        super().__init__()
        config = Wav2Vec2Config(
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            conv_dim=(6, 6),
            conv_kernel=(5, 3),
            conv_stride=(3, 2),
            num_feat_extract_layers=2,
            feat_extract_norm="layer",
            conv_bias=True,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            do_stable_layer_norm=False,
            mask_time_prob=0.3,
            mask_feature_prob=0.0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            initializer_range=0.3,
        )
        self.wav2vec2 = Wav2Vec2Model(config)
        self.context, self.latent = nn.Linear(8, WIDTH), nn.Linear(6, WIDTH)
        self.by_recording = True

    def forward(self, sound, mask, distractors):
        out = self.wav2vec2(input_values=sound, mask_time_indices=mask)
        context, latent = self.context(out.last_hidden_state), self.latent(out.extract_features)
        rows, frames = latent.shape[:2]
        if self.by_recording:
            distractors = distractors + frames * torch.arange(rows)[:, None, None]
        others = latent.flatten(0, 1)[distractors]
        choices = torch.cat([latent[:, :, None], others], 2)
        scores = F.cosine_similarity(context[:, :, None], choices, dim=-1) / 0.3
        scores = scores[mask]
        right = torch.zeros(len(scores), dtype=torch.long)
        return F.cross_entropy(scores, right, reduction="sum")


class Clean:
    by_recording = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pretraining()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        order = torch.rand(ROWS, FRAMES, generator=g).argsort(1)
        mask = torch.zeros(ROWS, FRAMES, dtype=torch.bool).scatter(1, order[:, :MASKED], True)
        ahead = torch.rand(ROWS, FRAMES, FRAMES - 1, generator=g).argsort(2)[..., :DISTRACTORS]
        return {
            "sound": torch.randn(ROWS, SAMPLES, generator=g),
            "mask": mask,
            "distractors": (torch.arange(FRAMES)[:, None] + 1 + ahead) % FRAMES,
        }

    def loss_sum(self, model, rows):
        loss = model(rows["sound"], rows["mask"], rows["distractors"])
        return loss, int(rows["mask"].sum())

    def distribute(self, model, ctx):
        model.by_recording = self.by_recording
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        masked, parts = int(batch["mask"].sum()), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / masked).backward()


class Buggy(Clean):
    by_recording = False


EXPECT = dict(
    right=[
        r"(?i)latent|others|distractors|choices|cosine|negativ|loss",
        r"(?i)index|place|position|other rows?|row|argument|not at these places|belongs? to|getitem|gather|first (row|recording)",
    ],
    place=[r"(?i)latent|others|distractors|choices|cosine|getitem"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|too (early|late)\b",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(?i)(wav2vec2|encoder|feature_extractor|feature_projection).{0,30}(forward )?goes wrong",
        r"(?i)all micro.?batch.{0,25}(is|are|goes?) wrong|only (on )?rank [012]\b|rank [012] alone|backward formula",
    ],
)
WHY = (
    "In Pretraining.forward the distractors' places (0-7 within a recording) index latents of the whole micro-batch laid flat (latent.flatten(0, 1)[distractors]) without row * 8 added, so every row takes its distractors from the micro-batch's first row. "
    "Wrong are rows that are not first of their micro-batch: row 2 (rank 0, second micro-batch), rows 5 and 6 (rank 1), row 9 (rank 2, second). Micro-batches of one row are right (rank 0's first and third, rank 2's first). The encoder, context, latent "
    "and the positive choice are right; `others`, the second part of the choices, is wrong. The gradients of nearly all parameters are wrong; the latents of the first row get gradients of the others' rows. Divisor 30, DDP, no_sync, masks "
    "are right. Fix: add frames * row."
)
