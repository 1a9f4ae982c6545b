"""Supervised fine-tuning of a small Qwen2 under FSDP2, four ranks with 4, 4, 3 and 3 rows, two micro-batches each, collated by transformers' DataCollatorForLanguageModeling. The loss is summed over the
target tokens and divided by their number in the whole window, over all ranks; every document ends with the end token, which is a target like any other.

The bug: `tokenizer.pad_token = tokenizer.eos_token`, the line of many recipes. The collator makes labels by replacing every pad token by -100, and so every end token too: the model is never taught to stop.
huggingface/transformers issues #23530 and #22794, huggingface/trl issue #976.
"""

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
LENGTHS = [4, 7, 3, 9, 5, 6, 8, 3, 10, 4, 6, 7, 3, 5]
ROWS, WIDTH, WORDS, PAD, END, MICRO = len(LENGTHS), max(LENGTHS), 21, 0, 1, 2


def target_tokens(rows):
    return (rows["labels"][:, 1:] != -100).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=WORDS,
                hidden_size=12,
                intermediate_size=18,
                num_hidden_layers=2,
                num_attention_heads=3,
                num_key_value_heads=3,
                initializer_range=0.3,
                tie_word_embeddings=False,
                use_cache=False,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(2, WORDS, (ROWS, WIDTH), generator=g)
        length = torch.tensor(LENGTHS)
        ids[torch.arange(ROWS), length - 1] = END
        there = torch.arange(WIDTH) < length[:, None]
        ids = ids.masked_fill(~there, PAD)
        return {
            "input_ids": ids,
            "attention_mask": there.long(),
            "labels": ids.masked_fill(~there, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            rows["labels"][:, 1:].flatten(),
            ignore_index=-100,
            reduction="sum",
        )
        return loss, target_tokens(rows)

    def distribute(self, model, ctx):
        mesh = init_device_mesh("cpu", (ctx.world_size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def tokenizer(self):
        words = {"<pad>": PAD, "</s>": END} | {f"w{i}": i for i in range(2, WORDS)}
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")),
            eos_token="</s>",
            pad_token="<pad>",
        )

    def step(self, model, batch, ctx):
        collate = DataCollatorForLanguageModeling(self.tokenizer(), mlm=False)
        documents = [
            ids[there.bool()].tolist()
            for ids, there in zip(batch["input_ids"], batch["attention_mask"])
        ]
        numbers = torch.arange(ROWS).tensor_split(ctx.world_size)[ctx.rank].tensor_split(MICRO)
        window = [collate([{"input_ids": documents[i]} for i in some]) for some in numbers]
        count = sum(target_tokens(rows) for rows in window)
        dist.all_reduce(count)
        for m, rows in enumerate(window):
            model.set_requires_gradient_sync(m == MICRO - 1)
            (self.loss_sum(model, rows)[0] * ctx.world_size / count).backward()


class Buggy(Clean):
    def tokenizer(self):
        tokenizer = super().tokenizer()
        tokenizer.pad_token = tokenizer.eos_token
        return tokenizer


EXPECT = dict(
    right=[
        r"label|target|token|position|mask|ignored|row|term|batch|data|input|loss",
        r"pad|eos|end|masked|ignored|-100|lost|missing|left out|dropped|not (read|scored|counted|learned|trained)|differ|other (labels|targets|rows|data|input)|changed|not (in|of) batch|last (token|position)|never",
    ],
    place=[
        r"label|target|collat|pad|eos|end token|mask|cross.?entropy|loss_sum|lm_head|logits|last (token|position)"
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(reduced|summed|added) (twice|again)",
        r"micro.?batch\S* .{0,20}(lost|dropped|missing|overwritten)",
        r"each rank .{0,20}own (count|number|denominator)|local (count|denominator)",
        r"rows? .{0,20}(never read|read twice)",
        r"pure(ly)? (a )?(scale|factor)|by one (and the same )?factor",
    ],
)
WHY = (
    "In the step's labels the end token of every document is -100 like padding, since both have one number. So the 14 targets 'end of document', one in each row, at the last position before the end token, give no gradient, and the "
    "denominator is the number of the other targets, 66-14 in place of 66, so that these weigh 66/52 of what they should. Wrong on all ranks and rows alike and on all parameters; clearest in the row of the end token "
    "(number 1) of lm_head.weight, which should be pulled towards the last states and is only pushed away. Right are: the rows every rank reads, the inputs (pads after the end of a causal model change nothing), the reduction, "
    "the sharding, the accumulation, and the fact that numerator and denominator fit each other. The fix is a pad token of its own, or labels by attention mask."
)
