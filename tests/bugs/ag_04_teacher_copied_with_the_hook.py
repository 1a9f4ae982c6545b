"""Self-distillation of a tiny ViT (transformers, from scratch) under DDP on three ranks with accumulation: the student reads a noisy view and is trained on the labels and, with weight 0.6, to give the same features after its second
layer as an EMA teacher on the clean view. The features are caught with a forward hook that writes into a dict. The teacher is a deep copy of the student with the EMA weights loaded.

The bug: the hook is registered on the student before the copy. The copy carries the hook, and the hook (a closure) still writes into the student's dict, so the teacher's forward, which comes after the student's, replaces the
student's features by its own (computed under no_grad): the feature loss compares the teacher with itself and has no gradient. After huggingface/accelerate issue 1835 / PR 1971 (a deep copy keeps hooks of the original),
isl-org/MiDaS issue 251 and pytorch/tutorials issue 2177.
"""

import contextlib
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import ViTConfig, ViTModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, WIDTH, CLASSES, WEIGHT, TAP = 6, 8, 5, 0.6, 1
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6), (6, 7)], [(7, 10)]]
ROWS = 10


def tap_into(store):
    def hook(module, inputs, output):
        store["features"] = output

    return hook


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = ViTConfig(
            image_size=SIDE,
            patch_size=3,
            num_channels=2,
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=12,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
        )
        self.student = ViTModel(config, add_pooling_layer=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.teacher = ViTModel(config, add_pooling_layer=False).requires_grad_(False)
        self.student_store = self.teacher_store = None

    def watch(self, copied):
        """Hooks for the training step; the teacher is a deep copy with the EMA weights."""
        average = self.teacher.state_dict()
        self.student_store = self.teacher_store = {}
        if copied:
            self.student.layers[TAP].register_forward_hook(tap_into(self.student_store))
            self.teacher = copy.deepcopy(self.student)
        else:
            self.teacher = copy.deepcopy(self.student)
            self.student.layers[TAP].register_forward_hook(tap_into(self.student_store))
            self.teacher_store = {}
            self.teacher.layers[TAP].register_forward_hook(tap_into(self.teacher_store))
        self.teacher.load_state_dict(average)
        self.teacher.requires_grad_(False)

    def forward(self, noisy, image):
        if self.student_store is None:
            out = self.student(noisy, output_hidden_states=True)
            with torch.no_grad():
                wanted = self.teacher(image, output_hidden_states=True).hidden_states[TAP + 1]
            return self.head(out.last_hidden_state[:, 0]), out.hidden_states[TAP + 1], wanted
        token = self.student(noisy).last_hidden_state[:, 0]
        with torch.no_grad():
            self.teacher(image)
        return self.head(token), self.student_store["features"], self.teacher_store["features"]


def distillation_loss(model, rows):
    scores, features, wanted = model(rows["noisy"], rows["image"])
    loss = F.cross_entropy(scores, rows["label"], reduction="sum")
    return loss + WEIGHT * (features - wanted).square().sum()


class Clean:
    copied = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        image = torch.randn(ROWS, 2, SIDE, SIDE, generator=g)
        return {
            "image": image,
            "noisy": image + 0.5 * torch.randn(image.shape, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return distillation_loss(model, rows), len(rows["label"])

    def distribute(self, model, ctx):
        model.watch(self.copied)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (distillation_loss(model, rows) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    copied = True


EXPECT = dict(
    right=[
        r"(?i)feature|term|loss|layers?\.1|student|hook|distill|teacher",
        r"(?i)missing|lost|no gradient|not (differentiat|counted|reach|flow)|detach|no_grad|without (a )?grad|cut|zero|dropped|absent|does not (arrive|reach|flow|come)|overwrit|replaced|never",
        r"(?i)student|layers?\.[01]|embedding|upstream|feature|term|loss|graph",
    ],
    place=[r"(?i)student|layers?\.1|feature|loss|teacher|hook"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)(head|layers?\.2)[^.]{0,30}(gradient|forward|output) (is|are|goes) wrong",
        r"(?i)label(s)? (is|are) wrong|teacher.{0,20}weights? (is|are|move)",
    ],
)
WHY = (
    "All three ranks, all micro-batches, all rows: student_store['features'] holds the teacher's output of layers.1 (the copied hook wrote it last), so the feature term is |t - t|^2 = 0 and has no gradient. The gradients of "
    "student.embeddings, student.layers.0 and student.layers.1 (what lies before the tap) lack the feature term with its weight 0.6 and have the label term only; student.layers.2, the final layernorm and head are right (only the "
    "label term reaches them). The student's forward, the teacher's forward and weights, divisor 10, no_sync and DDP's average are right. Fix: copy before the hooks are registered, or register the copy's own hook with its own dict "
    "(and remove the copied one)."
)
