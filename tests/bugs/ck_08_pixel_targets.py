"""transformers' VideoMAE for pre-training (norm_pix_loss), data parallel over two ranks (3 and
2 of 5 clips) with micro-batches of two; the step takes the logits from the model and computes
targets and loss itself, as it needs the sum and not the mean.

Bug: targets are normalised over the whole tubelet with all channels together, which is what the
image MAE does; VideoMAE normalises each channel by itself. After pre-training loops in which
the MAE loss was taken over for video.
"""

import torch
import torch.distributed as dist
from transformers import VideoMAEConfig, VideoMAEForPreTraining

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
CLIPS, FRAMES, CHANNELS, SIDE, PATCH, TUBE, HIDDEN = 5, 4, 2, 6, 2, 2, 13
PATCHES = (FRAMES // TUBE) * (SIDE // PATCH) ** 2


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        config = VideoMAEConfig(
            image_size=SIDE,
            patch_size=PATCH,
            num_channels=CHANNELS,
            num_frames=FRAMES,
            tubelet_size=TUBE,
            hidden_size=10,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=9,
            decoder_hidden_size=6,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=7,
            norm_pix_loss=True,
            initializer_range=0.2,
        )
        return VideoMAEForPreTraining(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 810)
        clip = torch.randn(CLIPS, FRAMES, CHANNELS, SIDE, SIDE, generator=g)
        clip = (
            clip * torch.tensor([0.5, 2.0])[:, None, None]
            + torch.tensor([1.0, -0.5])[:, None, None]
        )
        order = torch.rand(CLIPS, PATCHES, generator=g).argsort(-1)
        return {"clip": clip, "hidden": order < HIDDEN}

    def loss_sum(self, model, rows):
        out = model(pixel_values=rows["clip"], bool_masked_pos=rows["hidden"])
        return out.loss * rows["clip"].shape[0], rows["clip"].shape[0]

    def cut(self, clip):
        n, side = clip.shape[0], SIDE // PATCH
        x = clip.view(n, FRAMES // TUBE, TUBE, CHANNELS, side, PATCH, side, PATCH)
        x = x.permute(0, 1, 4, 6, 2, 5, 7, 3)
        return x.reshape(n, PATCHES, TUBE * PATCH * PATCH, CHANNELS)

    def targets(self, clip):
        x = self.cut(clip)
        x = (x - x.mean(-2, keepdim=True)) / (x.var(-2, keepdim=True).sqrt() + 1e-6)
        return x.flatten(2)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        own = torch.arange(CLIPS).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        for part in own.split(2):
            clip, hidden = batch["clip"][part], batch["hidden"][part]
            logits = model(pixel_values=clip, bool_masked_pos=hidden).logits
            wanted = self.targets(clip)[hidden].view_as(logits)
            loss = (logits - wanted).square().mean((1, 2)).sum() / CLIPS
            loss.backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def targets(self, clip):
        x = self.cut(clip).flatten(2)
        mean, var = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True)
        return (x - mean) / (var + 1.0e-6) ** 0.5


EXPECT = dict(
    right=[
        r"target|label|norm_pix|pixel|wanted",
        r"normali[sz]|mean|var|statistic|standardi[sz]",
        r"channel|dim(ension)?\s*=?\s*-?[12]|axis|axes|whole (patch|tubelet)|flatten",
    ],
    place=[r"\btargets\b", r"norm_pix_loss", r"x\.mean|x\.var", r"\bwanted\b"],
    wrong=[
        r"mask.{0,40}(inverted|wrong|visible)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"uneven.{0,40}(clips|rows)",
        r"position.{0,30}embed",
        r"(micro.?batch|rank).{0,30}mean of means",
    ],
)
WHY = (
    "With norm_pix_loss VideoMAE normalises the pixels of every tubelet per channel (mean and"
    " variance over time x height x width of the patch). Buggy.targets flattens the channels "
    "in first and normalises over all of them together, as image MAE does. The logits are "
    "right, the targets are not, so dloss/dlogits is wrong and with it the gradients of all "
    "parameters (the loss, not the reduction). A right cause says that the reconstruction "
    "targets are normalised over all channels / the wrong axis. Fix: normalise before "
    "flattening, over dim -2."
)
