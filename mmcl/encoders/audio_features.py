"""Log-mel spectra of waveforms: what small audio encoders read."""

import functools
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def log_mel(
    waveforms: Tensor,
    sampling_rate: int,
    n_mels: int = 40,
    window: float = 0.025,
    hop: float = 0.010,
    floor: float = 1e-6,
) -> Float[Tensor, "n n_mels frames"]:
    """Natural logarithm of the power in `n_mels` bands, evenly spaced on the HTK mel scale from 0 Hz to half the rate.

    Frames are `window` seconds under a Hann window, every `hop` seconds, centred on samples 0, hop, 2 hop, ...; zeros
    stand before the start and past the end. Power is the mean square: 1 / 2 for a sine of amplitude 1, whatever the
    rate and the window; a band weighs it by its triangle.

    Args:
        waveforms: (n, samples) floats, samples >= 1.
        sampling_rate: Hz.
        floor: least power that is told from silence; 1e-6 is 60 dB below full scale.
    Returns: (n, n_mels, frames) of `waveforms`' type and device, at least log(floor); frames as `frame_count` says.
    Raises: ValueError for another shape, a floor of 0 or less, or more bands than the window can tell apart.
    """
    if waveforms.ndim != 2 or not waveforms.shape[1] or not waveforms.is_floating_point():
        raise ValueError(
            f"waveforms: expected floats (n, samples >= 1), got {waveforms.dtype} {tuple(waveforms.shape)}"
        )
    if not floor > 0:
        raise ValueError(f"floor must be positive, got {floor}")
    size, step = _samples(window, sampling_rate, "window"), _samples(hop, sampling_rate, "hop")
    n_fft = 2 ** math.ceil(math.log2(size))
    weights = torch.hann_window(size, dtype=waveforms.dtype, device=waveforms.device)
    spectrum = torch.stft(waveforms, n_fft, step, size, weights, center=True, pad_mode="constant", return_complex=True)
    power = spectrum.abs().square() * (2 / (n_fft * weights.square().sum()))  # Parseval, of one half of the spectrum
    bank = mel_filters(sampling_rate, n_fft, n_mels).to(power)
    return (bank @ power).clamp_min(floor).log()


def frame_count(samples: int, sampling_rate: int, hop: float = 0.010) -> int:
    """Frames that `log_mel` makes of `samples` samples."""
    return 1 + samples // _samples(hop, sampling_rate, "hop")


@functools.lru_cache(maxsize=8)
def mel_filters(sampling_rate: int, n_fft: int, n_mels: int) -> Float[Tensor, "n_mels bins"]:
    """Triangular filters of peak 1 over the n_fft / 2 + 1 bins; each starts and ends at its neighbours' centres.

    Source: the scale m = 2595 log10(1 + f / 700) of HTK (Young et al. 2006, section "Filterbank Analysis").
    """
    if n_mels < 1:
        raise ValueError(f"n_mels must be at least 1, got {n_mels}")
    top = 2595 * math.log10(1 + sampling_rate / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, n_mels + 2, dtype=torch.float64) / 2595) - 1)
    bins = torch.linspace(0, sampling_rate / 2, n_fft // 2 + 1, dtype=torch.float64)
    widths = corners.diff()
    rising = (bins - corners[:-2, None]) / widths[:-1, None]
    falling = (corners[2:, None] - bins) / widths[1:, None]
    bank = torch.minimum(rising, falling).clamp_min(0)
    empty = (bank.sum(1) == 0).nonzero()
    if len(empty):
        raise ValueError(
            f"{n_mels} mel bands are too many for {n_fft} points at {sampling_rate} Hz: band {int(empty[0])} is empty"
        )
    return bank


def _samples(seconds: Any, sampling_rate: int, name: str) -> int:
    count = round(seconds * sampling_rate)
    if count < 1:
        raise ValueError(f"{name} of {seconds} s holds no sample at {sampling_rate} Hz")
    return count
