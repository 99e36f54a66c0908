"""A diffusion model's U-Net (Ho et al. 2020): predicts the noise in an image at time t."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 1000


class SwishFunction(torch.autograd.Function):
    """Swish that keeps only its input for the backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad_output * (s * (1 + x * (1 - s)))


class Swish(nn.Module):
    def forward(self, x):
        return SwishFunction.apply(x)


def timestep_embedding(timesteps, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(start=0, end=half, dtype=torch.float32) / half).to(
        device=timesteps.device
    )
    args = timesteps[:, None].float() * freqs[None]
    embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
    if dim % 2:
        embedding = torch.cat([embedding, torch.zeros_like(embedding[:, :1])], dim=-1)
    return embedding


class ResBlock(nn.Module):
    def __init__(self, in_ch, out_ch, time_dim):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, in_ch)
        self.conv1 = nn.Conv2d(in_ch, out_ch, 3, padding=1)
        self.time_proj = nn.Linear(time_dim, out_ch)
        self.norm2 = nn.GroupNorm(8, out_ch)
        self.conv2 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.act = Swish()
        if in_ch != out_ch:
            self.shortcut = nn.Conv2d(in_ch, out_ch, 1)
        else:
            self.shortcut = nn.Identity()

    def forward(self, x, temb):
        h = self.conv1(self.act(self.norm1(x)))
        h += self.time_proj(self.act(temb))[:, :, None, None]
        h = self.conv2(self.act(self.norm2(h)))
        return h + self.shortcut(x)


class AttnBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.norm = nn.GroupNorm(8, ch)
        self.qkv = nn.Conv2d(ch, ch * 3, 1)
        self.proj = nn.Conv2d(ch, ch, 1)

    def forward(self, x):
        B, C, H, W = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=1)
        q = q.permute(0, 2, 3, 1).reshape(B, H * W, C)
        k = k.reshape(B, C, H * W)
        w = torch.bmm(q, k) * (int(C) ** (-0.5))
        w = F.softmax(w, dim=-1)
        v = v.permute(0, 2, 3, 1).reshape(B, H * W, C)
        h = torch.bmm(w, v).reshape(B, H, W, C).permute(0, 3, 1, 2)
        return x + self.proj(h)


class Downsample(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv = nn.Conv2d(ch, ch, 3, stride=2, padding=1)

    def forward(self, x, temb):
        return self.conv(x)


class Upsample(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv = nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self, in_ch=1, ch=16, ch_mult=(1, 2, 2), num_res_blocks=1):
        super().__init__()
        time_dim = ch * 4
        self.ch = ch
        self.time_embed = nn.Sequential(nn.Linear(ch, time_dim), Swish(), nn.Linear(time_dim, time_dim))
        self.head = nn.Conv2d(in_ch, ch, 3, padding=1)
        self.downblocks = nn.ModuleList()
        chs = [ch]
        now_ch = ch
        for i, mult in enumerate(ch_mult):
            for _ in range(num_res_blocks):
                self.downblocks.append(ResBlock(now_ch, ch * mult, time_dim))
                now_ch = ch * mult
                chs.append(now_ch)
            if i != len(ch_mult) - 1:
                self.downblocks.append(Downsample(now_ch))
                chs.append(now_ch)
        self.mid1 = ResBlock(now_ch, now_ch, time_dim)
        self.mid_attn = AttnBlock(now_ch)
        self.mid2 = ResBlock(now_ch, now_ch, time_dim)
        self.upblocks = nn.ModuleList()
        self.upsamples = nn.ModuleDict()
        for i, mult in reversed(list(enumerate(ch_mult))):
            for _ in range(num_res_blocks + 1):
                self.upblocks.append(ResBlock(chs.pop() + now_ch, ch * mult, time_dim))
                now_ch = ch * mult
            if i != 0:
                self.upsamples[str(len(self.upblocks) - 1)] = Upsample(now_ch)
        self.tail = nn.Sequential(nn.GroupNorm(8, now_ch), Swish(), nn.Conv2d(now_ch, in_ch, 3, padding=1))

    def forward(self, x, t):
        temb = self.time_embed(timestep_embedding(t, self.ch))
        h = self.head(x)
        hs = [h]
        for layer in self.downblocks:
            h = layer(h, temb)
            hs.append(h)
        h = self.mid1(h, temb)
        h = self.mid_attn(h)
        h = self.mid2(h, temb)
        for i, layer in enumerate(self.upblocks):
            h = layer(torch.cat([h, hs.pop()], dim=1), temb)
            if str(i) in self.upsamples:
                h = self.upsamples[str(i)](h)
        assert len(hs) == 0
        return self.tail(h)


def model():
    return UNet()


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, STEPS), dim=0)
    rows, columns = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    while True:
        phase = torch.rand(batch_size, 1, 1, 1, generator=generator) * 6.28
        images = torch.sin(rows / 3 + columns / 5 + phase)
        t = torch.randint(STEPS, (batch_size,), generator=generator)
        noise = torch.randn(images.shape, generator=generator)
        share = alphas[t].view(-1, 1, 1, 1)
        yield (share.sqrt() * images + (1 - share).sqrt() * noise, t), noise


def loss(outputs, targets):
    return F.mse_loss(outputs, targets)
