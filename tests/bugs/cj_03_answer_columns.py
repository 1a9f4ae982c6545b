"""A small Llama (transformers, from a config) that is tuned on answers of unlike length, under
FSDP2 (dp 3).

Every row is as wide as the others, the prompt comes first and the answer stands in the last
`answer` columns; some rows have an empty answer (a refused question, which an earlier filter
emptied). Two micro-batches.

Bug: the log-probabilities of the answer are taken as the last n columns, `[-n:]`. With n = 0 that
is `[0:]`, the whole row: the prompts of rows without an answer are learnt, and are in no count.
After `logits_to_keep` and completion slices in GRPO/DPO trainers, where zero means everything.
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WIDTH = 10


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=29,
                hidden_size=12,
                intermediate_size=17,
                num_hidden_layers=2,
                num_attention_heads=3,
                num_key_value_heads=1,
                max_position_embeddings=16,
                use_cache=False,
                tie_word_embeddings=False,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(300 + self.seed)
        return {
            "ids": torch.randint(3, 29, (8, WIDTH), generator=g),
            "answer": torch.tensor([4, 0, 7, 3, 5, 0, 2, 6]),
        }

    def token_log_probs(self, model, ids):
        logits = model(input_ids=ids).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    def loss_sum(self, model, rows):
        logp = self.token_log_probs(model, rows["ids"])
        column = torch.arange(1, WIDTH)
        mask = column >= WIDTH - rows["answer"][:, None]
        return -(logp * mask).sum(), rows["answer"].sum()

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh["dp"])
        return fully_shard(model, mesh=ctx.mesh["dp"])

    def answer_part(self, row, n):
        return row[row.shape[0] - n :]

    def step(self, model, batch, ctx):
        mine = torch.arange(batch["ids"].shape[0]).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        tokens = batch["answer"][mine].sum()
        dist.all_reduce(tokens, group=ctx.group("dp"))
        parts = mine.tensor_split(2)
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            logp = self.token_log_probs(model, batch["ids"][part])
            lengths = batch["answer"][part].tolist()
            loss = -sum(
                self.answer_part(row, n).sum() for row, n in zip(logp, lengths, strict=True)
            )
            (loss * ctx.axes["dp"] / tokens).backward()


class Buggy(Clean):
    def answer_part(self, row, n):
        return row[-n:]


EXPECT = dict(
    right=[
        r"-n|\[-|minus zero|-0|zero|empty|no answer|without (an |any )?answer|length (of )?0",
        r"whole row|entire|all (the )?(columns|tokens|positions)|prompt|everything|full (row|"
        r"sequence)",
    ],
    place=[r"answer_part", r"row\[-n", r"\banswer\b", r"slice"],
    wrong=[
        r"shift\w* by one|off.by.one",
        r"(tokens|count)\w* (is|are) (local|not all.?reduced)",
        r"gradient_sync|reduce.scatter",
        r"averag\w+ per (rank|micro)",
    ],
)
WHY = """answer_part takes row[-n:]. For rows whose answer is empty n is 0, and row[-0:] is the
whole row, so all prompt tokens of these rows enter the loss, although they are in no count.
Gradients of all parameters get the additional contribution of rows 1 and 5 (answer 0); the other
rows contribute rightly. A right cause says that rows with an answer length of zero contribute all
their (prompt) tokens because of the negative slice -0. The fix is row[row.shape[0] - n:]."""
