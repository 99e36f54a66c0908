"""wav2vec-like (Baevski et al. 2020): convolutions over a waveform, a weight-normed position, an encoder."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

SAMPLES, CLASSES = 1600, 5


class ConvFeatureExtraction(nn.Module):
    def __init__(self, conv_layers):
        super().__init__()
        self.conv_layers = nn.ModuleList()
        in_d = 1
        for i, (dim, k, stride) in enumerate(conv_layers):
            layers = [nn.Conv1d(in_d, dim, k, stride=stride, bias=False)]
            if i == 0:
                layers.append(nn.GroupNorm(dim, dim, affine=True))
            layers.append(nn.GELU())
            self.conv_layers.append(nn.Sequential(*layers))
            in_d = dim

    def forward(self, x):
        x = x.unsqueeze(1)
        for conv in self.conv_layers:
            x = conv(x)
        return x


class SamePad(nn.Module):
    def __init__(self, kernel_size):
        super().__init__()
        self.remove = 1 if kernel_size % 2 == 0 else 0

    def forward(self, x):
        if self.remove > 0:
            x = x[:, :, : -self.remove]
        return x


class TransformerEncoder(nn.Module):
    def __init__(self, embedding_dim, layers, heads, conv_pos=16, conv_pos_groups=4):
        super().__init__()
        pos_conv = nn.Conv1d(
            embedding_dim, embedding_dim, conv_pos, padding=conv_pos // 2, groups=conv_pos_groups
        )
        nn.init.normal_(pos_conv.weight, mean=0, std=(4 / (conv_pos * embedding_dim)) ** 0.5)
        nn.init.constant_(pos_conv.bias, 0)
        pos_conv = weight_norm(pos_conv, name="weight", dim=2)
        self.pos_conv = nn.Sequential(pos_conv, SamePad(conv_pos), nn.GELU())
        self.layer_norm = nn.LayerNorm(embedding_dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                embedding_dim, heads, embedding_dim * 4, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x):
        x_conv = self.pos_conv(x.transpose(1, 2))
        x = x + x_conv.transpose(1, 2)
        x = self.layer_norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Wav2Vec2(nn.Module):
    def __init__(self, dim=32, encoder_dim=64):
        super().__init__()
        self.feature_extractor = ConvFeatureExtraction([(dim, 10, 5), (dim, 3, 2), (dim, 3, 2), (dim, 2, 2)])
        self.layer_norm = nn.LayerNorm(dim)
        self.post_extract_proj = nn.Linear(dim, encoder_dim) if dim != encoder_dim else None
        self.encoder = TransformerEncoder(encoder_dim, layers=4, heads=4)
        self.classifier = nn.Linear(encoder_dim, CLASSES)

    def forward(self, source):
        features = self.feature_extractor(source)
        features = self.layer_norm(features.transpose(1, 2))
        if self.post_extract_proj is not None:
            features = self.post_extract_proj(features)
        x = self.encoder(features)
        return self.classifier(x.mean(dim=1))


def model():
    return Wav2Vec2()


def data(batch_size, seed):
    """The class is the frequency of a tone in noise."""
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(SAMPLES) / SAMPLES
    while True:
        labels = torch.randint(CLASSES, (batch_size,), generator=generator)
        phase = torch.rand(batch_size, 1, generator=generator)
        tones = torch.sin(6.28 * (time * 20 * (labels[:, None] + 1) + phase))
        yield tones + torch.randn(batch_size, SAMPLES, generator=generator), labels


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets)
