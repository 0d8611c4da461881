"""Raw sounds of every form: the same sound comes out, or an error that says why not."""

import io

import numpy as np
import pytest
import soundfile
import torch

from mmcl.decode import decode_audio, resample


def tone(frequency: float, rate: int, seconds: float = 0.5, level: float = 0.5) -> np.ndarray:
    return (level * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def wav_bytes(samples: np.ndarray, rate: int = 8000, kind: str = "WAV", subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def pitch_and_level(waveform: np.ndarray, rate: int) -> tuple[float, float]:
    """Loudest frequency in Hz and the root mean square of the middle half."""
    middle = waveform[len(waveform) // 4 : -len(waveform) // 4]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle)), 16 * len(middle)))
    return spectrum.argmax() * rate / (16 * len(middle)), float(np.sqrt(np.mean(middle**2)))


def test_resampling_keeps_pitch_and_level():
    waveform = decode_audio((tone(1000, 44100), 44100), 8000)
    assert waveform.dtype == np.float32
    assert len(waveform) == 4000
    pitch, level = pitch_and_level(waveform, 8000)
    assert pitch == pytest.approx(1000, abs=1)
    assert level == pytest.approx(0.5 / np.sqrt(2), rel=0.01)


def test_resampling_does_not_alias():
    _, level = pitch_and_level(decode_audio((tone(6000, 44100), 44100), 8000), 8000)
    assert level < 0.001


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 48000])
def test_upsampling_keeps_pitch_level_and_duration(rate):
    waveform = decode_audio((tone(500, rate), rate), 48000)
    assert len(waveform) == pytest.approx(24000, abs=10)
    pitch, level = pitch_and_level(waveform, 48000)
    assert pitch == pytest.approx(500, abs=1)
    assert level == pytest.approx(0.5 / np.sqrt(2), rel=0.01)


def test_same_rate_changes_no_sample():
    waveform = tone(440, 8000)
    np.testing.assert_array_equal(decode_audio((waveform, 8000), 8000), waveform)


def test_all_forms_of_one_recording_agree(tmp_path):
    waveform = tone(440, 8000)
    data = wav_bytes(waveform)
    path = tmp_path / "a.wav"
    path.write_bytes(data)
    forms = [data, str(path), path, {"bytes": data, "path": None}, {"bytes": None, "path": str(path)}]
    forms += [(waveform, 8000), {"array": waveform, "sampling_rate": 8000, "path": None}, (waveform.tolist(), 8000)]
    forms += [(torch.from_numpy(waveform), 8000.0), (np.round(waveform * 32768).astype(np.int16), np.int64(8000))]
    for form in forms:
        np.testing.assert_allclose(decode_audio(form, 8000), waveform, atol=1 / 32768)


@pytest.mark.parametrize(
    ("kind", "subtype"), [("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"), ("WAV", "ULAW")]
)
def test_compressed_files_sound_the_same(kind, subtype):
    waveform = decode_audio(wav_bytes(tone(440, 16000), 16000, kind, subtype), 16000)
    pitch, level = pitch_and_level(waveform, 16000)
    assert pitch == pytest.approx(440, abs=2)
    assert level == pytest.approx(0.5 / np.sqrt(2), rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "silence", "loudest"),
    [("int8", 0, -128), ("uint8", 128, 0), ("int16", 0, -32768), ("int32", 0, -(2**31))],
)
def test_integers_are_scaled_by_their_range(dtype, silence, loudest):
    np.testing.assert_array_equal(decode_audio((np.array([silence, loudest], dtype), 8000), 8000), [0, -1])


def test_stereo_is_averaged_whichever_axis_holds_the_channels():
    left, right = tone(440, 8000), np.zeros(4000, np.float32)
    for form in (np.stack([left, right]), np.stack([left, right], axis=1), torch.from_numpy(np.stack([left, right]))):
        np.testing.assert_allclose(decode_audio((form, 8000), 8000), left / 2, atol=1e-7)
    data = wav_bytes(np.stack([left, right], axis=1))
    np.testing.assert_allclose(decode_audio(data, 8000), left / 2, atol=1e-4)


def test_result_never_leaves_the_unit_range():
    square = np.sign(tone(100, 44100))  # rings past 1 when band-limited
    assert np.abs(resample(square, 44100, 8000)).max() > 1
    assert np.abs(decode_audio((square, 44100), 8000)).max() == 1
    assert decode_audio((np.array([1.2, -1.5]), 8000), 8000).tolist() == [1, -1]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "audio is missing"),
        (b"", "0 bytes"),
        (b"RIFF nonsense", "libsndfile"),
        (wav_bytes(np.zeros(0)), "0 samples"),
        ((np.zeros(0), 8000), "0 samples"),
        ((np.zeros((2, 0)), 8000), "0 samples"),
        (tone(440, 8000), "needs its sampling rate"),
        (torch.zeros(9), "needs its sampling rate"),
        ([0.1, 0.2], "needs its sampling rate"),
        ({"array": tone(440, 8000)}, 'lacks its "sampling_rate"'),
        ({"bytes": None, "path": None}, "missing"),
        ({"samples": 1}, "keys"),
        ("gone.wav", "file not found: 'gone.wav'"),
        ((8000, np.zeros(9)), r"\(array, rate\)"),
        ((np.zeros(9),), r"\(array, rate\)"),
        ((np.zeros(9), 0), "positive whole number of Hz, got 0"),
        ((np.zeros(9), 8000.5), "positive whole number"),
        ((np.zeros(9), None), "positive whole number"),
        ((np.zeros(9), float("inf")), "positive whole number"),
        ((np.zeros(9), "8000"), "positive whole number"),
        ((np.array([0.1, np.nan]), 8000), "NaN"),
        (wav_bytes(np.array([0.1, np.inf]), subtype="FLOAT"), "infinity"),
        ((np.array([0, 12000.0]), 8000), "reach 1.2e\\+04"),
        (([0, 12000], 8000), "dtype int64"),
        ((["a"], 8000), "dtype"),
        ((np.zeros((40, 100)), 8000), r"\(40, 100\) is no waveform"),
        ((np.zeros((2, 3, 4)), 8000), "no waveform"),
        (7, "cannot read audio from int"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # a sound's bytes hold the time
)
def test_bad_audio_says_why(value, reason):
    with pytest.raises(ValueError, match=reason):
        decode_audio(value, 8000)


def test_target_rate_is_checked():
    with pytest.raises(ValueError, match="sampling rate"):
        decode_audio((tone(440, 8000), 8000), 0)
