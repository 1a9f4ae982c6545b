"""DPO of a Phi model with peft LoRA, the reference log-probabilities from the same model with the adapter disabled, in DDP. After TRL and
accelerate reports of training that silently runs without synchronisation as the forward is called on the unwrapped `model.module`.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import PhiConfig, PhiForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, BETA = 7, 8, 34, 0.7


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        base = PhiForCausalLM(
            PhiConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=25,
                max_position_embeddings=16,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attention_dropout=0.0,
                use_cache=False,
                initializer_range=0.2,
            )
        )
        return get_peft_model(
            base,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=2,
                lora_alpha=3,
                lora_dropout=0.0,
                use_dora=False,
                target_modules=["q_proj", "v_proj", "fc1"],
                init_lora_weights=False,
            ),
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        prompt = torch.randint(3, VOCABULARY, (ROWS, 3), generator=g)
        out = {}
        for name in ("chosen", "rejected"):
            answer = torch.randint(3, VOCABULARY, (ROWS, LENGTH - 3), generator=g)
            lengths = 3 + torch.randint(1, LENGTH - 2, (ROWS, 1), generator=g)
            where = torch.arange(LENGTH)
            out[name] = torch.cat([prompt, answer], 1)
            out[f"{name}_answer"] = (where >= 3) & (where < lengths)
        return out

    @staticmethod
    def log_probability(model, rows):
        ids = torch.cat([rows["chosen"], rows["rejected"]])
        answer = torch.cat([rows["chosen_answer"], rows["rejected_answer"]])[:, 1:]
        logits = model(input_ids=ids).logits[:, :-1]
        each = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return (each * answer).sum(-1).chunk(2)

    def dpo(self, peft_model, policy, rows):
        with torch.no_grad(), peft_model.disable_adapter():
            ref_chosen, ref_rejected = self.log_probability(peft_model, rows)
        chosen, rejected = self.log_probability(policy, rows)
        margin = (chosen - ref_chosen) - (rejected - ref_rejected)
        return -F.logsigmoid(BETA * margin).sum()

    def loss_sum(self, model, rows):
        return self.dpo(model, model, rows), len(rows["chosen"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def policy(self, wrapped):
        return wrapped

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        loss = self.dpo(model.module, self.policy(model), mine)
        # DDP averages
        (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def policy(self, wrapped):
        return wrapped.module


EXPECT = dict(
    right=[
        r"(not|never|n't|no|missing|without|lacks?|un|skip\w*|omit\w*|bypass\w*)[ -]?.{0,50}(reduc|sync|averag|summ|combin|communicat|exchang)|"
        r"(own|local) (gradient|rows|part|share|data)|only (its|their|the) own|bypass",
        r"\bdp\b|data.?parallel|rank|ddp",
    ],
    place=[
        r"(every|all|each|any|no) (param|gradient|rank|weight|tensor|reduc)",
        r"lora",
        r"\bdp\b|data",
    ],
    wrong=[
        r"(counted|reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(own|local|wrong) (count|denominator|divisor)",
        r"(only|just) (some|one|a few) param",
        r"micro.?batch",
        r"rank \d (alone|only)|only (on )?rank \d",
    ],
)
WHY = (
    "The policy forward runs on model.module, past DDP, whose reducer is then not armed; the backward's gradients (all trainable LoRA matrices) "
    "are not reduced over dp at all. Each rank keeps the gradient of its own pairs, times the world size meant for DDP's average; the ranks differ."
)
