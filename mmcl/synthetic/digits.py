"""Handwritten digit x spoken digit -> the word of their sum: real perception whose dependence lies beyond pairs.

Image a, audio b, text (a + b) mod 10: any two of the three are independent, and any two determine the third.
The control, text = a, is a dependence of one pair.
"""

import io
import math
import wave
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int16, Int64, Shaped, UInt8

from mmcl.synthetic.speech import RATE, VOICES, WORDS, spoken_digits
from mmcl.tables import lookup

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

TEST_IMAGES, TEST_VOICES = 0.25, 3
"""Share of the images, and number of the voices, that training never meets."""

Digits = Int64[np.ndarray, " n"]
TEXTS: dict[str, Callable[[Digits, Digits], Digits]] = {
    "sum": lambda image, audio: (image + audio) % 10,
    "image": lambda image, audio: image,
}
"""{name: which word belongs to an image's digit and a clip's}."""

ROWS_A_CHUNK = 50_000
"""Rows of one Arrow chunk: 0.3 GB of clips, where 2 GB is the most that a chunk can address."""


@dataclass(frozen=True)
class DigitWorld:
    """Handwritten and spoken digits, each split into training and test.

    images: greyscale, ink bright; image_digits 0 to 9; image_is_test: drawn within each digit.
    clips: WAV files (16-bit, mono, 8 kHz); clip_digits; clip_voices: names from `VOICES`; clip_is_test: whole voices.
    """

    images: UInt8[np.ndarray, "images 8 8"]
    image_digits: Int64[np.ndarray, " images"]
    image_is_test: Bool[np.ndarray, " images"]
    clips: list[bytes]
    clip_digits: Int64[np.ndarray, " clips"]
    clip_voices: Shaped[np.ndarray, " clips"]
    clip_is_test: Bool[np.ndarray, " clips"]


def digit_world(seed: int = 0, takes: int = 8) -> DigitWorld:
    """scikit-learn's 1797 digits of 8 x 8 pixels, and `spoken_digits`: 10 words x 15 voices x `takes` clips.

    Args:
        seed: of both splits: about a quarter of each digit's images, and 3 of the 15 voices, are for testing.
            The three differ in accent, so that training has heard each accent from someone else.
    Raises: ImportError without `espeakng_loader`.
    """
    from sklearn.datasets import load_digits

    pixels, image_digits = load_digits(return_X_y=True)
    images = np.round(pixels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    spoken = spoken_digits(takes=takes)
    image_seed, voice_seed = np.random.SeedSequence(seed).spawn(2)
    test_voices = _voices_of_different_accents(TEST_VOICES, np.random.default_rng(voice_seed))
    return DigitWorld(
        images=images,
        image_digits=image_digits.astype(np.int64),
        image_is_test=_stratified(image_digits.astype(np.int64), TEST_IMAGES, np.random.default_rng(image_seed)),
        clips=[_wav(clip) for clip in spoken.clips],
        clip_digits=spoken.digits,
        clip_voices=np.array(VOICES)[spoken.voices],
        clip_is_test=np.isin(np.array(VOICES)[spoken.voices], test_voices),
    )


def digit_tuples(world: DigitWorld, part: str, count: int, seed: int = 0, text: str = "sum") -> "datasets.Dataset":
    """`count` rows, each an image and a clip of `part`, drawn independently and uniformly, and the word they determine.

    Args:
        part: "train" or "test".
        seed: of the draws; the same seed draws differently from the two parts.
        text: "sum", the word of (image + clip) mod 10, or "image", the image's own.
    Returns: columns image (PNG, greyscale 8 x 8), audio (WAV, not decoded: {"bytes", "path"}), text, image_digit,
        audio_digit, voice, image_id and clip_id (positions in `world`).
    Raises: KeyError for an unknown `part` or `text`; ValueError for a negative count.
    """
    import datasets
    import pyarrow as pa

    is_test, word_of = lookup({"train": False, "test": True}, part, "part"), lookup(TEXTS, text, "text")
    if count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    generator = np.random.default_rng([seed, is_test])
    image_ids = generator.choice(np.flatnonzero(world.image_is_test == is_test), count)
    clip_ids = generator.choice(np.flatnonzero(world.clip_is_test == is_test), count)
    image_digits, clip_digits = world.image_digits[image_ids], world.clip_digits[clip_ids]
    columns = {
        "image": _files([_png(image) for image in world.images], image_ids),
        "audio": _files(world.clips, clip_ids),
        "text": pa.array(WORDS).take(pa.array(word_of(image_digits, clip_digits))),
        "image_digit": pa.array(image_digits),
        "audio_digit": pa.array(clip_digits),
        "voice": pa.array(world.clip_voices[clip_ids].tolist(), pa.string()),
        "image_id": pa.array(image_ids),
        "clip_id": pa.array(clip_ids),
    }
    table = pa.table(columns)
    features = datasets.Features.from_arrow_schema(table.schema)
    features.update(image=datasets.Image(), audio=datasets.Audio(sampling_rate=RATE, decode=False))
    return datasets.Dataset(table, info=datasets.DatasetInfo(features=features))


def _voices_of_different_accents(count: int, generator: np.random.Generator) -> list[str]:
    by_accent: dict[str, list[str]] = {}
    for voice in VOICES:
        by_accent.setdefault(voice.partition("+")[0], []).append(voice)
    accents = generator.choice(list(by_accent), count, replace=False)
    return [str(generator.choice(by_accent[accent])) for accent in accents]


def _stratified(labels: Digits, share: float, generator: np.random.Generator) -> Bool[np.ndarray, " n"]:
    """True for `share` of the rows of each label, rounded."""
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        chosen[generator.choice(rows, round(share * len(rows)), replace=False)] = True
    return chosen


def _files(contents: list[bytes], rows: Int64[np.ndarray, " n"]) -> "pa.ChunkedArray":
    """Arrow's form of the files `contents[row]` for each row: {"bytes", "path": null}."""
    import pyarrow as pa

    whole = pa.array(contents, pa.binary())
    chunks = np.array_split(rows, max(1, math.ceil(len(rows) / ROWS_A_CHUNK)))
    files = [
        pa.StructArray.from_arrays(
            [whole.take(pa.array(chunk)), pa.nulls(len(chunk), pa.string())], names=["bytes", "path"]
        )
        for chunk in chunks
    ]
    return pa.chunked_array(files)


def _png(image: UInt8[np.ndarray, "h w"]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _wav(samples: Int16[np.ndarray, " samples"]) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()
