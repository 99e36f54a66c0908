"""DCGAN's generator (Radford et al. 2015), trained as in generative latent optimisation: code to image."""

import torch
import torch.nn as nn
import torch.nn.functional as F

NZ, NGF, NC = 32, 16, 3


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, NGF * 8, 4, 1, 0, bias=False),
            nn.BatchNorm2d(NGF * 8),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF * 8, NGF * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF * 4, NGF * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF * 2, NGF, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF, NC, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


def model():
    netG = Generator()
    netG.apply(weights_init)
    return netG


def data(batch_size, seed):
    basis = torch.randn(NZ, NC, 64, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    while True:
        z = torch.randn(batch_size, NZ, 1, 1, generator=generator)
        yield z, torch.tanh(torch.tensordot(z[:, :, 0, 0], basis, dims=1) / NZ**0.5)


def loss(outputs, targets):
    return F.l1_loss(outputs, targets)
