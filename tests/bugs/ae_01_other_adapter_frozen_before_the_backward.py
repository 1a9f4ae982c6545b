"""PPO with one frozen language model and two LoRA adapters on it (peft): "policy" for the actor's logits and "value" for the critic's hidden states, with a trained linear head for the values. Three data ranks with 3, 2 and 2 rows,
micro-batches of one row, gradients summed by hand over one flat buffer; the divisor is the global number of answer tokens.

The bug: in every micro-batch the policy's forward runs first, then `set_adapter("value")` and the critic's forward, then one backward for both losses. `set_adapter` does more than choose the adapter: it also sets requires_grad=False on the
adapters that are not active, and autograd's AccumulateGrad drops what arrives at a leaf that does not require a gradient at the time of the backward. So the policy's adapter gets none. That both adapters are made trainable once, at the
start of the step, does not help. After huggingface/peft #2759 ("wrong coupling between requires_grad and the active adapter"), fixed in part by #2765, and #2807, which adds set_requires_grad for this use.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"ppo": {"axes": {"dp": 3}}}}
LENGTH, WORDS, CLIP, VALUE_SHARE = 7, 19, 0.2, 0.5
SHARES = [(0, 3), (3, 5), (5, 7)]


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=16,
            attn_implementation="eager",
            tie_word_embeddings=False,
        )
        policy = LoraConfig(
            r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
        )
        value = LoraConfig(
            r=2, lora_alpha=4, target_modules=["v_proj", "down_proj"], lora_dropout=0.0
        )
        self.lm = get_peft_model(LlamaForCausalLM(config), policy, adapter_name="policy")
        self.lm.add_adapter("value", value)
        self.value_head = nn.Linear(12, 1)
        for name, p in self.lm.named_parameters():
            if "lora_B" in name or "lm_head" in name:
                nn.init.normal_(p, std=0.3)

    def adapters_trainable(self):
        for name, p in self.lm.named_parameters():
            if "lora_" in name:
                p.requires_grad_(True)


def ppo_sum(model, rows, thaw_after_switch):
    ids, mask = rows["ids"], rows["answer"][:, 1:].to(rows["advantage"].dtype)
    model.lm.set_adapter("policy")
    if thaw_after_switch:
        model.adapters_trainable()
    logits = model.lm(input_ids=ids).logits[:, :-1]
    logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    ratio = (logp - rows["old_logp"][:, 1:]).exp()
    gain = rows["advantage"][:, 1:]
    actor = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)

    model.lm.set_adapter("value")
    if thaw_after_switch:
        model.adapters_trainable()
    hidden = model.lm(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    value = model.value_head(hidden).squeeze(-1)[:, :-1]
    critic = F.mse_loss(value, rows["returns"][:, 1:], reduction="none")
    return ((actor + VALUE_SHARE * critic) * mask).sum()


class Clean:
    thaw_after_switch = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = ActorCritic()
        model.adapters_trainable()
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = SHARES[-1][1]
        first = torch.tensor([2, 4, 3, 5, 2, 3, 4])
        return {
            "ids": torch.randint(WORDS, (rows, LENGTH), generator=g),
            "answer": torch.arange(LENGTH)[None] >= first[:, None],
            "old_logp": -2.9 + 0.5 * torch.randn(rows, LENGTH, generator=g),
            "advantage": torch.randn(rows, LENGTH, generator=g),
            "returns": torch.randn(rows, LENGTH, generator=g),
        }

    def loss_sum(self, model, rows):
        return ppo_sum(model, rows, True), int(rows["answer"][:, 1:].sum())

    def step(self, model, batch, ctx):
        model.adapters_trainable()
        trained = [p for p in model.parameters() if p.requires_grad]
        tokens = int(batch["answer"][:, 1:].sum())
        low, high = SHARES[ctx.rank]
        for i in range(low, high):
            row = {k: v[i : i + 1] for k, v in batch.items()}
            (ppo_sum(model, row, self.thaw_after_switch) / tokens).backward()
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]
        )
        dist.all_reduce(flat, group=ctx.group("dp"))
        for p, g in zip(trained, flat.split([p.numel() for p in trained])):
            p.grad = g.view_as(p).clone()
        model.adapters_trainable()


class Buggy(Clean):
    thaw_after_switch = False


EXPECT = dict(
    right=[
        r"(?i)policy",
        r"(?i)zero|no gradient|never (reach|arriv|get)|missing|none|absent|lost|dropped|requires_grad|frozen|not (trained|differentiated)|without (a )?gradient|detach|cut",
    ],
    place=[r"(?i)lora_[AB]\.policy|policy"],
    wrong=[
        r"(?i)lora_[AB]\.value[^.]{0,40}(is|are) (wrong|zero|lost|missing)",
        r"(?i)value_head[^.]{0,30}(is|are) (wrong|zero|missing)",
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)rows? .{0,20}(never read|read twice)",
        r"(?i)only (on )?rank [012]\b",
    ],
)
WHY = (
    "set_adapter('value') turns requires_grad off on the lora_A.policy and lora_B.policy of every layer before the backward of the joint loss. Autograd still computes their gradients but AccumulateGrad throws them away for a leaf that does not "
    "require gradients, so on all three ranks, in all micro-batches, the gradients of all lora_*.policy parameters (q_proj and v_proj of both layers) are None and become zeros in the flat buffer. All else is right: both forwards, both losses, "
    "the gradients of lora_*.value and of value_head (only the critic reaches them), the divisor, the sum over the ranks. Fix: make both adapters trainable again after each set_adapter (peft's set_requires_grad), or run the actor's backward "
    "before the switch."
)
