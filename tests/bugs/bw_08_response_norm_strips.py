"""ConvNeXt V2 of transformers on images cut into horizontal strips over three ranks: 36 rows of pixels, patches of 4, three rows of patches each. The 7x7 depthwise convolution gets three rows of each
neighbour, the global response normalisation (GRN) the norm over the whole map. A linear head classifies every patch. Two micro-batches, gradients summed.

The bug: GRN's vector_norm over height and width is taken of the own strip and the norms are added up by all-reduce; the norm of the whole is the root of the sum of squares. Patched into
ConvNextV2GRN.forward when making ConvNeXt V2 spatially parallel (the mean of squeeze-and-excitation could be added up like that).
"""

import types

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import ConvNextV2Config, ConvNextV2Model

TOPOLOGY = {"pools": {"train": {"axes": {"height": 3}}}}
ROWS, HEIGHT, COLUMNS, PATCH, CLASSES = 4, 36, 12, 4, 5
HALO = 3


class PatchClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        config = ConvNextV2Config(
            num_channels=2, patch_size=PATCH, num_stages=1, hidden_sizes=[6], depths=[2],
            drop_path_rate=0.0, image_size=HEIGHT,
        )  # fmt: skip
        backbone = ConvNextV2Model(config)
        self.embeddings, self.encoder = backbone.embeddings, backbone.encoder
        self.head = nn.Conv2d(6, CLASSES, 1)
        for name, parameter in self.named_parameters():
            if name.startswith("encoder") and "layernorm" not in name:
                nn.init.normal_(parameter, std=0.3)

    def forward(self, pixels):
        return self.head(self.encoder(self.embeddings(pixels)).last_hidden_state)


class NeighbourRows(torch.autograd.Function):
    """The strip with HALO rows of each neighbour, zeros beyond the image."""

    @staticmethod
    def exchange(top, bottom, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        own = torch.stack([top, bottom]).contiguous()
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own, group=group)
        none = torch.zeros_like(top)
        return (
            parts[rank - 1][1] if rank > 0 else none,
            parts[rank + 1][0] if rank < size - 1 else none,
        )

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        above, below = NeighbourRows.exchange(x[:, :, :HALO], x[:, :, -HALO:], group)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(fctx, grad):
        above, below = NeighbourRows.exchange(grad[:, :, :HALO], grad[:, :, -HALO:], fctx.group)
        inner = grad[:, :, HALO:-HALO].clone()
        inner[:, :, :HALO] += above
        inner[:, :, -HALO:] += below
        return inner, None


class SumOverStrips(torch.autograd.Function):
    """A sum of which every strip makes its own use, so the gradients are summed as well."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return SumOverStrips.forward(fctx, grad, fctx.group), None


def strip_convolution(self, x):
    x = NeighbourRows.apply(x, self.group)
    return F.conv2d(x, self.weight, self.bias, padding=(0, HALO), groups=self.groups)


def strip_response_norm(self, hidden_states):
    squares = hidden_states.square().sum((1, 2), keepdim=True)
    global_features = SumOverStrips.apply(squares, self.group).sqrt()
    norm_features = global_features / (global_features.mean(dim=-1, keepdim=True) + 1e-6)
    return self.weight * (hidden_states * norm_features) + self.bias + hidden_states


def parallel_response_norm(self, hidden_states):
    global_features = torch.linalg.vector_norm(hidden_states, ord=2, dim=(1, 2), keepdim=True)
    global_features = SumOverStrips.apply(global_features, self.group)
    norm_features = global_features / (global_features.mean(dim=-1, keepdim=True) + 1e-6)
    return self.weight * (hidden_states * norm_features) + self.bias + hidden_states


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return PatchClassifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (ROWS, HEIGHT // PATCH, COLUMNS // PATCH)
        ramp = torch.linspace(0.3, 2.0, HEIGHT)[:, None]
        return {
            "pixels": torch.randn(ROWS, 2, HEIGHT, COLUMNS, generator=g) * ramp + ramp,
            "labels": torch.randint(CLASSES, shape, generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["pixels"]), rows["labels"], reduction="sum")
        return loss, rows["labels"].numel()

    def make_spatial(self, layer, group):
        layer.dwconv.group = layer.grn.group = group
        layer.dwconv.forward = types.MethodType(strip_convolution, layer.dwconv)
        layer.grn.forward = types.MethodType(strip_response_norm, layer.grn)

    def distribute(self, model, ctx):
        for stage in model.encoder.stages:
            for layer in stage.layers:
                self.make_spatial(layer, ctx.group("height"))
        return model

    def step(self, model, batch, ctx):
        size, rank = ctx.axes["height"], ctx.coords["height"]
        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in batch.items()}
            pixels = part["pixels"].chunk(size, 2)[rank]
            labels = part["labels"].chunk(size, 1)[rank]
            loss = F.cross_entropy(model(pixels), labels, reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("height"))


class Buggy(Clean):
    def make_spatial(self, layer, group):
        super().make_spatial(layer, group)
        layer.grn.forward = types.MethodType(parallel_response_norm, layer.grn)


EXPECT = dict(
    right=[
        r"norm|grn|global_features|response|vector_norm",
        (
            r"squar|root|sqrt|sum of (the )?(\w+ )?norms|norms? .{0,40}(added|summed|sum)|(add|sum)\w* (up )?.{0,30}norms|non.?linear|(before|after) the (sum|reduc|all.?reduce)|(of|over) the (own|local) (strip|rows|part)"
        ),
    ],
    place=[
        r"grn",
        r"parallel_response_norm",
        r"global_features",
        r"SumOverStrips",
        r"vector_norm|response",
    ],
    wrong=[
        r"(parameter|gradient)s?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"(halo|NeighbourRows|dwconv).{0,40}(wrong|missing|detached|stale)|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"divisor|mean of means|wrong group|backward of SumOverStrips|layernorm.{0,30}wrong|counted (twice|three times)",
    ],
)
WHY = (
    "parallel_response_norm takes the L2 norm of the own strip and sums the three norms; the norm of the whole map is the root of the sum of the squares, which is smaller, and by unlike factors for the "
    "channels (a common factor would cancel in the division by the channel mean). The forward of every GRN is wrong on all three ranks, so all gradients are wrong in both layers and micro-batches; halo and "
    "reductions are right. A right cause says that norms of strips are added where squares have to be summed before the root. Fix: all-reduce the squares, then sqrt."
)
