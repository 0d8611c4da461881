"""Raw values of any form to what encoders take: RGB images, mono waveforms at one rate, strings.

Each function returns a checked value or raises ValueError with the reason; `decode_rows` adds the row. Nothing is
guessed silently: what a value cannot mean is refused.
"""

import io
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped

from mmcl.arrays import as_numpy

CHANNELS_LIMIT = 16
"""Most channels of a waveform; a wider array is a spectrogram or a batch."""

OVERSHOOT = 2.0
"""Float samples up to this size are clipped to 1, as decoders and mixing overshoot; larger ones are not in [-1, 1]."""


class RowError(ValueError):
    """A value that cannot be used: `row`, its position, and `reason`."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(row, reason)  # both in args, so that the error survives pickling
        self.row, self.reason = row, reason

    def __str__(self) -> str:
        return f"row {self.row}: {self.reason}"


def decode_rows(values: Iterable[Any], decode: Callable[[Any], Any]) -> list[Any]:
    """`decode` of each value. The first that fails is a RowError with its position."""
    decoded = []
    for row, value in enumerate(values):
        try:
            decoded.append(decode(value))
        except ValueError as error:
            raise RowError(row, str(error)) from error
    return decoded


def decode_text(value: Any) -> str:
    """The string itself. ValueError for anything else, for a blank string, and for text that is not valid Unicode."""
    _refuse_missing(value, "text")
    if not isinstance(value, str):
        raise ValueError(f"expected a string, got {type(value).__name__} {_brief(value)}")
    if not value.strip():
        raise ValueError(f"expected text, got the blank string {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text is not valid Unicode: {error.reason} at position {error.start}") from error
    return value


def decode_image(value: Any) -> Any:
    """`value` as a PIL image of mode "RGB", upright (EXIF rotation applied), on white where it was transparent.

    Args:
        value: a PIL image of any mode; an array (h, w) or (h, w, 1 | 3 | 4) or a torch tensor (h, w) or
            (1 | 3 | 4, h, w): bool, uint8, uint16, or floats in [0, 1]; the bytes of an image file; its path; or the
            {"bytes", "path"} of Hugging Face datasets. PIL's modes of 16 bits (I;16, I) are scaled to 8; mode F holds
            [0, 1], or [0, 255] when anything in it is above 1. Of a PIL image's frames the current one is taken, of a
            file's the first.
    Raises: ValueError for a missing, broken, empty or NaN image, and for more pixels than PIL's MAX_IMAGE_PIXELS.
    """
    from PIL import Image

    _refuse_missing(value, "image")
    if isinstance(value, Image.Image):
        return _upright_rgb(value)
    if isinstance(value, torch.Tensor):
        array = as_numpy(value)
        return _image_from_array(
            np.moveaxis(array, 0, -1) if array.ndim == 3 else array, f"tensor {tuple(value.shape)}"
        )
    if isinstance(value, np.ndarray):
        return _image_from_array(value, f"array {value.shape}")
    return _image_from_file(_file_of(value, "image"))


def decode_audio(value: Any, sampling_rate: Any) -> Float[np.ndarray, " samples"]:
    """`value` as a mono float32 waveform in [-1, 1] at `sampling_rate`.

    Args:
        value: (array, rate); {"array", "sampling_rate"}; the bytes of an audio file that libsndfile reads; its path; or
            the {"bytes", "path"} of datasets' Audio(decode=False). Arrays: (samples,), (channels, samples) or
            (samples, channels), the shorter axis being the channels; integers are scaled by their type's range.
        sampling_rate: of the result, in Hz. Resampling is band-limited (no aliasing).
    Raises: ValueError for a missing, broken, empty or NaN recording, and for an array whose rate is not given.
    """
    target = _rate(sampling_rate)
    _refuse_missing(value, "audio")
    if isinstance(value, Mapping) and "array" in value:
        if value.get("sampling_rate") is None:
            raise ValueError('audio {"array"} lacks its "sampling_rate"')
        value = (value["array"], value["sampling_rate"])
    if isinstance(value, np.ndarray | torch.Tensor | list):
        raise ValueError("an audio array needs its sampling rate: pass (array, rate) or {'array', 'sampling_rate'}")
    if isinstance(value, tuple):
        if len(value) != 2 or np.ndim(value[1]) != 0:
            raise ValueError("an audio tuple must be (array, rate)")
        samples, rate = value[0], _rate(value[1])
    else:
        samples, rate = _read_audio(_file_of(value, "audio"))
    return np.clip(resample(_mono(as_numpy(samples)), rate, target), -1.0, 1.0)


def resample(waveform: Float[np.ndarray, " samples"], rate: int, target: int) -> Float[np.ndarray, " resampled"]:
    """The waveform at `target` Hz instead of `rate`; frequencies that the new rate cannot hold are filtered out."""
    if rate == target:
        return waveform
    from scipy.signal import resample_poly

    common = math.gcd(rate, target)
    return resample_poly(waveform, target // common, rate // common).astype(np.float32)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_missing(value: Any, kind: str) -> None:
    """ValueError for what stands for "no value": None, a float NaN (as pandas writes it), pandas' NA."""
    nan = isinstance(value, float) and math.isnan(value)
    if value is None or nan or type(value).__name__ in ("NAType", "NaTType"):
        raise ValueError(f"{kind} is missing ({value!r})")


def _refuse_nan(array: Shaped[np.ndarray, "..."], kind: str) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{kind} holds NaN or infinity")


def _file_of(value: Any, kind: str) -> bytes | Path:
    """The bytes or the existing path that `value` holds."""
    if isinstance(value, Mapping):
        if not {"bytes", "path"} & value.keys():
            raise ValueError(f'{kind}: expected a dict with "bytes" or "path", got the keys {sorted(map(str, value))}')
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
        _refuse_missing(value, f"{kind}: the dict's content")
    if isinstance(value, bytes | bytearray | memoryview):
        if not len(value):
            raise ValueError(f"{kind} has 0 bytes")
        return bytes(value)
    if isinstance(value, str | Path):
        try:
            found = Path(value).is_file()
        except (OSError, ValueError):  # a name too long, or one that holds NUL
            found = False
        if not found:
            where = "" if Path(value).is_absolute() else f", in {_brief(str(Path.cwd()))}"
            raise ValueError(f"{kind} file not found: {_brief(str(value))}{where}")
        return Path(value)
    raise ValueError(f"cannot read {kind} from {type(value).__name__} {_brief(value)}")


def _image_from_file(source: bytes | Path) -> Any:
    from PIL import Image

    try:
        opened = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    except Image.UnidentifiedImageError as error:
        raise ValueError("not an image file that PIL can read") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"image is too large: {error}") from error
    except Exception as error:  # broken files make PIL raise nearly every type of exception
        raise ValueError(f"broken image: {error}") from error
    with opened as image:
        return _upright_rgb(image)


def _upright_rgb(image: Any) -> Any:
    from PIL import Image, ImageOps

    width, height = image.size
    if not width or not height:
        raise ValueError(f"image is {width} x {height} pixels")
    limit = Image.MAX_IMAGE_PIXELS  # up to twice this PIL itself only warns
    if limit is not None and width * height > limit:
        raise ValueError(f"image is too large: {width} x {height} pixels; PIL's limit is {limit}")
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
    except Exception as error:  # as above
        raise ValueError(f"broken image: {error}") from error
    return _to_rgb(upright)


def _to_rgb(image: Any) -> Any:
    """A loaded PIL image of any mode as RGB."""
    from PIL import Image

    if image.mode.startswith("I") or image.mode == "F":
        return _image_from_array(_deep_pixels(image), f"image of mode {image.mode}")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _deep_pixels(image: Any) -> Shaped[np.ndarray, "h w"]:
    """The pixels of a mode of more than 8 bits: uint16, or floats in [0, 1]."""
    pixels = np.asarray(image)
    if image.mode != "F":
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError(
                f"image of mode {image.mode} holds {pixels.min()} to {pixels.max()}; 16 bits are 0 to 65535"
            )
        return pixels.astype(np.uint16)
    return pixels / 255 if pixels.max() > 1 else pixels


def _image_from_array(pixels: Shaped[np.ndarray, "..."], origin: str) -> Any:
    """The RGB image of (h, w) or (h, w, 1 | 3 | 4) pixels: bool, uint8, uint16, or floats in [0, 1]."""
    from PIL import Image

    if not pixels.size:
        raise ValueError(f"image is empty: {origin}")
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.ndim != 2 and not (pixels.ndim == 3 and pixels.shape[2] in (3, 4)):
        raise ValueError(
            f"{origin} is no image: arrays are (h, w) or (h, w, 1 | 3 | 4), tensors (h, w) or (1 | 3 | 4, h, w)"
        )
    return _to_rgb(Image.fromarray(np.ascontiguousarray(_eight_bits(pixels, origin))))


def _eight_bits(pixels: Shaped[np.ndarray, "..."], origin: str) -> Shaped[np.ndarray, "..."]:
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype == bool:
        return pixels.astype(np.uint8) * np.uint8(255)
    if pixels.dtype.kind == "u" and pixels.dtype.itemsize == 2:
        return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)
    if pixels.dtype.kind != "f":
        raise ValueError(f"{origin} has dtype {pixels.dtype}; images are bool, uint8, uint16, or floats in [0, 1]")
    _refuse_nan(pixels, "image")
    low, high = float(pixels.min()), float(pixels.max())
    if low < -1e-3 or high > 1 + 1e-3:
        raise ValueError(f"{origin} holds floats from {low:.4g} to {high:.4g}; they must lie in [0, 1]")
    return (pixels.astype(np.float64).clip(0, 1) * 255).round().astype(np.uint8)


def _rate(value: Any) -> int:
    if not isinstance(value, int | float | np.integer) or not value >= 1 or value % 1:
        raise ValueError(f"sampling rate must be a positive whole number of Hz, got {value!r}")
    return int(value)


def _read_audio(source: bytes | Path) -> tuple[Float[np.ndarray, "samples channels"], int]:
    import soundfile

    try:
        return soundfile.read(
            io.BytesIO(source) if isinstance(source, bytes) else source, dtype="float32", always_2d=True
        )
    except (soundfile.LibsndfileError, OSError) as error:
        raise ValueError(
            f"not an audio file that libsndfile can read: {getattr(error, 'error_string', error)}"
        ) from error


def _mono(samples: Shaped[np.ndarray, "..."]) -> Float[np.ndarray, " samples"]:
    """Samples of any integer or float type, one or more channels, as mono float32 in [-1, 1]."""
    if not samples.size:
        raise ValueError("audio has 0 samples")
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and min(samples.shape) > CHANNELS_LIMIT):
        raise ValueError(f"audio array of shape {samples.shape} is no waveform of up to {CHANNELS_LIMIT} channels")
    waveform = _scaled(samples)
    if waveform.ndim == 2:
        waveform = waveform.mean(axis=0 if waveform.shape[0] < waveform.shape[1] else 1)
    return waveform.astype(np.float32)


def _scaled(samples: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    if samples.dtype.kind in "iu" and samples.dtype.itemsize <= 4:  # 64 bits are a list's ints, not full-scale audio
        half = 2.0 ** (8 * samples.dtype.itemsize - 1)
        return samples / half - (samples.dtype.kind == "u")
    if samples.dtype.kind != "f":
        raise ValueError(f"audio array has dtype {samples.dtype}; samples are integers of up to 32 bits, or floats")
    _refuse_nan(samples, "audio")
    peak = float(np.abs(samples).max())
    if peak > OVERSHOOT:
        raise ValueError(f"float samples reach {peak:.4g}; they must lie in [-1, 1] (divide 16-bit integers by 32768)")
    return samples.clip(-1, 1)
