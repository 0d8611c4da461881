"""Where a method's views come from: pictures or sounds of a dataset, or tensors in memory."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mmcl.data import refuse_missing_column, undecoded
from mmcl.decode import RowError, decode_audio, decode_image, decode_rows
from mmcl.encoders.small import fit_length

REGIMES = {
    "all": {"crop": 0.25, "degrees": 15.0, "shift": 0.15, "stretch": 0.2, "brightness": 0.3, "noise": 0.1},
    "crop": {"crop": 0.25},
    "all_but_crop": {"degrees": 15.0, "shift": 0.15, "stretch": 0.2, "brightness": 0.3, "noise": 0.1},
}
"""Of `RandomViews`: every augmentation, crops alone, all but crops."""


@runtime_checkable
class Source(Protocol):
    """Rows of a dataset for `pretrain`."""

    def __len__(self) -> int: ...

    def views(self, rows: Sequence[int]) -> list[Tensor]:
        """Augmentations of these rows, drawn independently from torch's global generator."""

    def inputs(self, rows: Sequence[int]) -> Tensor:
        """The rows as they are, for features."""


class RandomViews:
    """Augments a batch of pictures at once, each by draws of its own; on the device of the batch.

    The batched form of torchvision's RandomResizedCrop, RandomAffine and brightness, for small pictures in memory.

    Args:
        crop: 1 less the least side of a crop, as a share of the picture's; crops are resized to the whole.
        degrees: of rotation to either side.
        shift: to either side, as a share of the picture's.
        stretch: each axis by a factor of up to this far from 1, and as much shear.
        brightness: the factor's distance from 1.
        noise: standard deviation of what is added to each pixel.
    """

    def __init__(
        self,
        crop: float = 0.0,
        degrees: float = 0.0,
        shift: float = 0.0,
        stretch: float = 0.0,
        brightness: float = 0.0,
        noise: float = 0.0,
    ):
        if not 0 <= crop < 1:
            raise ValueError(f"crop must lie in [0, 1), got {crop}")
        self.crop, self.degrees, self.shift, self.stretch = crop, degrees, shift, stretch
        self.brightness, self.noise = brightness, noise

    def __call__(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        count, device = len(images), images.device

        def signed(*shape: int) -> Tensor:
            return 2 * torch.rand(count, *shape, device=device) - 1

        side = 1 - self.crop * torch.rand(count, device=device)
        angle = math.radians(self.degrees) * signed()
        place = (1 - side).unsqueeze(1) * signed(2) + 2 * self.shift * signed(2)
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=1).view(count, 2, 2)
        warp = turn @ (torch.eye(2, device=device) + self.stretch * signed(2, 2))
        transform = torch.cat([side.view(count, 1, 1) * warp, place.unsqueeze(2)], dim=2)
        grid = F.affine_grid(transform, list(images.shape), align_corners=False)
        seen = F.grid_sample(images, grid.to(images.dtype), align_corners=False)
        seen = seen * (1 + self.brightness * signed(1, 1, 1))
        return seen + self.noise * torch.randn_like(seen) if self.noise else seen


class TensorSource:
    """Tensors in memory.

    Args:
        data: (n, ...).
        augment: a batch -> a view of it; each call draws anew.
        count: views of each row.
    """

    def __init__(self, data: Tensor, augment: Callable[[Tensor], Tensor], count: int = 2):
        self.data, self.augment, self.count = data, augment, count

    def __len__(self) -> int:
        return len(self.data)

    def views(self, rows: Sequence[int]) -> list[Tensor]:
        batch = self.inputs(rows)
        return [self.augment(batch) for _ in range(self.count)]

    def inputs(self, rows: Sequence[int]) -> Tensor:
        return self.data[torch.as_tensor(rows)]


class ImageSource:
    """Pictures of a Hugging Face dataset, augmented by torchvision, each by draws of its own.

    Args:
        dataset, column: where the pictures are; see `mmcl.decode.decode_image` for what they may be.
        size: pixels a side.
        crop: least area of a crop, as a share of the picture's; 1 for none.
        colour: strength of colour jitter and grey; 0 for none.
        flip: mirror half of the views; not for digits or text.
        blur: Gaussian blur of half of the views.
        small_crops: further views a row of half the side (multi-crop), of small crops.
    Raises: RowError naming the row that is no picture.
    """

    def __init__(
        self,
        dataset: Any,
        column: str,
        size: int = 32,
        crop: float = 0.2,
        colour: float = 0.5,
        flip: bool = True,
        blur: bool = False,
        small_crops: int = 0,
    ):
        from torchvision.transforms import v2

        refuse_missing_column(dataset, column, "method")
        self.rows, self.column = undecoded(dataset).select_columns([column]), column
        finish = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
        jitter = [v2.RandomApply([v2.ColorJitter(0.8 * colour, 0.8 * colour, 0.8 * colour, 0.2 * colour)], p=0.8)]
        taste = [*(jitter if colour else []), *([v2.RandomGrayscale(0.2)] if colour else [])]
        taste += [v2.RandomHorizontalFlip()] if flip else []
        taste += [v2.RandomApply([v2.GaussianBlur(max(3, size // 10 // 2 * 2 + 1))], p=0.5)] if blur else []
        self.large = v2.Compose([v2.RandomResizedCrop(size, (crop, 1.0), antialias=True), *taste, *finish])
        least = max(crop / 4, 0.05)
        half = v2.RandomResizedCrop(max(size // 2, 4), (least, max(crop, 2 * least)), antialias=True)
        self.small = v2.Compose([half, *taste, *finish])
        self.plain = v2.Compose([v2.Resize((size, size), antialias=True), *finish])
        self.size, self.small_crops = size, small_crops

    def __len__(self) -> int:
        return len(self.rows)

    def views(self, rows: Sequence[int]) -> list[Tensor]:
        images = self.images(rows)
        kinds = [self.large] * 2 + [self.small] * self.small_crops
        return [torch.stack([transform(image) for image in images]) for transform in kinds]

    def inputs(self, rows: Sequence[int]) -> Tensor:
        return torch.stack([self.plain(image) for image in self.images(rows)])

    def images(self, rows: Sequence[int]) -> list[Tensor]:
        """(3, h, w) uint8 each."""
        from torchvision.transforms.v2.functional import pil_to_tensor

        return decoded(self.rows, self.column, rows, lambda value: pil_to_tensor(decode_image(value)))


class AudioSource:
    """Sounds of a Hugging Face dataset: a random stretch of each, for CPC.

    Args:
        dataset, column: where the sounds are; see `mmcl.decode.decode_audio` for what they may be.
        sampling_rate: in Hz.
        seconds: of a stretch; shorter sounds are padded with silence.
        gain: of each view, up to this factor louder or softer; 1 for none.
    Raises: RowError naming the row that is no sound.
    """

    def __init__(self, dataset: Any, column: str, sampling_rate: int = 8000, seconds: float = 1.0, gain: float = 1.0):
        refuse_missing_column(dataset, column, "method")
        self.rows, self.column = undecoded(dataset).select_columns([column]), column
        self.sampling_rate, self.samples, self.gain = sampling_rate, round(sampling_rate * seconds), gain
        if self.samples < 1 or gain < 1:
            raise ValueError(f"seconds must leave a sample and gain be >= 1, got {seconds} and {gain}")

    def __len__(self) -> int:
        return len(self.rows)

    def views(self, rows: Sequence[int]) -> list[Tensor]:
        waves = []
        for wave in self.waves(rows):
            spare = max(0, len(wave) - self.samples)
            start = int(torch.randint(spare + 1, ()))
            loud = self.gain ** float(2 * torch.rand(()) - 1)
            waves.append(loud * fit_length(wave[start:], self.samples))
        return [torch.stack(waves)]

    def inputs(self, rows: Sequence[int]) -> Tensor:
        return torch.stack([fit_length(wave, self.samples) for wave in self.waves(rows)])

    def waves(self, rows: Sequence[int]) -> list[np.ndarray]:
        return decoded(self.rows, self.column, rows, lambda value: decode_audio(value, self.sampling_rate))


def decoded(dataset: Any, column: str, rows: Sequence[int], decode: Callable[[Any], Any]) -> list[Any]:
    """The values of these rows; the row of the dataset is named where one cannot be used."""
    rows = [int(row) for row in rows]
    try:
        return decode_rows(dataset[rows][column], decode)
    except RowError as error:
        raise ValueError(f"column {column!r}: {RowError(rows[error.row], error.reason)}") from error
