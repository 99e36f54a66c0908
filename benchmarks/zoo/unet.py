"""U-Net (Ronneberger et al. 2015) for segmentation: four skips over the bottom, sizes that don't divide."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels, mid_channels=None):
        super().__init__()
        if not mid_channels:
            mid_channels = out_channels
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, mid_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(mid_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(mid_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(in_channels, out_channels))

    def forward(self, x):
        return self.maxpool_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = DoubleConv(in_channels, out_channels, in_channels // 2)

    def forward(self, x1, x2):
        x1 = F.interpolate(x1, scale_factor=2, mode="bilinear", align_corners=True)
        diff_y = x2.size()[2] - x1.size()[2]
        diff_x = x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [diff_x // 2, diff_x - diff_x // 2, diff_y // 2, diff_y - diff_y // 2])
        x = torch.cat([x2, x1], dim=1)
        return self.conv(x)


class OutConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=1)

    def forward(self, x):
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, n_channels=1, n_classes=1, width=8):
        super().__init__()
        self.inc = DoubleConv(n_channels, width)
        self.down1 = Down(width, width * 2)
        self.down2 = Down(width * 2, width * 4)
        self.down3 = Down(width * 4, width * 8)
        self.down4 = Down(width * 8, width * 8)
        self.up1 = Up(width * 16, width * 4)
        self.up2 = Up(width * 8, width * 2)
        self.up3 = Up(width * 4, width)
        self.up4 = Up(width * 2, width)
        self.outc = OutConv(width, n_classes)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x5 = self.down4(x4)
        x = self.up1(x5, x4)
        x = self.up2(x, x3)
        x = self.up3(x, x2)
        x = self.up4(x, x1)
        return self.outc(x)


def model():
    return UNet()


def data(batch_size, seed):
    """Discs of a random place and size in noise; the mask says where."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(50.0), torch.arange(50.0), indexing="ij")
    while True:
        y, x = (torch.rand(2, batch_size, 1, 1, generator=generator) * 30 + 10).unbind()
        radius = torch.rand(batch_size, 1, 1, generator=generator) * 8 + 4
        masks = ((rows - y) ** 2 + (columns - x) ** 2 < radius**2).float().unsqueeze(1)
        yield masks + torch.randn(masks.shape, generator=generator), masks


def loss(outputs, targets):
    probabilities = torch.sigmoid(outputs)
    overlap = 2 * (probabilities * targets).sum((1, 2, 3)) + 1
    dice = 1 - overlap / (probabilities.sum((1, 2, 3)) + targets.sum((1, 2, 3)) + 1)
    return F.binary_cross_entropy_with_logits(outputs, targets) + dice.mean()
