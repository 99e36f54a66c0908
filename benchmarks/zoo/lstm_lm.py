"""An LSTM language model in the style of AWD-LSTM (Merity et al. 2017): dropout locked over time."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 96


class LockedDropout(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or not self.p:
            return x
        mask = x.new_empty(x.size(0), 1, x.size(2)).bernoulli_(1 - self.p) / (1 - self.p)
        return x * mask.expand_as(x)


class RNNModel(nn.Module):
    def __init__(self, ntoken=VOCABULARY, ninp=48, nhid=96, nlayers=4, dropout=0.2):
        super().__init__()
        self.ninp, self.nhid, self.nlayers = ninp, nhid, nlayers
        self.lockdrop = LockedDropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnns = nn.ModuleList(
            nn.LSTM(ninp if i == 0 else nhid, nhid, batch_first=True) for i in range(nlayers)
        )
        self.decoder = nn.Linear(nhid, ntoken)
        self.init_weights()

    def init_weights(self):
        initrange = 0.1
        self.encoder.weight.data.uniform_(-initrange, initrange)
        self.decoder.bias.data.fill_(0)
        self.decoder.weight.data.uniform_(-initrange, initrange)

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return [
            (weight.new_zeros(1, bsz, self.nhid), weight.new_zeros(1, bsz, self.nhid))
            for _ in range(self.nlayers)
        ]

    def forward(self, tokens, hidden=None):
        if hidden is None:
            hidden = self.init_hidden(tokens.size(0))
        output = self.lockdrop(self.encoder(tokens))
        for i, rnn in enumerate(self.rnns):
            output, _ = rnn(output, hidden[i])
            if i != self.nlayers - 1:
                output = self.lockdrop(output)
        output = self.lockdrop(output)
        decoded = self.decoder(output.reshape(output.size(0) * output.size(1), output.size(2)))
        return decoded.view(output.size(0), output.size(1), decoded.size(1))


def model():
    return RNNModel()


def data(batch_size, seed):
    """Tokens count upwards by a step that is a sequence's own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (batch_size, 1), generator=generator)
        step = torch.randint(1, 5, (batch_size, 1), generator=generator)
        tokens = (start + step * torch.arange(33)) % VOCABULARY
        yield tokens[:, :-1], tokens[:, 1:]


def loss(outputs, targets):
    return F.cross_entropy(outputs.reshape(-1, VOCABULARY), targets.reshape(-1))
