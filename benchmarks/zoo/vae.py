"""A convolutional variational autoencoder (Kingma and Welling 2013): draws its code in forward."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, in_channels=1, latent_dim=16, hidden_dims=(16, 32, 64)):
        super().__init__()
        self.latent_dim = latent_dim
        self.last = hidden_dims[-1]
        modules = []
        channels = in_channels
        for h_dim in hidden_dims:
            modules.append(
                nn.Sequential(
                    nn.Conv2d(channels, h_dim, kernel_size=3, stride=2, padding=1),
                    nn.BatchNorm2d(h_dim),
                    nn.LeakyReLU(),
                )
            )
            channels = h_dim
        self.encoder = nn.Sequential(*modules)
        self.fc_mu = nn.Linear(hidden_dims[-1] * 16, latent_dim)
        self.fc_var = nn.Linear(hidden_dims[-1] * 16, latent_dim)

        self.decoder_input = nn.Linear(latent_dim, hidden_dims[-1] * 16)
        modules = []
        dims = hidden_dims[::-1]
        for i in range(len(dims) - 1):
            modules.append(
                nn.Sequential(
                    nn.ConvTranspose2d(dims[i], dims[i + 1], 3, stride=2, padding=1, output_padding=1),
                    nn.BatchNorm2d(dims[i + 1]),
                    nn.LeakyReLU(),
                )
            )
        self.decoder = nn.Sequential(*modules)
        self.final_layer = nn.Sequential(
            nn.ConvTranspose2d(dims[-1], dims[-1], 3, stride=2, padding=1, output_padding=1),
            nn.BatchNorm2d(dims[-1]),
            nn.LeakyReLU(),
            nn.Conv2d(dims[-1], in_channels, kernel_size=3, padding=1),
            nn.Sigmoid(),
        )

    def encode(self, input):
        result = self.encoder(input)
        result = torch.flatten(result, start_dim=1)
        return [self.fc_mu(result), self.fc_var(result)]

    def decode(self, z):
        result = self.decoder_input(z)
        result = result.view(-1, self.last, 4, 4)
        result = self.decoder(result)
        return self.final_layer(result)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return eps * std + mu

    def forward(self, input):
        mu, logvar = self.encode(input)
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def model():
    return VAE()


def data(batch_size, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    while True:
        y, x = (torch.rand(2, batch_size, 1, 1, generator=generator) * 20 + 6).unbind()
        images = torch.exp(-((rows - y) ** 2 + (columns - x) ** 2) / 20).unsqueeze(1)
        yield images, images


def loss(outputs, targets):
    recon, mu, logvar = outputs
    recon_loss = F.binary_cross_entropy(recon, targets, reduction="none").sum((1, 2, 3)).mean()
    kld = torch.mean(-0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1), dim=0)
    return recon_loss + kld
