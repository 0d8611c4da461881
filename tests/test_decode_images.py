"""Raw pictures of every form: the same picture comes out, or an error that says why not."""

import io
import random
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from mmcl.decode import decode_image

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
