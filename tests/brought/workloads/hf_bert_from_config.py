"""A small BERT classifier from a config in the script, without dropout."""

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification


def model():
    sizes = {"hidden_size": 12, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 3}
    config = BertConfig(vocab_size=20, num_labels=4, max_position_embeddings=16, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return BertForSequenceClassification(config)


def loss(outputs, targets):
    return F.cross_entropy(outputs["logits"], targets)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size, 6), generator=g)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids[:, 0] % 4
