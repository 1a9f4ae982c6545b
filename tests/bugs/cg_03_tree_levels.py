"""Child-sum Tree-LSTM over parse trees, data parallel with FSDP2; the trees of a rank are run as
one forest.

All nodes of one level of the whole forest are computed in one call; the level of a node is its
height above the leaves, so that the states of all its children are there when it is reached.

The bug: the level is one more than the level of the node's first child, not of its highest child.
A node whose later child is higher than its first is computed while that child's state is still
the zeros the buffer began with. After level-batched tree networks (TreeLSTM in DGL and TensorFlow
Fold style) where heights came from a binary left-branching corpus.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, NODES, WORDS, DIM, HIDDEN, LABELS = 7, 9, 13, 5, 7, 3


class TreeCell(nn.Module):
    def __init__(self):
        super().__init__()
        self.iou = nn.Linear(DIM, 3 * HIDDEN)
        self.iou_children = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.forget = nn.Linear(DIM, HIDDEN)
        self.forget_child = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x, h, c, owner):
        """x: nodes; h, c: their children in a row; owner: the child's node, an index into x."""
        total = x.new_zeros(x.shape[0], HIDDEN).index_add(0, owner, h)
        i, o, u = (self.iou(x) + self.iou_children(total)).chunk(3, -1)
        f = torch.sigmoid(self.forget(x)[owner] + self.forget_child(h))
        state = torch.sigmoid(i) * torch.tanh(u)
        state = state.index_add(0, owner, f * c)
        return torch.sigmoid(o) * torch.tanh(state), state


class TreeModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.cell = TreeCell()
        self.head = nn.Linear(HIDDEN, LABELS)

    def forward(self, words, parents, levels):
        rows, nodes = words.shape
        base = torch.arange(rows)[:, None] * nodes
        parent = torch.where(parents < 0, parents, parents + base).flatten()
        level = levels.flatten()
        x = self.words(words.flatten())
        h = c = x.new_zeros(rows * nodes, HIDDEN)
        where = torch.empty(rows * nodes, dtype=torch.long)
        for height in range(int(level.max()) + 1):
            now = (level == height).nonzero().squeeze(1)
            where[now] = torch.arange(now.numel())
            children = ((parent >= 0) & torch.isin(parent, now)).nonzero().squeeze(1)
            new_h, new_c = self.cell(x[now], h[children], c[children], where[parent[children]])
            h, c = h.index_copy(0, now, new_h), c.index_copy(0, now, new_c)
        return self.head(h[(parent < 0).nonzero().squeeze(1)])


def heights(parents):
    levels = torch.zeros_like(parents)
    for row, tree in enumerate(parents.tolist()):
        children = [[i for i, p in enumerate(tree) if p == n] for n in range(len(tree))]

        def height(n, children=children):
            return max((1 + height(k) for k in children[n]), default=0)

        levels[row] = torch.tensor([height(n) for n in range(len(tree))])
    return levels


def branch_heights(parents):
    levels = torch.zeros_like(parents)
    for row, tree in enumerate(parents.tolist()):
        first = {}
        for node, parent in enumerate(tree):
            first.setdefault(parent, node)
        for node in range(len(tree)):
            step = node
            while step in first:
                step = first[step]
                levels[row, node] += 1
    return levels


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(5 + self.seed)
        return TreeModel()

    def batch(self):
        g = torch.Generator().manual_seed(60 + self.seed)
        parents = torch.full((ROWS, NODES), -1)
        for row in range(ROWS):
            order = torch.randperm(NODES, generator=g)
            for k in range(1, NODES):
                near = int(torch.randint(max(0, k - 3), k, (1,), generator=g))
                parents[row, order[k]] = order[near]
        return {
            "words": torch.randint(0, WORDS, (ROWS, NODES), generator=g),
            "parents": parents,
            "label": torch.randint(0, LABELS, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["words"], rows["parents"], heights(rows["parents"]))
        return nn.functional.cross_entropy(out, rows["label"], reduction="sum"), rows[
            "label"
        ].shape[0]

    def levels(self, parents):
        return heights(parents)

    def distribute(self, model, ctx):
        return fully_shard(model, mesh=ctx.mesh["dp"])

    def step(self, model, batch, ctx):
        rank, world = ctx.coords["dp"], dist.get_world_size(ctx.group("dp"))
        mine = {k: torch.tensor_split(v, world)[rank] for k, v in batch.items()}
        pieces = [torch.tensor_split(v, 2) for v in mine.values()]
        for turn in range(2):
            words, parents, label = (p[turn] for p in pieces)
            out = model(words, parents, self.levels(parents))
            loss = nn.functional.cross_entropy(out, label, reduction="sum")
            (loss * world / ROWS).backward()


class Buggy(Clean):
    def levels(self, parents):
        return branch_heights(parents)


EXPECT = dict(
    right=[
        r"level|height|depth|schedul|order",
        (
            r"first child|max(imum)?\b|highest|deepest|deeper|tallest|not (yet )?(been "
            r")?(computed|ready|there|evaluated|available)|before (its|their|the|all|every|a) "
            r".{0,30}child|zeros?\b|zero state|stale"
        ),
        r"child",
    ],
    place=[
        r"branch_heights",
        r"heights",
        r"levels",
        r"TreeModel\.forward",
        r"TreeCell",
        r"h\[children\]",
        r"setdefault",
    ],
    wrong=[
        r"world|divis(or|ion)|normali[sz]",
        r"owner index|wrong parent|nodes of other trees|between trees",
        r"micro-?batch.{0,40}(lost|overwrit)",
        r"reshard|all-?gather",
    ],
)

WHY = (
    "branch_heights follows only the first child of every node, so a node whose second or "
    "third child has the deeper subtree is put on too low a level. In the forest it is "
    "computed before that child, whose rows of h and c are still the initial zeros; the "
    "child's subtree is therefore cut off from the root and its gradient never arrives. The "
    "forward value changes, so gradients of the cell, the word table and the head are all "
    "wrong in the rows with such trees; trees where the first child is the deepest "
    "everywhere give right ones, and so does the reduction of FSDP. A right cause says that "
    "the level (height) of a node is taken from its first child and not from the maximum "
    "over its children, so parents run before some children. The fix is 1 + max over the "
    "children."
)
