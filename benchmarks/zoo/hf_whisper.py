"""Whisper from transformers, with random weights and an output layer of its own."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import WhisperConfig, WhisperForConditionalGeneration

VOCABULARY, MELS, FRAMES, LENGTH = 64, 16, 64, 12


class Whisper(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.whisper = WhisperForConditionalGeneration(config)

    def forward(self, input_features, decoder_input_ids):
        outputs = self.whisper(
            input_features=input_features, decoder_input_ids=decoder_input_ids, use_cache=False
        )
        return outputs.logits


def model():
    return Whisper(
        WhisperConfig(
            vocab_size=VOCABULARY,
            num_mel_bins=MELS,
            d_model=64,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=128,
            decoder_ffn_dim=128,
            max_source_positions=FRAMES // 2,
            max_target_positions=LENGTH,
            decoder_start_token_id=1,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            tie_word_embeddings=False,
        )
    )


def data(batch_size, seed):
    """A token for every few frames, whose energy lies in that token's mel bin."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(3, 3 + MELS, (batch_size, LENGTH), generator=generator)
        features = torch.randn(batch_size, MELS, FRAMES, generator=generator)
        spoken = F.one_hot(tokens - 3, MELS).float().transpose(1, 2)
        features[:, :, : LENGTH * 5] += 3 * spoken.repeat_interleave(5, dim=2)
        shifted = torch.cat([torch.ones(batch_size, 1, dtype=torch.long), tokens[:, :-1]], dim=1)
        yield {"input_features": features, "decoder_input_ids": shifted}, tokens


def loss(outputs, targets):
    return F.cross_entropy(outputs.reshape(-1, VOCABULARY), targets.reshape(-1))
