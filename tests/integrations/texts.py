"""A task like text, made here: sentences whose tokens tell their kind; nets from config."""

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

WORDS, LENGTH, SIZE = 20, 8, 40


def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def _gpt2_config():
    return GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        num_labels=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )


def gpt2():
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(_gpt2_config())


def gpt2_language():
    torch.manual_seed(0)
    return GPT2LMHeadModel(_gpt2_config())


class Sentences(Dataset):
    """Sentences padded with 0, whose kind decides from which half most of their tokens are."""

    def __init__(self, count=SIZE, seed=0):
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 2
        half = torch.where(torch.rand(count, LENGTH, generator=draw) < 0.9, 0, 1)
        half = (half + self.labels[:, None]) % 2
        tokens = 2 + half * 9 + torch.randint(9, (count, LENGTH), generator=draw)
        lengths = torch.randint(4, LENGTH + 1, (count, 1), generator=draw)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.tokens = tokens * self.mask

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {
            "input_ids": self.tokens[index],
            "attention_mask": self.mask[index],
            "labels": self.labels[index],
        }


def batches(data=None, size=10):
    """Return batches as mappings, as collators make them."""
    data = data or Sentences()
    return [data[slice(start, start + size)] for start in range(0, len(data), size)]
