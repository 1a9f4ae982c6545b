"""transformers' VitPose (plain backbone, simple decoder) on heat maps of three joints, data
parallel over two ranks (3 and 2 of 5 images), micro-batches of two; the gradients are summed as
one flat bucket for each of two groups of parameters.

transformers does not compute a loss for VitPose, so the step has its own: the squared error of a
joint's heat map times the visibility of the joint (between 0 and 1), divided by the visibility
of all joints in the batch.

Bug: prediction and heat map are both multiplied by the visibility before the square, so that it
enters squared. After the joint loss of pose code bases, written for weights that are 0 or 1.
"""

import torch
import torch.distributed as dist
from transformers import VitPoseBackboneConfig, VitPoseConfig, VitPoseForPoseEstimation

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
IMAGES, JOINTS, HEIGHT, WIDTH, PATCH, SCALE = 5, 3, 24, 16, 8, 2


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 66)
        backbone = VitPoseBackboneConfig(
            image_size=[HEIGHT, WIDTH],
            patch_size=[PATCH, PATCH],
            num_channels=3,
            hidden_size=10,
            num_hidden_layers=2,
            num_attention_heads=2,
            mlp_ratio=2,
            initializer_range=0.2,
            out_features=["stage2"],
        )
        config = VitPoseConfig(
            backbone_config=backbone,
            scale_factor=SCALE,
            use_simple_decoder=True,
            initializer_range=0.2,
            num_labels=JOINTS,
        )
        return VitPoseForPoseEstimation(config).eval()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 660)
        rows, columns = HEIGHT // PATCH * SCALE, WIDTH // PATCH * SCALE
        y = torch.rand(IMAGES, JOINTS, 1, 1, generator=g) * rows
        x = torch.rand(IMAGES, JOINTS, 1, 1, generator=g) * columns
        far = (torch.arange(rows)[:, None] - y) ** 2 + (torch.arange(columns)[None] - x) ** 2
        levels = torch.tensor([0.0, 0.3, 0.6, 1.0])
        return {
            "image": torch.randn(IMAGES, 3, HEIGHT, WIDTH, generator=g),
            "heat": torch.exp(-far / 2),
            "visible": levels[torch.randint(4, (IMAGES, JOINTS), generator=g)],
        }

    def loss_sum(self, model, rows):
        heat = model(pixel_values=rows["image"]).heatmaps
        error = (heat - rows["heat"]).square().mean((2, 3))
        return (error * rows["visible"]).sum(), rows["visible"].sum()

    def joint_loss(self, heat, wanted, visible):
        return ((heat - wanted).square().mean((2, 3)) * visible).sum()

    def reduce(self, params, group):
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat, group=group)
        for p, g in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad.copy_(g.view_as(p))

    def step(self, model, batch, ctx):
        dp, group = ctx.axes["dp"], ctx.group("dp")
        total = batch["visible"].sum()
        for part in torch.arange(IMAGES).tensor_split(dp)[ctx.coords["dp"]].split(2):
            image, wanted, visible = (batch[k][part] for k in ("image", "heat", "visible"))
            heat = model(pixel_values=image).heatmaps
            (self.joint_loss(heat, wanted, visible) / total).backward()
        named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        for in_backbone in (True, False):
            self.reduce([p for n, p in named if n.startswith("backbone") == in_backbone], group)


def masked_mse(heat, wanted, weight):
    weight = weight[:, :, None, None]
    return torch.nn.functional.mse_loss(heat * weight, wanted * weight, reduction="none")


class Buggy(Clean):
    def joint_loss(self, heat, wanted, visible):
        return masked_mse(heat, wanted, visible).mean((2, 3)).sum()


EXPECT = dict(
    right=[
        r"visib|weight",
        r"squar|twice|both|two times|\*\*\s*2|second power|inside|before the (square|error)",
    ],
    place=[
        r"joint_loss",
        r"masked_mse",
        r"mse_loss",
        r"heat \* weight|wanted \* weight",
        r"\bvisib\w+\b",
    ],
    wrong=[
        r"(total|divisor|count).{0,40}(local|own|wrong|per rank)",
        r"(flat|bucket).{0,40}(order|wrong|mixed|offset)",
        r"(not|never|twice|missing).{0,25}all.?reduc",
        r"(micro.?batch|rank).{0,30}mean of means",
        r"backbone.{0,40}(not|only).{0,20}(summed|reduced)",
    ],
)
WHY = """The objective weighs the squared error of a joint by its visibility v. masked_mse
multiplies prediction and target by v before the square, so the error is weighted by v squared:
joints with v = 0.3 count 0.09, those with 0.6 count 0.36; those with 0 and 1 are right. The
divisor is still the sum of v. All gradients are wrong through dloss/dheatmap; model and sums are
right. Fix: weigh the squared error once (or multiply both sides by the square root of v)."""
