"""A vision transformer from transformers, with random weights."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import ViTConfig, ViTForImageClassification


class ViT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.vit = ViTForImageClassification(config)

    def forward(self, pixel_values):
        return self.vit(pixel_values).logits


def model():
    return ViT(
        ViTConfig(
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            image_size=32,
            patch_size=4,
            num_labels=10,
        )
    )


def data(batch_size, seed):
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(10, (batch_size,), generator=generator)
        yield patterns[labels] + torch.randn(batch_size, 3, 32, 32, generator=generator), labels


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets)
