"""Actor and critic as two LoRA adapters (peft) on one frozen trunk, each with a head of its own, on two data parallel ranks with two micro-batches each: every micro-batch runs the trunk once with the adapter `actor` (cross entropy
weighted by the advantage) and once with `critic` (squared error). At the end the gradients are collected in a dictionary by parameter name, summed over the ranks and written back.

The bug: the keys of the dictionary are the names as in a saved adapter, where the adapter's name is cut out (lora_A.actor.weight and lora_A.critic.weight both become lora_A.weight), and values under one key are added. After peft's
get_peft_model_state_dict, which removes the adapter's name, used for training two adapters as in huggingface/peft issues 1303 and 2759.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
STATE, WIDTH, ACTIONS, VALUE_WEIGHT = 5, 8, 4, 0.5
PARTS = [[(0, 3), (3, 7)], [(7, 9), (9, 12)]]
ADAPTERS = ("actor", "critic")


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(STATE, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.silu(self.second(F.silu(self.first(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = LoraConfig(
            r=2, lora_alpha=4, target_modules=["first", "second"], init_lora_weights=False
        )
        self.trunk = get_peft_model(Trunk(), config, adapter_name="actor")
        self.trunk.add_adapter("critic", config)
        for name, p in self.trunk.named_parameters():
            p.requires_grad_("lora_" in name)
        self.policy, self.value = nn.Linear(WIDTH, ACTIONS), nn.Linear(WIDTH, 1)

    def adapted(self, adapter, x):
        for module in self.trunk.modules():
            if isinstance(module, LoraLayer):
                module._active_adapter = [adapter]
        return self.trunk(x)

    def forward(self, x):
        scores = self.policy(self.adapted("actor", x))
        return scores, self.value(self.adapted("critic", x)).squeeze(1)


def actor_critic_loss(model, rows):
    scores, value = model(rows["state"])
    actor = F.cross_entropy(scores, rows["action"], reduction="none") * rows["advantage"]
    critic = (value - rows["return"]) ** 2
    return (actor + VALUE_WEIGHT * critic).sum()


class Clean:
    stripped = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        n = PARTS[-1][-1][1]
        return {
            "state": torch.randn(n, STATE, generator=g),
            "action": torch.randint(ACTIONS, (n,), generator=g),
            "advantage": torch.randn(n, generator=g),
            "return": torch.randn(n, generator=g),
        }

    def loss_sum(self, model, rows):
        return actor_critic_loss(model, rows), len(rows["action"])

    def key(self, name):
        if self.stripped:
            for adapter in ADAPTERS:
                name = name.replace(f".{adapter}.", ".")
        return name

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (actor_critic_loss(model, rows) / len(batch["action"])).backward()
        named = [(self.key(n), p) for n, p in model.named_parameters() if p.requires_grad]
        sums = {}
        for key, p in named:
            sums[key] = sums[key] + p.grad if key in sums else p.grad.clone()
        for value in sums.values():
            dist.all_reduce(value, group=ctx.group("dp"))
        for key, p in named:
            p.grad = sums[key].clone()


class Buggy(Clean):
    stripped = True


EXPECT = dict(
    right=[
        r"(?i)lora|adapter|actor|critic",
        r"(?i)both|each other|sum of|added|another|other|foreign|mixed|same|shared|equal|"
        r"identical|swapped|plus",
        r"(?i)actor|critic|adapter|other param|another param",
    ],
    place=[r"(?i)lora_[AB]|adapter|actor|critic|trunk"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(policy|value)\.(weight|bias) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)backward of .{0,40}wrong|wrong in the backward",
    ],
)
WHY = (
    "Forward and backward are right on both ranks for all rows and micro-batches; the accumulated gradients before collection are right. In the collection lora_A and lora_B of `actor` and of `critic` in trunk.first and trunk.second "
    "share one key each, so the sum of the actor's and the critic's gradient is reduced and written back to both: each of the eight adapter weights gets its own right gradient plus that of the other adapter, identical on both "
    "ranks. The heads policy and value, whose names hold no adapter name, are right; the trunk is frozen. Divisor 12 and the all-reduce are right. Fix: keep the adapter's name in the key."
)
