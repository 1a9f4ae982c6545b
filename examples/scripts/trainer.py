"""transformers' Trainer on texts of unequal length, padded batch by batch."""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--bug", default="")
args = parser.parse_args()


class Texts(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(args.seed)
        lengths = torch.randint(4, 12, (120,), generator=g).tolist()
        self.texts = [torch.randint(1, 50, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.texts[i]


def collate(texts):
    def padded(value):
        return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=value)

    labels = padded(-100)
    return {"input_ids": padded(0), "labels": labels, "attention_mask": (labels >= 0).long()}


set_seed(args.seed)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3))
arguments = TrainingArguments(
    output_dir="trained",
    per_device_train_batch_size=args.batch,
    gradient_accumulation_steps=args.accumulate,
    max_steps=6,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    ddp_backend="gloo",
    save_strategy="no",
    seed=args.seed,
    average_tokens_across_devices=args.bug != "a mean of means",
    disable_tqdm=True,
)
Trainer(model=model, args=arguments, train_dataset=Texts(), data_collator=collate).train()
