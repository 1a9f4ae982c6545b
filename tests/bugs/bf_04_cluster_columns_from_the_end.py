"""A word model with adaptive softmax on four ranks that hold the same texts and divide the work by clusters: rank 0 scores the words of the shortlist, ranks 1, 2 and 3 each the words of one tail cluster. A word of a tail cluster pays
for its cluster's column in the head and for itself in the tail. Two micro-batches of odd size; the parts of the gradients are summed over the ranks; divisor: all predicted words.

The bug: the clusters' columns in the head are counted from the end (the -i of the first implementations) although the head is laid out shortlist, cluster 1, cluster 2, cluster 3. So clusters 1 and 3 read each other's column; the
middle one reads its own. After the head_logprob[:, -i] in ProjectedAdaptiveLogSoftmax: huggingface/transformers issue 1086.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"mp": 4}}}}
CUTOFFS, WIDTH, TOKENS, ROWS = [6, 10, 15, 20], 8, 7, 7
PARTS = [(0, 4), (4, 7)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.from_the_end = False
        self.embed = nn.Embedding(CUTOFFS[-1], WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CUTOFFS[0] + len(CUTOFFS) - 1)
        self.tails = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5 - n, bias=False), nn.Linear(5 - n, high - low))
            for n, (low, high) in enumerate(zip(CUTOFFS, CUTOFFS[1:]))
        )

    def forward(self, ids, clusters):
        """Loss of the next words that are in the given clusters (0: the shortlist)."""
        hidden = self.reader(self.embed(ids[:, :-1]))[0].flatten(0, 1)
        words = ids[:, 1:].flatten()
        head = self.head(hidden).log_softmax(-1)
        total = head.sum() * 0
        for cluster in clusters:
            low = CUTOFFS[cluster - 1] if cluster else 0
            (here,) = torch.where((words >= low) & (words < CUTOFFS[cluster]))
            if cluster == 0:
                total = total - head[here, words[here]].sum()
                continue
            column = -cluster if self.from_the_end else CUTOFFS[0] + cluster - 1
            tail = self.tails[cluster - 1](hidden[here]).log_softmax(-1)
            inside = tail.gather(1, (words[here] - low)[:, None]).sum()
            total = total - head[here, column].sum() - inside
        return total


class Clean:
    from_the_end = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(CUTOFFS[-1], (ROWS, TOKENS), generator=g)}

    def loss_sum(self, model, rows):
        loss = model(rows["ids"], range(len(CUTOFFS)))
        return loss, len(rows["ids"]) * (TOKENS - 1)

    def distribute(self, model, ctx):
        model.from_the_end = self.from_the_end
        return model

    def step(self, model, batch, ctx):
        model.zero_grad(set_to_none=True)
        for low, high in PARTS:
            loss = model(batch["ids"][low:high], [ctx.rank])
            (loss / (ROWS * (TOKENS - 1))).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("mp"))


class Buggy(Clean):
    from_the_end = True


EXPECT = dict(
    right=[
        r"(?i)head|loss|cluster|column|rank",
        r"(?i)rank(s)? (1|3)|ranks? 1 and 3|1, 3|cluster|column|head",
        r"(?i)loss|index|column|class|label|target|reads|picks|forward|value|gradient (of|into|at) (the )?(head|output)",
    ],
    place=[r"(?i)\bhead\b|loss|column|cluster"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[234]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the (last|first) micro.?batch",
        r"(?i)tails?(\.\d)*(\.weight|\.bias)? (is|are) wrong|rank 0.{0,25}(goes|is) wrong|rank 2.{0,25}(goes|is) wrong|all ranks (are|go) wrong",
        r"(?i)(embed|reader|gru).{0,30}forward.{0,20}wrong|forward goes wrong (first )?(at|in) (the )?(embed|reader)",
        r"(?i)detach|recomput|dropout|scaled",
    ],
)
WHY = (
    "In Net.forward the column of cluster c (1, 2, 3) in the head must be 6 + c - 1 (6, 7, 8). With from_the_end it is -c, i.e. 8, 7, 6: rank 1 (cluster 1) scores column 8, rank 3 (cluster 3) column 6; rank 2 (cluster 2) the right "
    "column 7; rank 0 (shortlist) is right. So the words of clusters 1 (6 to 9) and 3 (15 to 19) pay for the wrong column, in both micro-batches. Wrong are rows 6 and 8 of head.weight and head.bias, and through the hidden states embed "
    "and reader. Right are all other rows of head and all tails. The model's modules compute right outputs; the index in the loss is wrong. Sum over ranks, divisor 42 are right. Fix: CUTOFFS[0] + cluster - 1."
)
