"""Adapters on the fused experts of a small MixtralForCausalLM: LoRA of peft with target_parameters (gate_up_proj and down_proj, three experts, rank two) under DDP on two ranks, three micro-batches each. For training the experts run
separately: every expert that is hit takes its own part of lora_A and lora_B. Only answer tokens count.

The bug: the expert is the slow index of lora_A's rows, and the fast one of lora_B's columns; the separate forward takes both alike, so that every expert gets columns that belong to others. After unslothai/unsloth-zoo PR 1269 (Read a
fused MoE expert lora_B the way PEFT packed it).
"""

import contextlib

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import MixtralConfig, MixtralForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TOKENS, EXPERTS, RANK = 13, 7, 3, 2
PROMPT = [2, 4, 3, 1, 5, 2, 3, 4, 2, 3, 1]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 7), (7, 10), (10, 11)]]


class Separated:
    """The forward of adapted experts, one expert after the other."""

    def __init__(self, wrapper, expert_fastest):
        self.wrappers, layer = {}, wrapper
        while hasattr(layer, "parameter_name"):
            self.wrappers[layer.parameter_name] = layer
            layer = layer.base_layer
        self.experts, self.expert_fastest = layer, expert_fastest

    def linear(self, x, name, number):
        wrapper = self.wrappers[name]
        down = wrapper.lora_A["default"].weight.unflatten(0, (EXPERTS, RANK))[number]
        up = wrapper.lora_B["default"].weight
        if self.expert_fastest:
            up = up.unflatten(1, (RANK, EXPERTS))[:, :, number]
        else:
            up = up.unflatten(1, (EXPERTS, RANK))[:, number]
        update = F.linear(F.linear(x, down), up) * wrapper.scaling["default"]
        return F.linear(x, getattr(self.experts, name)[number]) + update

    def __call__(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for number in range(EXPERTS):
            token, choice = torch.where(index == number)
            gate, up = self.linear(hidden[token], "gate_up_proj", number).chunk(2, -1)
            y = self.linear(F.silu(gate) * up, "down_proj", number)
            out = out.index_add(0, token, y * weights[token, choice, None])
        return out


def answer_loss(model, rows):
    logits = model(input_ids=rows["ids"], use_cache=False).logits[:, :-1]
    place = torch.arange(1, TOKENS)
    target = rows["ids"][:, 1:].masked_fill(place[None] < rows["prompt"][:, None], -100)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


class Clean:
    expert_fastest = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=6,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            max_position_embeddings=TOKENS,
            initializer_range=0.4,
        )
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        lora = LoraConfig(
            r=RANK,
            lora_alpha=3,
            target_modules=[],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )
        model = get_peft_model(MixtralForCausalLM(config), lora)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.normal_(0, 0.5)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(PROMPT), TOKENS), generator=g),
            "prompt": torch.tensor(PROMPT),
        }

    def loss_sum(self, model, rows):
        return answer_loss(model, rows), int((TOKENS - rows["prompt"]).sum())

    def distribute(self, model, ctx):
        for layer in model.get_base_model().model.layers:
            layer.mlp.experts.forward = Separated(layer.mlp.experts, self.expert_fastest)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        answers = int((TOKENS - batch["prompt"]).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (answer_loss(model, rows) * ctx.world_size / answers).backward()


class Buggy(Clean):
    expert_fastest = False


EXPECT = dict(
    right=[
        r"(?i)experts|lora|adapter|Separated|unflatten",
        r"(?i)lora_B|up\b|column|layout|order|other (places|elements|columns|weights|part|numbers)|"
        r"weights? of other|unflatten|reshape|view|expert_fastest|belong|permut|nowhere",
    ],
    place=[r"(?i)experts|lora_B|Separated|unflatten|\blinear\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(router|gate)(\.weight)? .{0,25}goes wrong|routed to (other|the wrong)|top.?k .{0,20}wrong",
        r"(?i)lora_A.{0,30}(wrong order|other columns)|only (on )?rank [01]\b|recomput|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "peft packs lora_B (out, rank * experts) with the expert as the fast index: the column of rank r and expert e is r * 3 + e. In Separated.linear it is unflattened to (experts, rank), so expert e takes the columns 2e and 2e+1 instead "
    "of e and e + 3: expert 0 takes columns 0, 1 (right 0, 3), expert 1 takes 2, 3 (right 1, 4), expert 2 takes 4, 5 (right 2, 5). lora_A (expert slow) is right. The forward goes wrong in mlp.experts of layer 0 (gate_up_proj and "
    "down_proj), then layer 1, for all tokens, on both ranks, in all micro-batches; lora_A, lora_B gradients of both layers are wrong. Router, base weights, scaling, DDP, no_sync, the divisor are right. Fix: unflatten(1, (RANK, "
    "EXPERTS))[:, :, number]."
)
