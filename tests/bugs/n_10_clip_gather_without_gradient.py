"""CLIP with the contrastive loss over the features of all ranks, each rank taking the loss of its own rows and columns (OpenCLIP's local_loss).
After OpenCLIP's and SimCLR's threads on gather_with_grad: with local losses a gather that does not carry gradients loses what the other ranks'
losses give to the own features.
"""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import CLIPConfig, CLIPModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY = 9, 6, 26


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        common = dict(
            hidden_size=14, num_hidden_layers=1, num_attention_heads=2, intermediate_size=21
        )
        return CLIPModel(
            CLIPConfig(
                text_config=dict(
                    **common,
                    vocab_size=VOCABULARY,
                    max_position_embeddings=LENGTH,
                    bos_token_id=0,
                    eos_token_id=VOCABULARY - 1,
                    pad_token_id=1,
                ),
                vision_config=dict(**common, image_size=8, patch_size=4, num_channels=3),
                projection_dim=7,
                logit_scale_init_value=1.2,
                initializer_factor=4.0,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(2, VOCABULARY - 1, (ROWS, LENGTH), generator=g)
        end = torch.randint(2, LENGTH, (ROWS, 1), generator=g)
        where = torch.arange(LENGTH)
        ids = ids.masked_fill(where == end, VOCABULARY - 1).masked_fill(where > end, 1)
        return {
            "input_ids": ids,
            "attention_mask": (where <= end).long(),
            "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=g),
        }

    @staticmethod
    def features(model, rows):
        out = model(**rows)
        return out.image_embeds, out.text_embeds

    def loss_sum(self, model, rows):
        image, text = self.features(model, rows)
        logits = model.logit_scale.exp() * image @ text.T
        target = torch.arange(len(image))
        both = F.cross_entropy(logits, target, reduction="sum") + F.cross_entropy(
            logits.T, target, reduction="sum"
        )
        return both / 2, len(image)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def gather(self, x, ctx):
        return torch.cat(all_gather(x.contiguous(), group=ctx.group("dp")))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        image, text = self.features(model, mine)
        images, texts = self.gather(image, ctx), self.gather(text, ctx)
        scale = model.module.logit_scale.exp()
        target = torch.arange(len(image)) + ctx.coords["dp"] * len(image)
        loss = F.cross_entropy(scale * image @ texts.T, target, reduction="sum")
        loss = loss + F.cross_entropy(scale * text @ images.T, target, reduction="sum")
        # DDP averages
        (loss / 2 * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def gather(self, x, ctx):
        every = [torch.empty_like(x) for _ in range(ctx.axes["dp"])]
        dist.all_gather(every, x.detach().contiguous(), group=ctx.group("dp"))
        every[ctx.coords["dp"]] = x
        return torch.cat(every)


EXPECT = dict(
    right=[
        r"gather|other ranks|across ranks|between (the )?ranks|cross.?rank|negatives|remote|contrast|feature|embeds|all_gather",
        r"\bno\b|without|not |never|n't|lost|lose|miss|drop|detach|lack|only|cut|partial|incomplete|block",
    ],
    place=[
        r"text_model|text_projection|text",
        r"vision_model|visual_projection|image",
        r"feature|embeds|tower|gather",
    ],
    wrong=[
        r"logit_scale (is|has|was) (wrong|missing|a wrong)",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(own|local|wrong) (count|denominator|divisor)",
        r"parameters? (is|are|was|were) (not|never) (all.?)?reduced",
        r"forward (is|was|differs|pass is) (wrong|different)",
    ],
)
WHY = (
    "The gather carries no gradient for the features of other ranks, so what a rank's loss gives to the features of other ranks (as negatives "
    "and columns) is lost: the gradient of the features, and so of both towers and projections, lacks these terms on all ranks. The loss value "
    "and logit_scale are right; the DDP reduction happens."
)
