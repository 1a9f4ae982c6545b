"""GPT-2 from a small config with peft LoRA on its fused projection, under DDP (dp 2), two
micro-batches.

Activations are offloaded: saved_tensors_hooks copy what autograd saves to a host store, and a
tensor that is saved by several nodes is copied once.

Bug: the store knows a tensor by the address of its storage and its shape. The query, the key and
the value are views of one fused projection: same storage, same shape, other offsets. The first
that is saved stands for all three in the backward. After activation offloading in torchtune,
TransformerEngine and NeMo, which deduplicate tensors that share their storage.
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}


class HostStore:
    """Holds the saved activations of one forward until its backward."""

    def __init__(self):
        self.host, self.in_flight = {}, []

    def key(self, t):
        return (
            t.untyped_storage().data_ptr(),
            t.storage_offset(),
            tuple(t.shape),
            t.stride(),
            t._version,
        )

    def pack(self, t):
        if t.is_leaf or t.numel() < 8 or not t.is_floating_point():
            return t
        k = self.key(t)
        if k not in self.host:
            self.host[k] = t.detach().clone()
            self.in_flight.append(t.detach())
        return (self.host, k)

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        host, k = packed
        return host[k]

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


class StorageStore(HostStore):
    def key(self, t):
        return (t.untyped_storage().data_ptr(), tuple(t.shape), t._version)


class Clean:
    store = HostStore

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=31,
            n_positions=16,
            n_embd=15,
            n_layer=2,
            n_head=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="sdpa",
        )
        lora = LoraConfig(
            r=3,
            lora_alpha=5,
            target_modules=["c_attn"],
            lora_dropout=0.0,
            init_lora_weights=False,
            fan_in_fan_out=True,
        )
        return get_peft_model(GPT2LMHeadModel(config), lora)

    def batch(self):
        g = torch.Generator().manual_seed(200 + self.seed)
        return {"ids": torch.randint(0, 31, (7, 11), generator=g)}

    def loss_sum(self, model, rows):
        ids = rows["ids"]
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1), reduction="sum"
        )
        return loss, ids.shape[0] * (ids.shape[1] - 1)

    def distribute(self, model, ctx):
        return DDP(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        ids = batch["ids"]
        total = ids.shape[0] * (ids.shape[1] - 1)
        parts = ids.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]].tensor_split(2)
        for i, part in enumerate(parts):
            model.require_backward_grad_sync = i == len(parts) - 1
            store = self.store()
            with store.hooks():
                loss, _ = self.loss_sum(model, {"ids": part})
            store.in_flight.clear()
            (loss * ctx.axes["dp"] / total).backward()


class Buggy(Clean):
    store = StorageStore


EXPECT = dict(
    right=[
        r"storage|data_ptr|offset|view|alias|same key|collid|collision|dedup|stands for|first that",
        r"offload|saved|store|host|pack",
    ],
    place=[r"StorageStore", r"HostStore", r"\bkey\b", r"\bpack", r"saved_tensors_hooks", r"c_attn"],
    wrong=[
        r"require_backward_grad_sync|no_sync.*(wrong|miss)",
        r"lora_alpha|scaling of the (adapter|lora)",
        r"averag\w+ (twice|instead)",
        r"causal mask",
    ],
)
WHY = """StorageStore.key leaves the storage offset and the strides out of the key. The views
query, key and value of the fused c_attn output share one storage and have one shape, so that the
attention's backward gets the first of them back for all three. The forward and the loss are
right; the gradients that pass through the attention's backward are wrong, that is those of the
LoRA matrices of c_attn, most of all. A right cause says that the offloaded/saved activations are
deduplicated by storage pointer and shape so that different views are confused. The fix is to put
storage_offset and stride into the key."""
