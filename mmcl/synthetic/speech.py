"""Synthetic speech: eSpeak NG through the `espeakng-loader` package, and spoken digits in fifteen voices.

eSpeak keeps state between utterances (noise, phase), so each call loads its own copy of the library and unloads it:
the same arguments give the same samples, whatever was spoken before. That costs 3 ms.
"""

import ctypes
import functools
import hashlib
import json
import os
import sys
import tempfile
import threading
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int16, Int64

from mmcl.decode import decode_text, resample

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

VOICES = (
    "en-us",
    "en-us+f1",
    "en-us+f3",
    "en-us+m3",
    "en-gb",
    "en-gb+f2",
    "en-gb+m5",
    "en-gb-x-rp+f4",
    "en-gb-x-rp+m1",
    "en-gb-scotland+m2",
    "en-gb-scotland+f5",
    "en-029+f3",
    "en-029+m4",
    "en-us-nyc+f2",
    "en-us-nyc+m7",
)
"""Accent and variant of each voice, two or more an accent. Variants change formants and pitch: f female, m male."""

FILES = {"en-gb": "en"}
"""Accents whose file in eSpeak's data has another name."""

RATE = 8000
"""Sampling rate of the spoken digits, Hz."""

SPEEDS, PITCHES = (140, 210), (35, 65)
"""Ranges, ends included, that each take's speed (words a minute) and pitch (0 to 99) are drawn from."""

_LOCK = threading.Lock()
_SYNCHRONOUS, _DONT_EXIT, _UTF8 = 2, 0x8000, 1
_SPEED, _PITCH = 1, 3
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class SpokenDigits:
    """n clips of 16-bit samples at `RATE` Hz, trimmed, at full scale; i says WORDS[digits[i]] in VOICES[voices[i]]."""

    clips: list[Int16[np.ndarray, "_"]]
    digits: Int64[np.ndarray, " n"]
    voices: Int64[np.ndarray, " n"]


def synthesize(
    text: Any, voice: str = "en-us", speed: int = 175, pitch: int = 50, sampling_rate: int = 22050
) -> Float[np.ndarray, " samples"]:
    """Speak `text`. Same arguments, same samples.

    Args:
        text: one string, not blank.
        voice: an eSpeak accent such as "en-gb", with an optional variant ("en-gb+f2"); see `VOICES`.
        speed: words a minute, 80 to 450.
        pitch: 0 to 99.
        sampling_rate: of the result, Hz; eSpeak itself speaks at 22050.
    Returns: float32 in [-1, 1], with the silence that eSpeak leaves around speech.
    Raises: ValueError for an unknown voice or a value out of range; ImportError without `espeakng_loader`.
    """
    text = decode_text(text)
    for name, value, (low, high) in (("speed", speed, (80, 450)), ("pitch", pitch, (0, 99))):
        if not low <= value <= high:
            raise ValueError(f"{name} must lie in {low} to {high}, got {value}")
    if sampling_rate < 1:
        raise ValueError(f"sampling_rate must be positive, got {sampling_rate}")
    with _LOCK:
        samples, rate = _speak(text, voice, speed, pitch)
    return np.clip(resample(samples.astype(np.float32) / 32768, rate, sampling_rate), -1, 1)


def spoken_digits(seed: int = 0, takes: int = 8, cache: bool = True) -> SpokenDigits:
    """Ten digit words x `VOICES` x `takes`, each take at a speed and pitch of its own.

    Args:
        seed: of the speeds and pitches.
        takes: clips of each word by each voice.
        cache: keep the clips as one file in $MMCL_CACHE, else $XDG_CACHE_HOME/mmcl, else ~/.cache/mmcl. Its name
            hashes everything that the clips depend on; one that cannot be read is rebuilt, with a warning.
    Raises: ValueError for takes < 1; ImportError without `espeakng_loader`.
    """
    if takes < 1:
        raise ValueError(f"takes must be at least 1, got {takes}")
    if not cache:
        return _synthesize_digits(seed, takes)
    path = _cache_path(seed, takes)
    if path.exists():
        try:
            return _load(path)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            warnings.warn(f"rebuilding {path}, which cannot be read: {error}", stacklevel=2)
    spoken = _synthesize_digits(seed, takes)
    _save(spoken, path)
    return spoken


def _synthesize_digits(seed: int, takes: int) -> SpokenDigits:
    generator = np.random.default_rng(seed)
    shape = (len(WORDS), len(VOICES), takes)
    speeds = generator.integers(*SPEEDS, size=shape, endpoint=True)
    pitches = generator.integers(*PITCHES, size=shape, endpoint=True)
    digits, voices, _ = (indices.ravel() for indices in np.indices(shape))
    clips = [
        _full_scale(_trimmed(synthesize(WORDS[digit], VOICES[voice], int(speed), int(pitch), RATE)))
        for digit, voice, speed, pitch in zip(digits, voices, speeds.ravel(), pitches.ravel(), strict=True)
    ]
    return SpokenDigits(clips, digits.astype(np.int64), voices.astype(np.int64))


def _trimmed(waveform: Float[np.ndarray, " samples"], floor: float = 0.01) -> Float[np.ndarray, " speech"]:
    """From the first to the last sample louder than `floor` times the peak (-40 dB)."""
    loud = np.flatnonzero(np.abs(waveform) > floor * np.abs(waveform).max())
    return waveform[loud[0] : loud[-1] + 1]


def _full_scale(waveform: Float[np.ndarray, " samples"]) -> Int16[np.ndarray, " samples"]:
    return np.round(waveform * (32767 / np.abs(waveform).max())).astype(np.int16)


def _cache_path(seed: int, takes: int) -> Path:
    from importlib.metadata import version

    _loader()
    depends = ["digits-1", version("espeakng-loader"), seed, takes, WORDS, VOICES, RATE, SPEEDS, PITCHES]
    name = hashlib.sha256(json.dumps(depends).encode()).hexdigest()[:16]
    return _cache_folder() / f"spoken-digits-{name}.npz"


def _cache_folder() -> Path:
    if os.environ.get("MMCL_CACHE"):
        return Path(os.environ["MMCL_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmcl"


def _save(spoken: SpokenDigits, path: Path) -> None:
    """Write beside `path`, then rename: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            lengths = np.array([len(clip) for clip in spoken.clips])
            samples = np.concatenate(spoken.clips)
            np.savez(file, samples=samples, lengths=lengths, digits=spoken.digits, voices=spoken.voices)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            file.close()
            os.unlink(file.name)
            raise


def _load(path: Path) -> SpokenDigits:
    with np.load(path, allow_pickle=False) as arrays:
        samples, lengths = arrays["samples"], arrays["lengths"]
        if lengths.sum() != len(samples):
            raise ValueError(f"{len(samples)} samples where {lengths.sum()} are declared")
        return SpokenDigits(np.split(samples, lengths.cumsum()[:-1]), arrays["digits"], arrays["voices"])


def _loader() -> Any:
    try:
        import espeakng_loader
    except ImportError as error:
        raise ImportError("speech needs the package espeakng-loader: pip install 'mmcl[demo]'") from error
    return espeakng_loader


@functools.cache
def _short_data_path() -> tuple[Path, Any]:
    """eSpeak's data folder, by a short link where its path exceeds eSpeak's 160 bytes; and what keeps that link."""
    data = Path(_loader().get_data_path())
    if len(os.fsencode(data)) < 120:
        return data, None
    folder = tempfile.TemporaryDirectory(prefix="mmcl-")
    link = Path(folder.name) / data.name
    link.symlink_to(data, target_is_directory=True)
    return link, folder


def _speak(text: str, voice: str, speed: int, pitch: int) -> tuple[Int16[np.ndarray, " samples"], int]:
    """One utterance from a freshly loaded library: 16-bit samples and their rate."""
    data, _ = _short_data_path()
    accent, plus, variant = voice.partition("+")
    if plus and not (data / "voices" / "!v" / variant).is_file():  # eSpeak ignores an unknown variant
        raise ValueError(f"unknown variant {variant!r} of voice {voice!r}; choose from {list(VOICES)}")
    library = ctypes.CDLL(_loader().get_library_path())
    try:
        rate = library.espeak_Initialize(_SYNCHRONOUS, 0, os.fsencode(data), _DONT_EXIT)
        if rate <= 0:
            raise RuntimeError(f"eSpeak could not read its data in {data}")
        try:
            return _utterance(library, text, FILES.get(accent, accent) + plus + variant, speed, pitch), rate
        finally:
            library.espeak_Terminate()
    finally:
        _unload(library)


def _utterance(library: Any, text: str, voice: str, speed: int, pitch: int) -> Int16[np.ndarray, " samples"]:
    """What an initialised library says."""
    chunks: list[np.ndarray] = []
    collect = _collector(chunks)
    library.espeak_SetSynthCallback(collect)
    library.espeak_ng_SetRandSeed(ctypes.c_long(1))
    if library.espeak_SetVoiceByName(voice.encode()):
        raise ValueError(f"unknown voice {voice!r}; choose from {list(VOICES)}")
    library.espeak_SetParameter(_SPEED, speed, 0)
    library.espeak_SetParameter(_PITCH, pitch, 0)
    encoded = text.encode()
    if library.espeak_Synth(encoded, ctypes.c_size_t(len(encoded) + 1), 0, 1, 0, _UTF8, None, None):
        raise RuntimeError(f"eSpeak could not speak {text!r}")
    return np.concatenate(chunks) if chunks else np.zeros(0, np.int16)


def _collector(chunks: list[np.ndarray]) -> Any:
    """eSpeak's callback: a copy of each block of samples goes to `chunks`."""

    def collect(samples: Any, count: int, events: Any) -> int:
        if samples and count:
            chunks.append(np.ctypeslib.as_array(samples, shape=(count,)).copy())
        return 0

    return _Callback(collect)


def _unload(library: Any) -> None:
    import _ctypes

    close = "FreeLibrary" if sys.platform == "win32" else "dlclose"
    getattr(_ctypes, close)(library._handle)
