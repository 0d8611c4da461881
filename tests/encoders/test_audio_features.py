"""Log-mel spectra: the right band, the right level, the same for one and for many."""

import math

import numpy as np
import pytest
import torch

from mmcl.encoders.audio_features import frame_count, log_mel, mel_filters


def tone(frequency: float, rate: int = 8000, seconds: float = 0.5, level: float = 0.5) -> torch.Tensor:
    return (level * torch.sin(2 * math.pi * frequency * torch.arange(int(rate * seconds)) / rate))[None]


def centres(rate: int, n_mels: int) -> np.ndarray:
    """Hz of the middle of each band, from the definition of the HTK scale."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    return 700 * (10 ** (np.arange(1, n_mels + 1) * top / (n_mels + 1) / 2595) - 1)


def noise(rows: int = 3, samples: int = 4000) -> torch.Tensor:
    return torch.rand(rows, samples, generator=torch.Generator().manual_seed(0)) - 0.5


@pytest.mark.parametrize("rate", [8000, 16000])
def test_tone_at_a_bands_centre_peaks_in_that_band(rate):
    for band, frequency in enumerate(centres(rate, 20)):
        middle = log_mel(tone(frequency, rate), rate, n_mels=20)[0, :, 25]
        assert int(middle.argmax()) == band


def test_ten_times_the_amplitude_adds_log_100():
    quiet = log_mel(noise() / 10, 8000, floor=1e-12)
    np.testing.assert_allclose(log_mel(noise(), 8000, floor=1e-12), quiet + math.log(100), atol=1e-3)


@pytest.mark.parametrize(("rate", "window"), [(8000, 0.025), (8000, 0.05), (16000, 0.025), (44100, 0.02)])
def test_power_of_all_bands_together_is_the_mean_square(rate, window):
    bands = log_mel(tone(1000, rate, level=1.0), rate, n_mels=8, window=window)[0, :, 25]
    assert bands.exp().sum() == pytest.approx(1 / 2, rel=0.02)


def test_silence_has_the_floor_everywhere():
    np.testing.assert_allclose(log_mel(torch.zeros(1, 800), 8000), math.log(1e-6), atol=1e-5)
    np.testing.assert_allclose(log_mel(torch.zeros(1, 800), 8000, floor=1e-3), math.log(1e-3), atol=1e-5)


def test_each_row_is_what_it_is_alone():
    together = log_mel(noise(), 8000)
    alone = torch.cat([log_mel(row[None], 8000) for row in noise()])
    torch.testing.assert_close(together, alone)


def test_click_shows_in_the_frames_whose_window_holds_it():
    waveform = torch.zeros(1, 8000)
    waveform[0, 4000] = 1.0  # frame 50 is centred on it; windows reach 100 samples to either side, frames are 80 apart
    loud = (log_mel(waveform, 8000)[0] > math.log(1e-6) + 1).any(0).nonzero()[:, 0]
    assert loud.tolist() == [49, 50, 51]


@pytest.mark.parametrize("samples", [1, 79, 80, 81, 4000, 6401])
def test_frame_count_is_what_log_mel_makes(samples):
    assert log_mel(torch.ones(2, samples), 8000, n_mels=24).shape == (2, 24, frame_count(samples, 8000))
    assert frame_count(samples, 8000) == 1 + samples // 80


def test_same_as_transformers_implementation():
    from transformers.audio_utils import mel_filter_bank, spectrogram

    bank = mel_filter_bank(257, 32, 0, 8000, 16000, norm=None, mel_scale="htk")
    np.testing.assert_allclose(mel_filters(16000, 512, 32), bank.T, atol=1e-9)
    window = torch.hann_window(400).numpy()
    power = spectrogram(noise(1)[0].numpy(), window, 400, 160, 512, power=2.0, pad_mode="constant", mel_filters=bank)
    wanted = np.log(np.maximum(power * 2 / (512 * (window**2).sum()), 1e-6))
    np.testing.assert_allclose(log_mel(noise(1), 16000, n_mels=32)[0], wanted, atol=1e-3)


def test_filters_cover_every_frequency_between_the_outer_centres_once():
    bank = mel_filters(8000, 1024, 20)
    bins = np.linspace(0, 4000, 513)
    inside = (bins >= centres(8000, 20)[0]) & (bins <= centres(8000, 20)[-1])
    np.testing.assert_allclose(bank.sum(0).numpy()[inside], 1)
    assert bank.min() >= 0


def test_gradient_reaches_the_waveform():
    waveform = noise(1).requires_grad_()
    log_mel(waveform, 8000).sum().backward()
    assert waveform.grad is not None
    assert waveform.grad.isfinite().all()
    assert waveform.grad.abs().max() > 0


def test_double_precision_stays_double():
    assert log_mel(noise().double(), 8000).dtype == torch.float64


@pytest.mark.parametrize(
    ("waveforms", "options", "reason"),
    [
        (torch.zeros(800), {}, r"expected floats \(n, samples >= 1\), got torch.float32 \(800,\)"),
        (torch.zeros(2, 0), {}, r"\(2, 0\)"),
        (torch.zeros(2, 800, dtype=torch.int16), {}, "int16"),
        (torch.zeros(2, 800), {"n_mels": 200}, "200 mel bands are too many for 256 points at 8000 Hz: band 0 is empty"),
        (torch.zeros(2, 800), {"n_mels": 0}, "n_mels must be at least 1"),
        (torch.zeros(2, 800), {"hop": 1e-5}, "hop of 1e-05 s holds no sample at 8000 Hz"),
        (torch.zeros(2, 800), {"window": 0.0}, "window of 0.0 s"),
        (torch.zeros(2, 800), {"floor": 0.0}, "floor must be positive"),
    ],
)
def test_impossible_request_says_why(waveforms, options, reason):
    with pytest.raises(ValueError, match=reason):
        log_mel(waveforms, 8000, **options)
