"""Voice assistant: a tiny GemmaForCausalLM of transformers (from a config, tied head) gets text, or text with some tokens replaced by projected sound frames (inputs_embeds). Three data-parallel ranks, two micro-batches each, of text alone
or with sound; gradients summed over dp by hand. The divisor is the number of predicted tokens of the whole batch.

The bug: for micro-batches with sound the word embeddings are looked up by F.embedding in the weight of the table. Gemma's embedding module also multiplies by sqrt(hidden size); text alone goes through it (input_ids), the words beside
the sound do not. As in vllm-project/vllm pull request 36787 (Gemma 1 and 2 scaled in the model's forward, Gemma 3 in the embedding; transformers moved it too) and huggingface/transformers issue 37117 on PaliGemma.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import GemmaConfig, GemmaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, WIDTH, SOUND, FRAMES = 7, 19, 8, 3, 2
PARTS = [[(0, 2), (2, 5)], [(5, 7), (7, 8)], [(8, 10), (10, 13)]]
SPEAKS = [0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0]


class Assistant(nn.Module):
    def __init__(self):
        super().__init__()
        config = GemmaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            max_position_embeddings=16,
            pad_token_id=None,
            bos_token_id=1,
            eos_token_id=1,
            initializer_range=0.3,
            use_cache=False,
            attn_implementation="eager",
        )
        self.lm = GemmaForCausalLM(config)
        self.projector = nn.Linear(SOUND, WIDTH)
        self.by_weight = False

    def forward(self, rows):
        ids, speaks = rows["ids"], rows["speaks"].bool()
        if not speaks.any():
            return self.lm(input_ids=ids).logits
        table = self.lm.get_input_embeddings()
        words = F.embedding(ids, table.weight) if self.by_weight else table(ids)
        sound = self.projector(rows["sound"])
        sound = torch.cat([words[:, :1], sound, words[:, 1 + FRAMES :]], 1)
        return self.lm(inputs_embeds=torch.where(speaks[:, None, None], sound, words)).logits


def next_token_loss(model, rows):
    logits = model(rows)[:, FRAMES:-1]
    labels = rows["ids"][:, FRAMES + 1 :]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    by_weight = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Assistant()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(SPEAKS)
        return {
            "ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "sound": torch.randn(rows, FRAMES, SOUND, generator=g) * 2,
            "speaks": torch.tensor(SPEAKS),
        }

    def loss_sum(self, model, rows):
        return next_token_loss(model, rows), len(rows["ids"]) * (TOKENS - 1 - FRAMES)

    def distribute(self, model, ctx):
        model.by_weight = self.by_weight
        return model

    def step(self, model, batch, ctx):
        tokens = len(batch["ids"]) * (TOKENS - 1 - FRAMES)
        for low, high in PARTS[ctx.rank]:
            loss = next_token_loss(model, {k: v[low:high] for k, v in batch.items()})
            (loss / tokens).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    by_weight = True


EXPECT = dict(
    right=[
        r"(?i)forward|input|embed",
        r"(?i)embed|layers?\.0|first layer|input|model\b|lm\b",
        r"(?i)micro.?batch|rows?|ranks? [01]|sound|speak|turn",
    ],
    place=[r"(?i)embed|layers?\.0|lm\.model|input|rows? (2|3|4|7)"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|mean of means",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward is right|wrong only in the backward|backward (alone )?is wrong",
        r"(?i)(labels?|targets?) .{0,15}(wrong|shifted)|position.{0,12}wrong|projector.{0,15}(output|forward).{0,15}wrong",
        r"(?i)rank 2 (is|has|goes|reads) .{0,10}wrong|on all ranks|every rank.{0,20}wrong",
    ],
)
WHY = (
    "Wrong are the micro-batches with sound: rank 0's second (rows 2, 3, 4; row 2 is text alone but in the same micro-batch) and rank 1's second (row 7). There the word embeddings that enter the first layer are too small by sqrt(8); the "
    "projected frames are right. The forward goes wrong at the input of the language model (the embedding module is not called there; first wrong at lm.model.layers.0), and the embedding's gradient from these inputs lacks the factor as "
    "well. All parameters get wrong gradients (embedding and tied head, layers, norm, projector), after the sum equally on all ranks. Rank 2, rank 0's and rank 1's first micro-batches, the divisor 52, labels and the all-reduce are right. "
    "Fix: use the embedding module (get_input_embeddings()(ids))."
)
