"""Raw images, sounds and texts of every form: the same picture or sound comes out, or an error that says why not."""

import io
import pickle
import random
import warnings

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from mmcl.decode import RowError, decode_audio, decode_image, decode_rows, decode_text, resample

RED, WHITE = (255, 0, 0), (255, 255, 255)


def gradient() -> np.ndarray:
    """(4, 6) uint8, all different."""
    return (np.arange(24, dtype=np.uint8) * 10).reshape(4, 6)


def file_bytes(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def colours(value) -> np.ndarray:
    image = decode_image(value)
    assert image.mode == "RGB"
    return np.asarray(image)


def tone(frequency: float, rate: int, seconds: float = 0.5, level: float = 0.5) -> np.ndarray:
    return (level * np.sin(2 * np.pi * frequency * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def wav_bytes(samples: np.ndarray, rate: int = 8000, kind: str = "WAV", subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


# Images


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"]
)
def test_every_8_bit_mode_keeps_an_opaque_picture(mode):
    black_and_white = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8))
    image = black_and_white.convert("RGBA" if mode == "RGBa" else "LA" if mode == "La" else "RGB").convert(mode)
    np.testing.assert_allclose(colours(image)[:, :, 1], [[0, 255], [255, 0]], atol=2)


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I;16L", "I"])
def test_16_bits_are_scaled_rather_than_clipped(mode):
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), 65535)
    image.putpixel((1, 0), 32768)
    np.testing.assert_array_equal(colours(image), [[[255] * 3, [128] * 3]])


def test_16_bit_png_file_is_scaled():
    data = file_bytes(Image.fromarray(np.array([[0, 257, 25700, 65535]], np.uint16)))
    np.testing.assert_array_equal(colours(data)[0, :, 0], [0, 1, 100, 255])


def test_mode_f_holds_unit_range_or_byte_range():
    unit = Image.fromarray(np.array([[0.0, 0.4, 1.0]], np.float32))
    np.testing.assert_array_equal(colours(unit)[0, :, 0], [0, 102, 255])
    np.testing.assert_array_equal(colours(Image.fromarray(gradient()).convert("F"))[:, :, 0], gradient())


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_is_composited_on_white(mode):
    clear = Image.new("RGBA", (3, 3), (0, 0, 0, 0)).convert(mode)
    assert (colours(clear) == 255).all()


def test_half_transparent_red_is_pink():
    np.testing.assert_array_equal(colours(Image.new("RGBA", (1, 1), (255, 0, 0, 128)))[0, 0], [255, 127, 127])


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
def test_png_transparent_colour_is_composited_on_white(mode):
    image = Image.new("RGB", (2, 1), "black")
    image.putpixel((1, 0), WHITE if mode in "L1" else RED)
    image = image.convert(mode)
    key = image.getpixel((0, 0))
    decoded = colours(file_bytes(image, transparency=key))
    assert tuple(decoded[0, 0]) == WHITE
    assert tuple(decoded[0, 1]) == (WHITE if mode in "L1" else RED)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation):
    upright = gradient()
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: np.rot90(upright),
        7: upright[::-1, ::-1].T,
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_bytes(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    np.testing.assert_array_equal(colours(data)[:, :, 0], upright)
    np.testing.assert_array_equal(colours(Image.open(io.BytesIO(data)))[:, :, 0], upright)


def test_arrays_of_every_type_agree():
    grey = gradient()
    wanted = np.repeat(grey[:, :, None], 3, axis=2)
    rgba = np.concatenate([wanted, np.full((4, 6, 1), 255, np.uint8)], axis=2)
    forms = [grey, grey[:, :, None], wanted, rgba, grey.astype(np.uint16) * 257, grey.astype(">u2") * np.uint16(257)]
    forms += [(grey / 255).astype(kind) for kind in (np.float32, np.float64)]
    forms += [np.asfortranarray(wanted), np.repeat(grey, 2, axis=1)[:, ::2]]
    for form in forms:
        np.testing.assert_array_equal(colours(form), wanted)
    np.testing.assert_allclose(colours((grey / 255).astype(np.float16)), wanted, atol=1)
    np.testing.assert_array_equal(colours(np.array([[True, False]]))[0, :, 0], [255, 0])


def test_tensors_are_channels_first():
    wanted = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
    tensor = torch.from_numpy(wanted).permute(2, 0, 1)
    np.testing.assert_array_equal(colours(tensor), wanted)
    np.testing.assert_array_equal(colours((tensor / 255).requires_grad_()), wanted)
    np.testing.assert_array_equal(colours(tensor[0]), colours(tensor[:1]))
    assert decode_image((tensor / 255).bfloat16()).size == (5, 4)


def test_files_bytes_and_datasets_dicts_agree(tmp_path):
    data = file_bytes(Image.fromarray(gradient()))
    path = tmp_path / "a.png"
    path.write_bytes(data)
    forms = [data, bytearray(data), memoryview(data), str(path), path]
    forms += [{"bytes": data, "path": None}, {"bytes": None, "path": str(path)}, {"bytes": data, "path": "gone.png"}]
    for form in forms:
        np.testing.assert_array_equal(colours(form)[:, :, 0], gradient())


def test_the_callers_image_and_array_stay_as_they_were():
    image, array = Image.new("RGBA", (2, 2), (9, 8, 7, 6)), np.full((2, 2, 4), 7, np.uint8)
    decode_image(image), decode_image(array)
    assert image.mode == "RGBA"
    assert image.getpixel((0, 0)) == (9, 8, 7, 6)
    assert (array == 7).all()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, r"image is missing \(None\)"),
        (float("nan"), "image is missing"),
        (b"", "0 bytes"),
        (b"not a picture", "not an image file"),
        ({"bytes": None, "path": None}, "missing"),
        ({"pixels": 3}, 'expected a dict with "bytes" or "path", got the keys \\[\'pixels\'\\]'),
        ("no/such/file.png", "file not found: 'no/such/file.png'"),
        ("a\0b", "file not found"),
        (3, "cannot read image from int 3"),
        ([[1, 2]], "cannot read image from list"),
        (np.zeros((0, 0), np.uint8), r"empty: array \(0, 0\)"),
        (Image.new("RGB", (0, 0)), "0 x 0 pixels"),
        (np.full((2, 2), np.nan), "NaN"),
        (np.full((2, 2), 200.0), r"from 200 to 200; they must lie in \[0, 1\]"),
        (np.zeros((2, 2), np.int64), "dtype int64"),
        (np.zeros((3, 8, 8), np.uint8), r"\(3, 8, 8\) is no image"),
        (np.zeros(5, np.uint8), "no image"),
        (np.zeros((2, 2), complex), "dtype complex128"),
        (torch.zeros(8, 8, 3), r"tensor \(8, 8, 3\) is no image"),
        (torch.tensor(1.0), "no image"),
        (Image.fromarray(np.array([[70000]], np.int32)), "16 bits"),
        (Image.fromarray(np.array([[np.nan]], np.float32)), "NaN"),
    ],
)
def test_bad_image_says_why(value, reason):
    with pytest.raises(ValueError, match=reason):
        decode_image(value)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [599, 400, 200])  # PIL itself warns up to twice its limit
def test_too_many_pixels_are_refused(monkeypatch, limit):
    image = Image.new("L", (30, 20))
    data = file_bytes(image)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    for value in (data, image):
        with pytest.raises(ValueError, match="too large"):
            decode_image(value)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 600)
    assert decode_image(data).size == (30, 20)


def test_bomb_warning_turned_error_is_still_a_value_error(monkeypatch):
    data = file_bytes(Image.new("L", (30, 20)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="too large"):
            decode_image(data)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA", "ICO"])
def test_damaged_file_decodes_or_is_a_value_error(kind):
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    data = file_bytes(Image.fromarray(pixels), kind)
    draw = random.Random(0)
    refused = 0
    for trial in range(60):
        damaged = bytearray(data[: draw.randrange(1, len(data))] if trial % 2 else data)
        for _ in range(trial % 5):
            damaged[draw.randrange(min(len(damaged), 200))] = draw.randrange(256)
        try:
            assert decode_image(bytes(damaged)).mode == "RGB"
        except ValueError:
            refused += 1
    assert refused > 5


# Audio


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
)
def test_bad_audio_says_why(value, reason):
    with pytest.raises(ValueError, match=reason):
        decode_audio(value, 8000)


def test_target_rate_is_checked():
    with pytest.raises(ValueError, match="sampling rate"):
        decode_audio((tone(440, 8000), 8000), 0)


# Text


def test_text_is_kept_as_it_is():
    for text in ("seven", " padded ", "日本語\n", np.str_("numpy")):
        assert decode_text(text) is text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, r"text is missing \(None\)"),
        (float("nan"), r"text is missing \(nan\)"),
        (b"seven", "expected a string, got bytes b'seven'"),
        (7, "expected a string, got int 7"),
        (["seven"], "expected a string, got list"),
        ("", "blank string ''"),
        (" \t\n", r"blank string ' \\t\\n'"),
        ("half \ud83d of a pair", "not valid Unicode: surrogates not allowed at position 5"),
    ],
)
def test_bad_text_says_what_was_got(value, reason):
    with pytest.raises(ValueError, match=reason):
        decode_text(value)


def test_pandas_missing_values_are_missing():
    pandas = pytest.importorskip("pandas")
    for value in (pandas.NA, pandas.NaT, np.float64("nan")):
        for decode in (decode_text, decode_image, lambda v: decode_audio(v, 8000)):
            with pytest.raises(ValueError, match="missing"):
                decode(value)


# Rows


def test_first_bad_row_is_named():
    with pytest.raises(RowError) as caught:
        decode_rows(["a", None, 3], decode_text)
    assert caught.value.row == 1
    assert caught.value.reason == "text is missing (None)"
    assert str(caught.value) == "row 1: text is missing (None)"


def test_good_rows_keep_their_order():
    assert decode_rows(iter(["b", "a"]), decode_text) == ["b", "a"]
    assert decode_rows([], decode_text) == []


def test_other_errors_pass_unchanged():
    with pytest.raises(ZeroDivisionError):
        decode_rows([1], lambda value: value / 0)


def test_row_error_survives_pickling():
    error = pickle.loads(pickle.dumps(RowError(3, "bad")))
    assert (error.row, error.reason, str(error)) == (3, "bad", "row 3: bad")
