"""transformers' ViTPose (simple decoder) for key points, data parallel over three ranks (3, 2 and
2 of 7 people), micro-batches of two. The loss is that of the public pose code bases: half of the
squared error of the heat maps, hidden joints with weight zero, mean over all joints and cells.

Bug: the ranks divide by the number of visible joints (summed over all ranks). After trainers that
replace the mean of a masked criterion by "sum over what counts".
"""

import torch
import torch.distributed as dist
from transformers import VitPoseBackboneConfig, VitPoseConfig, VitPoseForPoseEstimation

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PEOPLE, JOINTS, SIDE, PATCH = 7, 5, (18, 12), (6, 6)
CELLS = (SIDE[0] // PATCH[0] * 2, SIDE[1] // PATCH[1] * 2)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 41)
        backbone = VitPoseBackboneConfig(
            image_size=SIDE,
            patch_size=PATCH,
            num_channels=1,
            hidden_size=10,
            num_hidden_layers=2,
            num_attention_heads=2,
            mlp_ratio=2,
            out_indices=[2],
            initializer_range=0.3,
        )
        config = VitPoseConfig(
            backbone_config=backbone,
            initializer_range=0.3,
            scale_factor=2,
            use_simple_decoder=True,
            num_labels=JOINTS,
            id2label={i: str(i) for i in range(JOINTS)},
            label2id={str(i): i for i in range(JOINTS)},
        )
        return VitPoseForPoseEstimation(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 410)
        spots = torch.rand(PEOPLE, JOINTS, 2, generator=g) * torch.tensor(CELLS)
        y = torch.arange(CELLS[0])[:, None] - spots[..., 0, None, None]
        x = torch.arange(CELLS[1]) - spots[..., 1, None, None]
        visible = (torch.rand(PEOPLE, JOINTS, generator=g) < 0.6).float()
        visible[3] = 0
        return {
            "pixels": torch.randn(PEOPLE, 1, *SIDE, generator=g),
            "heat": torch.exp(-(y.square() + x.square()) / 2),
            "visible": visible,
        }

    def loss_sum(self, model, rows):
        weight = rows["visible"][:, :, None, None]
        heat = model(pixel_values=rows["pixels"]).heatmaps
        error = heat * weight - rows["heat"] * weight
        return 0.5 * error.square().sum(), error.numel()

    def divisor(self, own, group):
        joints = own["visible"].new_tensor(own["visible"].numel())
        dist.all_reduce(joints, group=group)
        return joints * CELLS[0] * CELLS[1]

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        rows = torch.arange(PEOPLE).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        divisor = self.divisor({k: v[rows] for k, v in batch.items()}, group)
        for part in rows.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / divisor).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def divisor(self, own, group):
        joints = own["visible"].sum()
        dist.all_reduce(joints, group=group)
        return joints * CELLS[0] * CELLS[1]


EXPECT = dict(
    right=[
        r"divisor|divid|denominator|normali[sz]|count|mean|factor|scale",
        r"visible|hidden|joint|mask|valid|numel|all (the )?(cells|elements|entries)|\b840\b|\b35\b",
    ],
    place=[r"\bdivisor\b", r"own\[.visible.\]", r"\bjoints\b", r"loss / divisor"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(own|local|rank's).{0,30}(count|number|divisor)",
        r"(micro.?batch|rank).{0,30}mean of means",
        r"target.{0,40}(wrong|shifted|normali[sz]ed)",
        r"weight.{0,30}(squared|twice)",
    ],
)
WHY = """The objective is the mean over all joints and cells; hidden joints contribute zero to the
sum but stay in the count (error.numel()). Buggy.divisor counts the visible joints of all ranks
instead of all joints, so that every gradient on every rank is too large by one factor
(35 joints / visible joints). The sum over the ranks, the parts and the masks are right.
Fix: divide by own["visible"].numel() summed over the ranks (times the cells)."""
