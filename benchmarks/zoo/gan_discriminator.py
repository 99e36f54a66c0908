"""A GAN's discriminator: DCGAN's convolutions, and the minibatch's deviation of progressive GANs."""

import torch
import torch.nn as nn

NC, NDF = 3, 16


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


def minibatch_stddev(x, eps=1e-8):
    mean_std = torch.sqrt(x.var(dim=0, unbiased=False) + eps).mean()
    return torch.cat([x, mean_std.expand(x.size(0), 1, x.size(2), x.size(3))], dim=1)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(NC, NDF, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF, NDF * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NDF * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF * 2, NDF * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NDF * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF * 4, NDF * 8, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NDF * 8),
            nn.LeakyReLU(0.2, inplace=True),
        )
        self.last = nn.Conv2d(NDF * 8 + 1, 1, 4, 1, 0, bias=False)

    def forward(self, input):
        output = self.main(input)
        output = self.last(minibatch_stddev(output))
        return torch.sigmoid(output).view(-1, 1).squeeze(1)


def model():
    netD = Discriminator()
    netD.apply(weights_init)
    return netD


def data(batch_size, seed):
    """Real images are smooth, fake ones are noise; every other sample is real."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = (torch.arange(batch_size) % 2).float()
        coarse = torch.randn(batch_size, NC, 8, 8, generator=generator)
        smooth = nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear")
        noise = torch.randn(batch_size, NC, 64, 64, generator=generator)
        yield torch.where(labels.view(-1, 1, 1, 1) > 0, smooth, noise), labels


criterion = nn.BCELoss()


def loss(outputs, targets):
    return criterion(outputs, targets)
