"""A DLRM-like recommender (Naumov et al. 2019): bags of categories, a dense tower, their dot products."""

import torch
import torch.nn as nn
import torch.nn.functional as F

TABLES = (500, 200, 100, 50, 1000, 20)
DENSE, HOTS = 13, 4


class DLRM(nn.Module):
    def __init__(self, m_spa=16, ln_bot=(DENSE, 64, 32, 16), ln_top=(64, 32, 1)):
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, m_spa, mode="sum") for n in TABLES)
        self.bot_l = self.create_mlp(ln_bot)
        pairs = len(TABLES) * (len(TABLES) + 1) // 2
        self.top_l = self.create_mlp((m_spa + pairs, *ln_top), sigmoid_layer=len(ln_top) - 1)

    def create_mlp(self, ln, sigmoid_layer=-1):
        layers = nn.ModuleList()
        for i in range(len(ln) - 1):
            linear = nn.Linear(ln[i], ln[i + 1])
            nn.init.normal_(linear.weight, std=(2 / (ln[i] + ln[i + 1])) ** 0.5)
            layers.append(linear)
            layers.append(nn.Sigmoid() if i == sigmoid_layer else nn.ReLU())
        return nn.Sequential(*layers)

    def apply_emb(self, lS_i, emb_l):
        ly = []
        for k, sparse_index_group_batch in enumerate(lS_i):
            ly.append(emb_l[k](sparse_index_group_batch))
        return ly

    def interact_features(self, x, ly):
        (batch_size, d) = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        Zflat = Z[:, li, lj]
        return torch.cat([x, Zflat], dim=1)

    def forward(self, dense_x, lS_i):
        x = self.bot_l(dense_x)
        ly = self.apply_emb(lS_i, self.emb_l)
        z = self.interact_features(x, ly)
        p = self.top_l(z)
        return torch.clamp(p, min=1e-6, max=1 - 1e-6)


def model():
    return DLRM()


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        dense = torch.randn(batch_size, DENSE, generator=generator)
        sparse = [torch.randint(n, (batch_size, HOTS), generator=generator) for n in TABLES]
        clicked = (dense[:, 0] + (sparse[5].float().mean(1) - 10) / 5 > 0).float()
        yield (dense, sparse), clicked.unsqueeze(1)


def loss(outputs, targets):
    return F.binary_cross_entropy(outputs, targets)
