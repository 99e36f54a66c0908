"""MobileNetV3 (Howard et al. 2019): inverted residuals with squeeze-and-excitation and hard swish."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def make_divisible(v, divisor=8):
    new_v = max(divisor, int(v + divisor / 2) // divisor * divisor)
    if new_v < 0.9 * v:
        new_v += divisor
    return new_v


class ConvBNActivation(nn.Sequential):
    def __init__(self, inp, oup, kernel_size=3, stride=1, groups=1, activation=nn.Hardswish):
        layers = [
            nn.Conv2d(inp, oup, kernel_size, stride, (kernel_size - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(oup, eps=0.001, momentum=0.01),
        ]
        if activation is not None:
            layers.append(activation(inplace=True))
        super().__init__(*layers)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels, reduction=4):
        super().__init__()
        squeezed = make_divisible(channels // reduction)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.relu = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def _scale(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        scale = self.fc2(self.relu(self.fc1(scale)))
        return F.hardsigmoid(scale, inplace=True)

    def forward(self, x):
        return self._scale(x) * x


class InvertedResidual(nn.Module):
    def __init__(self, inp, kernel, exp, oup, use_se, activation, stride):
        super().__init__()
        self.use_res_connect = stride == 1 and inp == oup
        layers = []
        if exp != inp:
            layers.append(ConvBNActivation(inp, exp, 1, activation=activation))
        layers.append(ConvBNActivation(exp, exp, kernel, stride, groups=exp, activation=activation))
        if use_se:
            layers.append(SqueezeExcitation(exp))
        layers.append(ConvBNActivation(exp, oup, 1, activation=None))
        self.block = nn.Sequential(*layers)

    def forward(self, x):
        result = self.block(x)
        if self.use_res_connect:
            result += x
        return result


class MobileNetV3(nn.Module):
    def __init__(self, num_classes=10, dropout=0.2):
        super().__init__()
        relu, hswish = nn.ReLU, nn.Hardswish
        self.features = nn.Sequential(
            ConvBNActivation(3, 16, stride=2),
            InvertedResidual(16, 3, 16, 16, True, relu, 2),
            InvertedResidual(16, 3, 72, 24, False, relu, 1),
            InvertedResidual(24, 3, 88, 24, False, relu, 1),
            InvertedResidual(24, 5, 96, 40, True, hswish, 2),
            InvertedResidual(40, 5, 120, 40, True, hswish, 1),
            InvertedResidual(40, 5, 120, 48, True, hswish, 1),
            InvertedResidual(48, 5, 144, 48, True, hswish, 1),
            ConvBNActivation(48, 288, 1),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(288, 256),
            nn.Hardswish(inplace=True),
            nn.Dropout(p=dropout, inplace=True),
            nn.Linear(256, num_classes),
        )

    def forward(self, x):
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


def model():
    return MobileNetV3()


def data(batch_size, seed):
    patterns = torch.randn(10, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(10, (batch_size,), generator=generator)
        yield patterns[labels] + torch.randn(batch_size, 3, 64, 64, generator=generator), labels


def loss(outputs, targets):
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)
