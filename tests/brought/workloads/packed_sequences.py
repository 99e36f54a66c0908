"""An LSTM over packed sequences of different lengths."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(20, 12), nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.words(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = self.lstm(packed)
        x, _ = pad_packed_sequence(x, batch_first=True, total_length=ids.shape[1])
        return self.head(x.sum(1) / lengths.unsqueeze(1))


def model():
    return Net()


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def data(batch_size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(0, 20, (batch_size, 6), generator=g)
        yield (ids, torch.randint(1, 7, (batch_size,), generator=g)), ids[:, 0] % 4
