"""GPT-2 from a config in the script, with the key-value cache that it gives by default."""

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel


def model():
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 12, "n_layer": 3, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def loss(outputs, targets):
    logits = outputs["logits"][:, :-1]
    return F.cross_entropy(logits.reshape(-1, 32), targets[:, 1:].reshape(-1))


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 32, (batch_size, 6), generator=g)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids
