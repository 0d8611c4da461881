"""A world whose observations are pictures: latents through the decoder of a small VAE trained on handwritten digits."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

PIXELS = 64


class DigitDecoder(nn.Module):
    """Unit latents (n, dim) -> pictures (n, 64) of 8 x 8 pixels in [0, 1].

    The prior that the VAE was trained with is standard normal, whose rows have norm sqrt(dim): unit rows are scaled so.
    """

    def __init__(self, dim: int, hidden: int = 128):
        super().__init__()
        self.dim = dim
        # no layer narrows, so that generic weights are injective
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, hidden),
            nn.LeakyReLU(0.2),
            nn.Linear(hidden, PIXELS),
        )

    def forward(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n pixels"]:
        return torch.sigmoid(self.layers(self.dim**0.5 * z.float()))


def digit_decoder(dim: int = 5, steps: int = 3000, beta: float = 0.5, seed: int = 0) -> DigitDecoder:
    """Train a VAE on scikit-learn's digits, seconds; its decoder, frozen.

    Args:
        dim: of the latents.
        steps: of batches of 256.
        beta: weight of the KL term; below 1 pictures are sharper.
        seed: of the start, the batches and the noise.
    Source: Kingma and Welling 2014; beta, Higgins et al. 2017.
    """
    from sklearn.datasets import load_digits

    pictures = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        decoder = DigitDecoder(dim)
        encoder = nn.Sequential(
            nn.Linear(PIXELS, 128), nn.LeakyReLU(0.2), nn.Linear(128, 128), nn.LeakyReLU(0.2), nn.Linear(128, 2 * dim)
        )
        optimiser = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps)
        for _ in range(steps):
            batch = pictures[torch.randint(len(pictures), (256,))]
            mean, log_variance = encoder(batch).chunk(2, dim=1)
            z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
            seen = torch.sigmoid(decoder.layers(z))
            error = F.binary_cross_entropy(seen, batch, reduction="none").sum(1).mean()
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
            optimiser.zero_grad()
            (error + beta * kl).backward()
            optimiser.step()
            schedule.step()
    return decoder.requires_grad_(False).eval()
