"""A BERT-like classifier (Devlin et al. 2018) whose batches are dicts, as tokenizers give them."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, LENGTH, CLASSES = 128, 32, 4


class Embeddings(nn.Module):
    def __init__(self, hidden_size, max_position, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(max_position, hidden_size)
        self.token_type_embeddings = nn.Embedding(2, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("position_ids", torch.arange(max_position).expand((1, -1)), persistent=False)

    def forward(self, input_ids, token_type_ids=None):
        seq_length = input_ids.size(1)
        position_ids = self.position_ids[:, :seq_length]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings += self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class SelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x):
        new_shape = x.size()[:-1] + (self.num_heads, self.head_size)
        return x.view(new_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query = self.transpose_for_scores(self.query(hidden_states))
        key = self.transpose_for_scores(self.key(hidden_states))
        value = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.head_size)
        probs = self.dropout(F.softmax(scores + attention_mask, dim=-1))
        context = torch.matmul(probs, value).permute(0, 2, 1, 3).contiguous()
        return context.view(context.size()[:-2] + (self.num_heads * self.head_size,))


class Layer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size, dropout):
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads, dropout)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, attention_mask):
        attention = self.dropout(self.attention_output(self.attention(hidden_states, attention_mask)))
        attention = self.attention_norm(attention + hidden_states)
        output = self.dropout(self.output(F.gelu(self.intermediate(attention))))
        return self.output_norm(output + attention)


class BertForSequenceClassification(nn.Module):
    def __init__(self, hidden_size=64, num_layers=4, num_heads=4, dropout=0.1):
        super().__init__()
        self.embeddings = Embeddings(hidden_size, LENGTH, dropout)
        self.layers = nn.ModuleList(
            [Layer(hidden_size, num_heads, hidden_size * 4, dropout) for _ in range(num_layers)]
        )
        self.pooler = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden_size, CLASSES)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        extended_mask = attention_mask[:, None, None, :].to(dtype=torch.float32)
        extended_mask = (1.0 - extended_mask) * -10000.0
        hidden_states = self.embeddings(input_ids, token_type_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, extended_mask)
        pooled = torch.tanh(self.pooler(hidden_states[:, 0]))
        return {"logits": self.classifier(self.dropout(pooled)), "pooled": pooled}


def model():
    return BertForSequenceClassification()


def data(batch_size, seed):
    """The class is the first token after the class token, modulo 4; sequences are padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        input_ids = torch.randint(2, VOCABULARY, (batch_size, LENGTH), generator=generator)
        input_ids[:, 0] = 1
        labels = input_ids[:, 1] % CLASSES
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (batch_size, 1), generator=generator)
        attention_mask = (torch.arange(LENGTH) < lengths).long()
        yield {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}, labels


def loss(outputs, targets):
    return F.cross_entropy(outputs["logits"], targets)
