"""LoRA fine-tuning of a small Llama with peft under DistributedDataParallel; the head is trained in full (modules_to_save). Before each step the first rank generates a continuation of one row for the log, as in TRL's and diffusers' scripts
(`if accelerator.is_main_process: log_validation(...)`).

The bug: to generate faster the adapters are merged into the base weights first (`merge_adapter()`, as TRL's unwrap_model_for_generation / GRPOTrainer do) and `unmerge_adapter()` afterwards is forgotten. DDP complained about unused parameters, and
got `find_unused_parameters=True`. Origin: reports around merge_adapter / unmerge_adapter in TRL's GRPO with peft.
"""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WIDTH, WORDS, NEW = 11, 7, 23, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        base = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=12,
                intermediate_size=18,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=WIDTH + NEW,
                initializer_range=0.3,
                tie_word_embeddings=False,
                attn_implementation="eager",
                use_cache=False,
            )
        )
        lora = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=2,
            lora_alpha=4,
            lora_dropout=0.0,
            target_modules=["q_proj", "v_proj", "down_proj"],
            modules_to_save=["lm_head"],
            init_lora_weights=False,
        )
        return get_peft_model(base, lora)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(3, WIDTH + 1, (ROWS,), generator=g)
        return {
            "ids": torch.randint(WORDS, (ROWS, WIDTH), generator=g),
            "mask": torch.arange(WIDTH) < length[:, None],
        }

    def loss_sum(self, model, rows):
        """Per row the mean over its tokens."""
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"].long()).logits[:, :-1]
        seen = rows["mask"][:, 1:]
        each = F.cross_entropy(logits.mT, rows["ids"][:, 1:], reduction="none")
        return ((each * seen).sum(1) / seen.sum(1)).sum(), len(rows["ids"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, find_unused_parameters=True)

    def prepare_sampling(self, model):
        pass

    @torch.no_grad()
    def sample(self, model, ids):
        """Greedy continuation for the log."""
        self.prepare_sampling(model)
        for _ in range(NEW):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        return ids

    def step(self, model, batch, ctx):
        if ctx.rank == 0:
            self.text = self.sample(model.module, batch["ids"][:1])
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss * ctx.world_size / len(batch["ids"])).backward()


class Buggy(Clean):
    def prepare_sampling(self, model):
        model.merge_adapter()


EXPECT = dict(
    right=[
        r"(?i)lora|adapter",
        r"(?i)rank 0|ranks? \(?0\b|first rank|rows? \[?0",
        r"(?i)missing|lost|zero|no gradient|nothing|not contribut|without|absent|left out|coefficient (of )?0|weight (of )?0|none|does not (reach|arrive)|detach|cut|merged",
    ],
    place=[r"(?i)lora|adapter|rank 0"],
    wrong=[
        r"(?i)lm_head\S* (is|are) wrong",
        r"(?i)ranks? (1|2) .{0,30}(missing|lost|contributes? nothing)",
        r"(?i)divided by (its|their) own|wrong divisor|divisor is wrong",
        r"(?i)(reduced|summed) (twice|again)",
        r"(?i)(rows?|tokens?) .{0,20}(never read|read twice)",
        r"(?i)targets? (is|are) (wrong|other)",
    ],
)
WHY = (
    "Rank 0 merges its adapters before it samples and never unmerges them. Its LoRA layers then run the merged base weight alone: the output is the same (in the first step, to rounding), but lora_A and lora_B take no part in the graph and get no gradient on rank 0; DDP with find_unused_parameters=True "
    "fills in zeros. So the reduced gradient of all lora_A / lora_B (q_proj, v_proj, down_proj of both layers), on all ranks, lacks the contribution of rank 0's rows 0-3; that of rows 4-10 is there with its right weight. The trained head (lm_head, modules_to_save) is right in the first step on all ranks. "
    "In a second step rank 0's base weights still contain the adapters of the first step (merge_adapter then does nothing), so if LoRA weights moved, rank 0's forward is also stale. Divisor, rows and targets are right. Fix: unmerge_adapter() after sampling."
)
