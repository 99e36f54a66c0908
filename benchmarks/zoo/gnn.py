"""Graph convolutions (Kipf and Welling 2016) on dense adjacency matrices, to classify graphs."""

import torch
import torch.nn as nn
import torch.nn.functional as F

NODES, FEATURES, CLASSES = 24, 16, 3


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.FloatTensor(in_features, out_features))
        self.bias = nn.Parameter(torch.FloatTensor(out_features))
        self.reset_parameters()

    def reset_parameters(self):
        stdv = 1.0 / self.weight.size(1) ** 0.5
        self.weight.data.uniform_(-stdv, stdv)
        self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input, adj):
        support = torch.matmul(input, self.weight)
        return torch.matmul(adj, support) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat=FEATURES, nhid=64, nclass=CLASSES, nlayers=5, dropout=0.2):
        super().__init__()
        self.convs = nn.ModuleList(
            [GraphConvolution(nfeat if i == 0 else nhid, nhid) for i in range(nlayers)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(nhid) for _ in range(nlayers)])
        self.lin = nn.Linear(2 * nhid, nclass)
        self.dropout = dropout

    def normalize(self, adj):
        adj = adj + torch.eye(adj.size(-1), device=adj.device)
        d = adj.sum(-1).pow(-0.5)
        return d.unsqueeze(-1) * adj * d.unsqueeze(-2)

    def forward(self, x, adj):
        adj = self.normalize(adj)
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms)):
            h = F.relu(norm(conv(x, adj)))
            h = F.dropout(h, self.dropout, training=self.training)
            x = h + x if i > 0 else h
        x = torch.cat([x.mean(dim=1), x.max(dim=1)[0]], dim=-1)
        return F.log_softmax(self.lin(x), dim=1)


def model():
    return GCN()


def data(batch_size, seed):
    """The class is how dense a random graph is."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(CLASSES, (batch_size,), generator=generator)
        share = (0.1 + 0.2 * labels.float()).view(-1, 1, 1)
        edges = (torch.rand(batch_size, NODES, NODES, generator=generator) < share).float().triu(1)
        features = torch.randn(batch_size, NODES, FEATURES, generator=generator)
        yield (features, edges + edges.transpose(1, 2)), labels


def loss(outputs, targets):
    return F.nll_loss(outputs, targets)
