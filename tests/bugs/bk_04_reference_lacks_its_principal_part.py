"""DPO on a small Llama with a PiSSA adapter of peft on q_proj and v_proj, DistributedDataParallel on three ranks with 3, 2 and 2 of seven pairs. PiSSA moves the first two singular directions of each
weight into the adapter and leaves the rest as the base. The reference is a frozen copy of the model from before the adapter; the policy has moved a little from it.

The bug: the reference's log-probabilities come from the policy with its adapter switched off, the usual saving of a copy, but under PiSSA that is the base without its principal part. After peft's
notes on PiSSA (the residual base, path_initial_model_for_weight_conversion) and the reports for trl that ref_model=None is not the initial model when init_lora_weights is "pissa".
"""

import contextlib
import copy

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, WIDTH, LENGTH, PROMPT, ROWS, BETA = 17, 8, 6, 2, 7, 0.4


class Preference(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=WIDTH,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=16,
                initializer_range=0.5,
                tie_word_embeddings=False,
                attn_implementation="sdpa",
                use_cache=False,
            )
        )
        self.reference = copy.deepcopy(base).requires_grad_(False)
        adapter = LoraConfig(
            r=2,
            lora_alpha=4,
            lora_dropout=0.0,
            target_modules=["q_proj", "v_proj"],
            init_lora_weights="pissa",
        )
        self.policy = get_peft_model(base, adapter)
        with torch.no_grad():
            for name, p in self.policy.named_parameters():
                if "lora_" in name:
                    p.add_(torch.randn_like(p) * 0.1)
        self.own_reference = True

    def logps(self, model, ids):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return logp[:, PROMPT - 1 :].sum(-1)

    def reference_logps(self, ids):
        model, context = self.reference, contextlib.nullcontext()
        if not self.own_reference:
            model, context = self.policy, self.policy.disable_adapter()
        with torch.no_grad(), context:
            return self.logps(model, ids)

    def forward(self, chosen, rejected):
        ids = torch.cat([chosen, rejected])
        reference = self.reference_logps(ids)
        ratio = self.logps(self.policy, ids) - reference
        better, worse = ratio.chunk(2)
        return -F.logsigmoid(BETA * (better - worse)).sum()


class Clean:
    own_reference = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        return Preference(self.seed)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        chosen = torch.randint(WORDS, (ROWS, LENGTH), generator=g)
        rejected = torch.randint(WORDS, (ROWS, LENGTH), generator=g)
        rejected[:, :PROMPT] = chosen[:, :PROMPT]
        return {"chosen": chosen, "rejected": rejected}

    def loss_sum(self, model, rows):
        return model(rows["chosen"], rows["rejected"]), len(rows["chosen"])

    def distribute(self, model, ctx):
        model.own_reference = self.own_reference
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss = model(mine["chosen"], mine["rejected"])
        (loss * ctx.world_size / len(batch["chosen"])).backward()  # DDP averages


class Buggy(Clean):
    own_reference = False


EXPECT = dict(
    right=[
        r"reference|adapter|lora|policy|base",
        r"forward|log.?p|adapter|lora|differ|factor|weight|other|module|run|call|disabled|switched|coefficient|row",
    ],
    place=[r"reference", r"adapter", r"lora", r"policy", r"q_proj|v_proj", r"disable"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"backward formula|policy .{0,30}forward is wrong|(wrong|other) rows|pairs? .{0,20}(torn|mixed)",
        r"only (rank \d|the last micro.?batch)",
    ],
)
WHY = (
    "With own_reference False, reference_logps runs the policy with its adapter disabled on all three ranks; after PiSSA the base weights of q_proj and v_proj in both layers lack scaling * B @ A (their two "
    "largest singular directions), so the reference's log-probabilities are those of a damaged model and not of the initial one. The frozen copy `reference` is never called. The policy's own "
    "log-probabilities are right. The margin inside logsigmoid is shifted in each pair, so each pair's gradient has the right direction in the policy's log-ratio but a wrong factor (sigmoid of another "
    "margin), on all ranks. DDP, the split 3, 2, 2, and the divisor 7 are right. Fix: use the copy from before the adapter."
)
