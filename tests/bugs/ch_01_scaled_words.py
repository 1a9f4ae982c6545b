"""Gemma3 text model (transformers, small config) with LoRA on its word table and queries (peft),
the word table cut by rows over tp 3, two micro-batches.

The words' rows and the columns of lora_embedding_A lie on three ranks, unevenly; looked up vectors
are summed over the shards. lora_embedding_B is replicated and its partial gradients are summed.

The bug: Gemma multiplies its embeddings by sqrt(hidden_size) inside the embedding module. The
vocabulary parallel forward scales the base lookup and adds the adapter's contribution behind it,
unscaled. After huggingface/peft's fix that makes LoRA's Embedding respect ``embed_scale``.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Embedding as LoraEmbedding
from torch import nn
from torch.nn import functional as F
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}

ROWS, LENGTH, WORDS, WIDTH = 5, 7, 17, 12


class SumShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ShardedWords(LoraEmbedding):
    def lookup(self, ids):
        table = self.base_layer.weight
        here = (ids >= self.begin) & (ids < self.begin + table.shape[0])
        local = torch.where(here, ids - self.begin, 0)
        down = F.embedding(local, self.lora_embedding_A["default"].T)
        update = down @ self.lora_embedding_B["default"].T * self.scaling["default"]
        here = here.unsqueeze(-1)
        return F.embedding(local, table) * here, update * here

    def forward(self, ids):
        words, update = self.lookup(ids)
        return SumShards.apply(words + update, self.group) * self.base_layer.embed_scale


class ScaledWords(ShardedWords):
    def forward(self, ids):
        words, update = self.lookup(ids)
        words = words * self.base_layer.embed_scale
        return SumShards.apply(words + update, self.group)


class Clean:
    words_class = ShardedWords

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(21 + self.seed)
        config = Gemma3TextConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            intermediate_size=13,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=4,
            query_pre_attn_scalar=4,
            max_position_embeddings=16,
            sliding_window=4,
            initializer_range=0.3,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="eager",
        )
        adapters = LoraConfig(
            r=3, lora_alpha=2, target_modules=["embed_tokens", "q_proj"], init_lora_weights=False
        )
        return get_peft_model(Gemma3ForCausalLM(config), adapters)

    def batch(self):
        g = torch.Generator().manual_seed(22 + self.seed)
        return {"ids": torch.randint(3, WORDS, (ROWS, LENGTH), generator=g)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits[:, :-1]
        labels = rows["ids"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, labels.numel()

    def distribute(self, model, ctx):
        group, rank, world = ctx.group("tp"), ctx.coords["tp"], ctx.axes["tp"]
        own = torch.tensor_split(torch.arange(WORDS), world)[rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for module in model.modules():
            if isinstance(module, LoraEmbedding):
                base, down = module.base_layer, module.lora_embedding_A
                base.weight = nn.Parameter(base.weight.detach()[lo:hi].clone(), requires_grad=False)
                down["default"] = nn.Parameter(down["default"].detach()[:, lo:hi].clone())
                module.__class__ = self.words_class
                module.group, module.begin = group, lo
        return model

    def step(self, model, batch, ctx):
        for ids in torch.tensor_split(batch["ids"], 2):
            loss, _ = self.loss_sum(model, {"ids": ids})
            (loss / (ROWS * (LENGTH - 1))).backward()
        for name, parameter in model.named_parameters():
            if "lora_embedding_B" in name:
                dist.all_reduce(parameter.grad, group=ctx.group("tp"))


class Buggy(Clean):
    words_class = ScaledWords


EXPECT = dict(
    right=[
        r"embed_?scale|scal(e|ed|ing)|sqrt|multipl|factor",
        r"lora|adapter|update|low[- ]rank",
        r"embed|word|lookup|token|vocab",
    ],
    place=[
        r"ScaledWords",
        r"ShardedWords",
        r"lora_embedding_[AB]",
        r"embed_scale",
        r"embed_tokens",
    ],
    wrong=[
        r"(not|never|missing|without).{0,40}(all-?)?reduc",
        r"mask|out of range|boundary",
        r"divis(or|ion)|normali[sz]|micro-?batch",
        r"lora_alpha|alpha ?/ ?r\b|rank of the adapter",
    ],
)

WHY = (
    "Gemma3's embedding multiplies what it looks up by embed_scale = sqrt(hidden_size), and the "
    "adapter changes the table, so its contribution has to be multiplied as well. ScaledWords "
    "multiplies only the base lookup and adds the LoRA update unscaled, so the update is "
    "sqrt(12) times too small in the forward. The gradients of lora_embedding_A and "
    "lora_embedding_B lack that factor, and as the hidden states change, those of the q_proj "
    "adapters are wrong too; the cut of the table, the sum over the shards and the reduction "
    "of B are right. A right cause says that the LoRA part of the word embedding does not get "
    "embed_scale. The fix is to scale the sum of base and update."
)
