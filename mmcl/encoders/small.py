"""Encoders that start from random weights: vectors, categories, small images and short sounds."""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mmcl.arrays import as_float_tensor
from mmcl.decode import RowError, decode_audio, decode_image, decode_rows
from mmcl.encoders.audio_features import frame_count, log_mel
from mmcl.encoders.base import Encoder


def vectors(
    width: int, dim: int = 128, hidden: int = 512, layers: int = 2, dropout: float = 0.0, noise: float = 0.0
) -> Encoder:
    """Vectors of numbers through a small perceptron; scale them to order one beforehand, as nothing here does.

    Args:
        width: numbers a row.
        dim: of the embeddings.
        hidden, layers: width and number of linear layers (1 is linear).
        dropout: after each hidden layer.
        noise: standard deviation of Gaussian noise added to the input while training.
    Raises: RowError naming a row of another width, or holding NaN or infinity.
    """
    options = {"width": width, "dim": dim, "hidden": hidden, "layers": layers, "dropout": dropout, "noise": noise}
    backbone = perceptron(width, dim, hidden, layers, dropout, noise)
    return Encoder(backbone, dim, prepare=lambda v: prepare_vectors(v, width), config={"name": "vectors", **options})


def categories(values: Sequence[Hashable], dim: int = 128) -> Encoder:
    """One learned row a category.

    Args:
        values: the categories, distinct strings or integers.
        dim: of the embeddings.
    Raises: RowError naming a row whose value is none of them.
    """
    values = list(values)
    if not values or len(set(values)) != len(values):
        raise ValueError(f"categories must be distinct and at least one, got {values}")
    positions = {value: row for row, value in enumerate(values)}

    def prepare(rows: Any) -> Tensor:
        return torch.tensor(decode_rows(rows, lambda value: category_position(value, positions)), dtype=torch.long)

    table = nn.Embedding(len(values), dim)
    return Encoder(table, dim, prepare=prepare, config={"name": "categories", "values": values, "dim": dim})


def small_image(
    dim: int = 128, size: int = 32, channels: int = 3, hidden: int = 512, dropout: float = 0.0, noise: float = 0.0
) -> Encoder:
    """Small pictures, resized to size x size, through a small perceptron. For data that needs no pretrained weights.

    Args:
        dim: of the embeddings.
        size: pixels a side; pictures of other sizes are resized (bilinear), their shape not kept.
        channels: 1 for grey, 3 for colour. Each picture is standardised: brightness and contrast are lost.
        hidden, dropout, noise: see `vectors`; the noise is added to the standardised input.
    Raises: RowError naming a row that is no picture.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 (grey) or 3 (colour), got {channels}")
    options = {"dim": dim, "size": size, "channels": channels, "hidden": hidden, "dropout": dropout, "noise": noise}

    def prepare(values: Any) -> Tensor:
        return torch.stack(decode_rows(values, lambda value: pixels(value, size, channels)))

    backbone = standardised_perceptron(size * size * channels, dim, hidden, dropout, noise)
    return Encoder(backbone, dim, prepare=prepare, config={"name": "small_image", **options})


def small_audio(
    dim: int = 128,
    sampling_rate: int = 8000,
    seconds: float = 1.0,
    n_mels: int = 40,
    hop: float = 0.010,
    hidden: int = 512,
    dropout: float = 0.0,
    noise: float = 0.0,
) -> Encoder:
    """Short sounds as log-mel frames through a small perceptron. For data that needs no pretrained weights.

    Args:
        dim: of the embeddings.
        sampling_rate: in Hz; sounds of other rates are resampled, channels averaged.
        seconds: length that is heard; longer sounds are cut, shorter ones padded with silence at the end.
        n_mels: mel bands of the frames, which are 25 ms long.
        hop: seconds from frame to frame.
        hidden, dropout, noise: see `vectors`; the noise is added to the standardised input.
    Raises: RowError naming a row that is no sound, or has no sample.
    """
    options = {"dim": dim, "sampling_rate": sampling_rate, "seconds": seconds, "n_mels": n_mels, "hop": hop}
    options |= {"hidden": hidden, "dropout": dropout, "noise": noise}
    samples = round(sampling_rate * seconds)
    if samples < 1:
        raise ValueError(f"seconds must leave at least one sample, got {seconds}")

    def prepare(values: Any) -> Tensor:
        waves = decode_rows(values, lambda value: fit_length(decode_audio(value, sampling_rate), samples))
        return log_mel(torch.stack(waves), sampling_rate, n_mels, hop=hop)

    width = n_mels * frame_count(samples, sampling_rate, hop)
    backbone = standardised_perceptron(width, dim, hidden, dropout, noise)
    return Encoder(backbone, dim, prepare=prepare, config={"name": "small_audio", **options})


class AddNoise(nn.Module):
    """Adds Gaussian noise of standard deviation `std` while training."""

    def __init__(self, std: float):
        super().__init__()
        self.std = std

    def forward(self, x: Tensor) -> Tensor:
        return x + self.std * torch.randn_like(x) if self.training and self.std else x


def perceptron(width: int, dim: int, hidden: int, layers: int, dropout: float, noise: float) -> nn.Sequential:
    """Noise while training, then linear layers with GELU between them."""
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    widths = [width, *[hidden] * (layers - 1), dim]
    parts: list[nn.Module] = [AddNoise(noise)]
    for layer, (before, after) in enumerate(pairwise(widths)):
        if layer:
            parts += [nn.GELU(), nn.Dropout(dropout)]
        parts.append(nn.Linear(before, after))
    return nn.Sequential(*parts)


def standardised_perceptron(width: int, dim: int, hidden: int, dropout: float, noise: float) -> nn.Sequential:
    """A perceptron of two layers over flattened rows of mean 0 and variance 1: blind to brightness, contrast, gain."""
    standardise = nn.LayerNorm(width, elementwise_affine=False)
    return nn.Sequential(nn.Flatten(), standardise, *perceptron(width, dim, hidden, 2, dropout, noise))


def prepare_vectors(values: Any, width: int) -> Float[Tensor, "n width"]:
    """Rows of numbers as one tensor."""
    try:
        rows = as_float_tensor(values, "vectors")
    except ValueError:
        rows = torch.stack(decode_rows(values, lambda value: one_vector(value, width)))
    if rows.ndim == 1 and width == 1:  # a column of single numbers
        rows = rows.unsqueeze(1)
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ValueError(f"expected vectors of shape (n, {width}), got {tuple(rows.shape)}")
    bad = ~torch.isfinite(rows).all(dim=1)
    if bad.any():
        raise RowError(int(bad.nonzero()[0]), "holds NaN or an infinite value")
    return rows.float()


def one_vector(value: Any, width: int) -> Float[Tensor, " width"]:
    """One row of numbers; says what is wrong where it is none."""
    if value is None:
        raise ValueError("the vector is missing (None)")
    try:
        array = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise ValueError(f"expected {width} numbers, got {type(value).__name__}") from None
    if array.shape != (width,):
        raise ValueError(f"expected {width} numbers, got shape {array.shape}")
    return torch.from_numpy(array.copy())


def category_position(value: Any, positions: dict[Any, int]) -> int:
    """The row of a category in its table."""
    if value is None:
        raise ValueError("the category is missing (None)")
    if not isinstance(value, Hashable) or value not in positions:
        known = sorted(map(str, positions))
        shown = ", ".join(known[:10]) + (f" and {len(known) - 10} more" if len(known) > 10 else "")
        raise ValueError(f"unknown category {value!r}; the categories are {shown}")
    return positions[value]


def pixels(value: Any, size: int, channels: int) -> Float[Tensor, "channels size size"]:
    """A picture as numbers in [-1, 1]."""
    image = decode_image(value).convert("L" if channels == 1 else "RGB")
    if image.size != (size, size):
        image = image.resize((size, size), resample=2)  # bilinear
    array = np.asarray(image, dtype=np.float32).reshape(size, size, channels)
    return torch.from_numpy(array / 127.5 - 1.0).permute(2, 0, 1)


def fit_length(wave: np.ndarray, samples: int) -> Float[Tensor, " samples"]:
    """Cut, or padded with silence at the end."""
    wave = wave[:samples]
    return torch.from_numpy(np.pad(wave, (0, samples - len(wave))))
