"""A translation transformer (Vaswani et al. 2017) around nn.Transformer, with padding and causal masks."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

PAD, BOS = 0, 1
VOCABULARY = 64


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=128):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(0))

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[:, : token_embedding.size(1)])


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size, emb_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_size, padding_idx=PAD)
        self.emb_size = emb_size

    def forward(self, tokens):
        return self.embedding(tokens.long()) * math.sqrt(self.emb_size)


class Seq2SeqTransformer(nn.Module):
    def __init__(self, num_layers=3, emb_size=64, nhead=4, dim_feedforward=128, dropout=0.1):
        super().__init__()
        self.src_tok_emb = TokenEmbedding(VOCABULARY, emb_size)
        self.tgt_tok_emb = TokenEmbedding(VOCABULARY, emb_size)
        self.positional_encoding = PositionalEncoding(emb_size, dropout)
        self.transformer = nn.Transformer(
            d_model=emb_size,
            nhead=nhead,
            num_encoder_layers=num_layers,
            num_decoder_layers=num_layers,
            dim_feedforward=dim_feedforward,
            dropout=dropout,
            batch_first=True,
        )
        self.generator = nn.Linear(emb_size, VOCABULARY)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, src, tgt):
        T = tgt.shape[1]
        tgt_mask = torch.triu(torch.ones(T, T, dtype=torch.bool, device=tgt.device), diagonal=1)
        src_padding_mask = src == PAD
        src_emb = self.positional_encoding(self.src_tok_emb(src))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(tgt))
        outs = self.transformer(
            src_emb,
            tgt_emb,
            tgt_mask=tgt_mask,
            src_key_padding_mask=src_padding_mask,
            tgt_key_padding_mask=tgt == PAD,
            memory_key_padding_mask=src_padding_mask,
        )
        return self.generator(outs)


def model():
    return Seq2SeqTransformer()


def data(batch_size, seed):
    """The target is the source backwards; sources are of 8 to 16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        lengths = torch.randint(8, 17, (batch_size,), generator=generator)
        src = torch.randint(2, VOCABULARY, (batch_size, 16), generator=generator)
        places = torch.arange(16).expand(batch_size, 16)
        src = src.masked_fill(places >= lengths[:, None], PAD)
        back = src.gather(1, (lengths[:, None] - 1 - places).clamp(min=0))
        out = back.masked_fill(places >= lengths[:, None], PAD)
        tgt = torch.cat([torch.full((batch_size, 1), BOS), out[:, :-1]], dim=1)
        yield (src, tgt), out


def loss(outputs, targets):
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=PAD, reduction="none")
    return (losses.sum(1) / (targets != PAD).sum(1)).mean()
