"""peft's P-tuning on a frozen transformers Llama: three virtual tokens made by a small network (the
prompt encoder), rows over dp (3 + 2 of 5), micro-batches of one or two rows. The ranks run the
prompt encoder once a step: the micro-batches meet a detached copy of the prompts whose gradient
is gathered over the window, and only then the encoder is walked back.

Bug: the gradient of the detached copy is summed over the ranks, as that of a soft prompt without
an encoder would be, and the parameters of the encoder are summed again after it. After training
loops for prompt tuning that were made to serve P-tuning, too.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import PromptEncoderConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, T, WORDS, VIRTUAL = 5, 7, 13, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=8,
            intermediate_size=11,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            initializer_range=0.3,
            use_cache=False,
        )
        peft = PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, encoder_hidden_size=6
        )
        return get_peft_model(LlamaForCausalLM(config), peft)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 510)
        ids = torch.randint(WORDS, (ROWS, T), generator=g)
        labels = ids.clone()
        for row, prompt in enumerate([2, 4, 1, 5, 3]):
            labels[row, :prompt] = -100
        return {"ids": ids, "labels": labels}

    def summed(self, logits, labels):
        logits, labels = logits[:, -T:-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return loss, int((labels != -100).sum())

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        return self.summed(logits, rows["labels"])

    def walk_back(self, prompts, leaf, ctx):
        prompts.backward(leaf.grad)

    def step(self, model, batch, ctx):
        group, base = ctx.group("dp"), model.get_base_model()
        tokens = int((batch["labels"][:, 1:] != -100).sum())
        prompts = model.get_prompt(batch_size=1)
        leaf = prompts.detach().requires_grad_()
        own = torch.arange(ROWS).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        for part in own.split(2):
            words = base.get_input_embeddings()(batch["ids"][part])
            joined = torch.cat([leaf.expand(len(part), -1, -1), words], 1)
            logits = base(inputs_embeds=joined, use_cache=False).logits
            loss, _ = self.summed(logits, batch["labels"][part])
            (loss / tokens).backward()
        self.walk_back(prompts, leaf, ctx)
        for p in model.parameters():
            if p.requires_grad:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def walk_back(self, prompts, leaf, ctx):
        dist.all_reduce(leaf.grad, group=ctx.group("dp"))
        prompts.backward(leaf.grad)


EXPECT = dict(
    right=[
        r"twice|again|two times|double|2 ?(x|times|\u00d7)|factor (of )?2|already (summed|reduced)|"
        r"both|times 2|\b2\b",
        r"all.?reduc|summed|reduced|reduction|\bsum\b",
        r"leaf|prompt|walk_back|before",
    ],
    place=[r"walk_back", r"leaf\.grad", r"prompt_encoder", r"all_reduce\(leaf"],
    wrong=[
        r"(row|example)s?.{0,30}(twice|both ranks|overlap)",
        r"micro.?batch.{0,30}(twice|double|counted again)",
        r"(token|label).{0,30}(count|normali).{0,30}(wrong|local|own)",
        r"retain_graph",
        r"(not|never) (summed|reduced|all.?reduced)",
    ],
)
WHY = """leaf.grad on a rank is the gradient of its own rows with respect to the prompts. Summed
over dp before prompts.backward, the encoder's parameters get the gradient of all rows on every
rank; the loop at the end sums these equal gradients over dp a second time. All parameters of the
prompt encoder (the only ones that learn) are too large by the number of ranks, 2. Fix: sum one of
the two, best only the parameters."""
