"""RLOO fine tuning of a small recurrent policy: each prompt has three or four sampled answers, the advantage of an answer is its reward less the mean reward of the OTHER answers of the same prompt. The answers
are dealt over three data-parallel ranks in the order of arrival, so that the answers of a prompt lie on several ranks; the rewards are collected with all_gather_object as {prompt: rewards} and merged. Two
micro-batches, token log-probabilities of the answers summed, gradients summed over the ranks.

The bug: the dictionaries of the ranks are merged with dict.update, which replaces the list of a prompt that an earlier rank had, instead of extending it; the baseline of a prompt is then made of the rewards of
the last rank that has it. After the all_gather_object + update idiom for metrics by key, in GRPO/RLOO trainers that group by prompt uid (verl's uid groups, TRL's and OpenRLHF's questions about groups across ranks).
"""

import collections

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, PROMPTS, LENGTH, VOCABULARY, WIDTH = 14, 4, 6, 9, 8


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


def answer_logp(model, ids, mask):
    logp = model(ids[:, :-1]).log_softmax(-1)
    return (logp.gather(-1, ids[:, 1:, None])[..., 0] * mask).sum(-1)


def leave_one_out(prompts, rewards, groups):
    """Reward less the mean of the other answers of the prompt."""
    total = rewards.new_tensor([sum(groups[int(p)]) for p in prompts])
    others = rewards.new_tensor([max(len(groups[int(p)]) - 1, 1) for p in prompts])
    return rewards - (total - rewards) / others


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g),
            "mask": (
                torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
            ).float(),
            "prompt": torch.arange(ROWS) % PROMPTS,
            "reward": torch.randn(ROWS, generator=g),
        }

    def own_groups(self, rows):
        groups = collections.defaultdict(list)
        for prompt, reward in zip(rows["prompt"].tolist(), rows["reward"].tolist()):
            groups[prompt].append(reward)
        return dict(groups)

    def loss_sum(self, model, rows):
        groups = self.own_groups(self.batch())
        advantage = leave_one_out(rows["prompt"], rows["reward"], groups)
        return -(advantage * answer_logp(model, rows["ids"], rows["mask"])).sum(), len(rows["ids"])

    def merge_groups(self, gathered):
        merged = collections.defaultdict(list)
        for groups in gathered:
            for prompt, rewards in groups.items():
                merged[prompt].extend(rewards)
        return merged

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        gathered = [None] * ctx.axes["dp"]
        dist.all_gather_object(gathered, self.own_groups(rows), group=group)
        advantage = leave_one_out(rows["prompt"], rows["reward"], self.merge_groups(gathered))
        for p in model.parameters():
            p.grad = None
        for ids, mask, a in zip(
            *(t.tensor_split(2) for t in (rows["ids"], rows["mask"], advantage))
        ):
            (-(a * answer_logp(model, ids, mask)).sum() / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def merge_groups(self, gathered):
        merged = {}
        for groups in gathered:
            merged.update(groups)
        return merged


EXPECT = dict(
    right=[
        r"merg|update|overwr|replac|last rank|group|gathered|baseline|advantage|leave.one.out|reward",
        r"overwr|replac|update|last rank|only (one|the last|part|some)|lost|dropped|missing|incomplete|not (extended|all)|instead of|one rank|wrong (baseline|advantage|weight)|baseline|advantage|weight",
    ],
    place=[
        r"merge_groups",
        r"leave_one_out",
        r"advantage|baseline",
        r"all_gather_object",
        r"own_groups|groups",
        r"reward",
    ],
    wrong=[
        r"(gradients?|parameters?).{0,30}(not|never) reduced|reduced twice|missing all.?reduce",
        r"mask.{0,30}(wrong|shift)|log.?prob.{0,40}wrong|tokens?.{0,20}shift",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten)|mean of (the )?means",
    ],
)
WHY = (
    "Each prompt's answers lie on three ranks (rows 0-4, 5-9 and 10-13, prompt = row mod 4); merged.update(groups) keeps for each prompt only the list of the last rank that has it instead of all lists together. "
    "The baseline of leave_one_out is thus made of one or two rewards rather than of all of the group, and every row's advantage (a weight of its log-probability) is wrong on all ranks; counts, masks and reductions are right. "
    "A right cause says that the weights/advantages are wrong as the groups gathered from the ranks replace each other in merge_groups. Fix: extend the lists."
)
