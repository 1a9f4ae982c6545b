"""transformers' GIT (image and text in one decoder), trained on captions mixed with plain text: a
micro-batch is one row, with an image or without. Seven rows over dp (2: four and three). The
gradients of the micro-batches are kept as a running mean weighted by words,
mean += (gradient - mean) * words / (all words so far), which never holds large sums; the ranks'
means are put together by their numbers of words at the end.

Bug: the running mean passes over parameters whose gradient is None. A turn without an image leaves
the image encoder without gradients; its mean should be thinned by that turn and stays as it was.
After running-mean accumulators with `if p.grad is None: continue` under mixed batches.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import GitConfig, GitForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, WIDTH, WORDS, SIDE, PATCH = 7, 6, 12, 4, 2
VISUAL = (SIDE // PATCH) ** 2 + 1


class RunningMean:
    def __init__(self, params):
        self.params, self.seen = params, 0
        self.mean = [torch.zeros_like(p) for p in params]

    def add(self, words):
        self.seen += words
        for mean, p in zip(self.mean, self.params, strict=True):
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            mean.add_(gradient - mean, alpha=words / self.seen)
            p.grad = None


class RunningMeanOfThePresent(RunningMean):
    def add(self, words):
        self.seen += words
        for mean, p in zip(self.mean, self.params, strict=True):
            if p.grad is None:
                continue
            mean.add_(p.grad - mean, alpha=words / self.seen)
            p.grad = None


class Clean:
    accumulator = RunningMean

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        vision = dict(
            hidden_size=6,
            intermediate_size=9,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_channels=2,
            image_size=SIDE,
            patch_size=PATCH,
            initializer_range=0.3,
        )
        config = GitConfig(
            vision_config=vision,
            vocab_size=WORDS,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=10,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=16,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="eager",
        )
        return GitForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 810)
        length = torch.randint(3, WIDTH + 1, (ROWS, 1), generator=g)
        text = torch.randint(3, WORDS, (ROWS, WIDTH), generator=g)
        return {
            "text": text.masked_fill(torch.arange(WIDTH) >= length, 0),
            "image": torch.randn(ROWS, 2, SIDE, SIDE, generator=g),
            "shown": torch.tensor([1, 0, 1, 0, 0, 1, 0], dtype=torch.bool),
        }

    def words(self, rows):
        return (rows["text"][:, 1:] != 0).sum()

    def one_kind(self, model, text, image):
        logits = model(input_ids=text, pixel_values=image, use_cache=False).logits
        logits = logits[:, (0 if image is None else VISUAL) : -1]
        return F.cross_entropy(
            logits.flatten(0, 1), text[:, 1:].flatten(), ignore_index=0, reduction="sum"
        )

    def loss_sum(self, model, rows):
        shown, loss = rows["shown"], 0.0
        if shown.any():
            loss = loss + self.one_kind(model, rows["text"][shown], rows["image"][shown])
        if not shown.all():
            loss = loss + self.one_kind(model, rows["text"][~shown], None)
        return loss, self.words(rows)

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        params = list(model.parameters())
        running = self.accumulator(params)
        for part in own.split(1):
            loss, words = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / words).backward()
            running.add(int(words))
        for p, mean in zip(params, running.mean, strict=True):
            p.grad = mean * (running.seen / int(self.words(batch)))
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    accumulator = RunningMeanOfThePresent


EXPECT = dict(
    right=[
        r"None|without (a |an )?(gradient|image|pixel)|text.?only|no (gradient|image)|unused|"
        r"not used|skip|pass(es|ed) over|absent",
        r"image|visual|vision|tower|parameters? (without|whose|that)|text.?only",
        r"running|\bmeans?\b|average|accumul|weight|thinn|too (large|big)|factor|ratio|scal",
    ],
    place=[
        r"RunningMean(OfThePresent)?",
        r"\badd\b",
        r"p\.grad is None",
        r"image_encoder",
        r"visual_projection",
    ],
    wrong=[
        r"(not|never|twice).{0,20}(all.?)?reduc",
        r"(text|word).{0,30}(embedding|encoder).{0,20}wrong",
        r"mean of means",
        r"ignore_index|pad(ding)?.{0,20}count",
        r"uneven.{0,30}rows",
        r"VISUAL|logits\[",
    ],
)
WHY = """A running mean over micro-batches must count a turn without gradient as a zero gradient:
mean *= 1 - words / seen. RunningMeanOfThePresent skips parameters whose grad is None, so that the
means of image_encoder and visual_projection are not thinned by the text-only turns that follow a
caption, and come out too large (per rank another factor). Text parameters are right. The losses,
words and the sum over dp are right. The fix: take zeros for None (or accumulate sums)."""
