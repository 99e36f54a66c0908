"""T5 from transformers, with random weights; the three embeddings that it ties have weights of their own."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

VOCABULARY, LENGTH = 64, 16


class T5(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.t5 = T5ForConditionalGeneration(config)
        for tied in (self.t5.encoder.embed_tokens, self.t5.decoder.embed_tokens, self.t5.lm_head):
            tied.weight = nn.Parameter(tied.weight.detach().clone())

    def forward(self, input_ids, decoder_input_ids):
        return self.t5(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False).logits


def model():
    return T5(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def data(batch_size, seed):
    """The target is the source backwards."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        source = torch.randint(2, VOCABULARY, (batch_size, LENGTH), generator=generator)
        target = source.flip(1)
        shifted = torch.cat([torch.zeros(batch_size, 1, dtype=torch.long), target[:, :-1]], dim=1)
        yield {"input_ids": source, "decoder_input_ids": shifted}, target


def loss(outputs, targets):
    return F.cross_entropy(outputs.reshape(-1, VOCABULARY), targets.reshape(-1))
