"""A binary tree-LSTM (Tai et al. 2015): recursion over a tree that is part of the data."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, LEAVES = 20, 8


class TreeLSTM(nn.Module):
    def __init__(self, hidden=64, classes=2):
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.leaf = nn.Linear(hidden, 3 * hidden)
        self.compose = nn.Linear(2 * hidden, 5 * hidden)
        self.head = nn.Linear(hidden, classes)

    def node(self, tokens, children, i):
        left, right = children[i].tolist()
        if left < 0:
            gate, output, update = self.leaf(self.embed(tokens[i])).chunk(3)
            c = torch.sigmoid(gate) * torch.tanh(update)
            return torch.sigmoid(output) * torch.tanh(c), c
        hl, cl = self.node(tokens, children, left)
        hr, cr = self.node(tokens, children, right)
        gate, fl, fr, output, update = self.compose(torch.cat([hl, hr])).chunk(5)
        c = torch.sigmoid(gate) * torch.tanh(update) + torch.sigmoid(fl) * cl + torch.sigmoid(fr) * cr
        return torch.sigmoid(output) * torch.tanh(c), c

    def forward(self, tokens, children):
        roots = []
        for sentence, tree in zip(tokens, children):
            h, _ = self.node(sentence, tree, len(sentence) - 1)
            roots.append(h)
        return self.head(torch.stack(roots))


def model():
    return TreeLSTM()


def data(batch_size, seed):
    """Random trees over eight leaves, whose nodes come after their children; the class: is the sum even?"""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(VOCABULARY, (batch_size, 2 * LEAVES - 1), generator=generator)
        children = torch.full((batch_size, 2 * LEAVES - 1, 2), -1)
        for tree in children:
            roots = list(range(LEAVES))
            for i in range(LEAVES, 2 * LEAVES - 1):
                at = int(torch.randint(len(roots) - 1, (), generator=generator))
                tree[i, 0], tree[i, 1] = roots[at], roots[at + 1]
                roots[at : at + 2] = [i]
        yield (tokens, children), tokens[:, :LEAVES].sum(1) % 2


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets)
