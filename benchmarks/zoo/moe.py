"""A transformer with a mixture of experts: every token goes to the two experts that its router chooses."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, LENGTH = 96, 32


class SparseMoE(nn.Module):
    def __init__(self, dim, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(dim, dim * 2), nn.SiLU(), nn.Linear(dim * 2, dim))
                for _ in range(num_experts)
            ]
        )

    def forward(self, hidden_states):
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        weights = F.softmax(self.gate(hidden_states), dim=1)
        weights, selected = torch.topk(weights, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        final = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self.experts):
            token, choice = torch.nonzero(selected == i, as_tuple=True)
            if token.numel() == 0:
                continue
            final.index_add_(0, token, expert(hidden_states[token]) * weights[token, choice, None])
        return final.view(batch_size, sequence_length, hidden_dim)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.moe = SparseMoE(dim)

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.moe(self.norm2(x))


class MoETransformer(nn.Module):
    def __init__(self, dim=64, layers=4, heads=4):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.pos = nn.Embedding(LENGTH, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, idx):
        T = idx.shape[1]
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool, device=idx.device), diagonal=1)
        x = self.embed(idx) + self.pos(torch.arange(T, device=idx.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def model():
    return MoETransformer()


def data(batch_size, seed):
    """Tokens count upwards by a step that is a sequence's own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (batch_size, 1), generator=generator)
        step = torch.randint(1, 5, (batch_size, 1), generator=generator)
        tokens = (start + step * torch.arange(LENGTH + 1)) % VOCABULARY
        yield tokens[:, :-1], tokens[:, 1:]


def loss(outputs, targets):
    return F.cross_entropy(outputs.reshape(-1, VOCABULARY), targets.reshape(-1))
