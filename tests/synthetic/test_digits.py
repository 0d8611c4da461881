"""Handwritten x spoken digits: what is tested was never trained on, and no pair of modalities tells anything."""

import io
import time
import wave

import numpy as np
import pytest
from PIL import Image
from scipy.stats import chi2

from mmcl.decode import decode_audio, decode_image, decode_text
from mmcl.synthetic import digits
from mmcl.synthetic.digits import DigitWorld, digit_tuples, digit_world
from mmcl.synthetic.speech import VOICES, WORDS

pytest.importorskip("espeakng_loader")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMCL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def world(cache) -> DigitWorld:
    return digit_world(takes=1)


@pytest.fixture(scope="module")
def train(world):
    return digit_tuples(world, "train", 20_000)


def numbers(dataset, column: str) -> np.ndarray:
    return np.asarray(dataset.with_format("arrow")[:][column])


def words(dataset) -> np.ndarray:
    return np.array([WORDS.index(text) for text in dataset["text"]])


# The world


def test_world_holds_every_digit_as_picture_and_clip(world):
    assert world.images.shape == (1797, 8, 8)
    assert world.images.max() == 255
    assert len(world.clips) == 150
    assert np.bincount(world.clip_digits).tolist() == [15] * 10
    assert set(world.clip_voices) == set(VOICES)


def test_a_quarter_of_each_digits_images_is_for_testing(world):
    share = np.bincount(world.image_digits, world.image_is_test) / np.bincount(world.image_digits)
    np.testing.assert_allclose(share, 0.25, atol=0.003)


@pytest.mark.parametrize("seed", range(5))
def test_three_whole_voices_are_for_testing_and_their_accents_are_trained_on(cache, seed):
    world = digit_world(seed, takes=1)
    tested, trained = (set(world.clip_voices[world.clip_is_test == part]) for part in (True, False))
    assert len(tested) == 3
    assert len(trained) == 12
    assert not tested & trained
    accents = {voice.partition("+")[0] for voice in tested}
    assert len(accents) == 3
    assert accents <= {voice.partition("+")[0] for voice in trained}


def test_seed_decides_both_splits(cache, world):
    again, other = digit_world(0, takes=1), digit_world(1, takes=1)
    np.testing.assert_array_equal(again.image_is_test, world.image_is_test)
    np.testing.assert_array_equal(again.clip_is_test, world.clip_is_test)
    assert (other.image_is_test != world.image_is_test).any()
    assert (other.clip_is_test != world.clip_is_test).any()
    assert other.clips == world.clips


def test_clips_are_16_bit_mono_wav(world):
    with wave.open(io.BytesIO(world.clips[7])) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 8000)
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
    np.testing.assert_allclose(decode_audio(world.clips[7], 8000), samples / 32768, atol=1e-6)
    assert np.abs(samples).max() == 32767


# The tuples


def test_rows_hold_the_picture_and_the_clip_that_their_ids_name(world, train):
    for row in train.select(range(20)):
        assert np.array_equal(np.asarray(row["image"]), world.images[row["image_id"]])
        assert row["audio"] == {"bytes": world.clips[row["clip_id"]], "path": None}
        assert row["image_digit"] == world.image_digits[row["image_id"]]
        assert row["audio_digit"] == world.clip_digits[row["clip_id"]]
        assert row["voice"] == world.clip_voices[row["clip_id"]]


def test_text_is_the_word_of_the_sum_or_of_the_image(world, train):
    image, audio = numbers(train, "image_digit"), numbers(train, "audio_digit")
    np.testing.assert_array_equal(words(train), (image + audio) % 10)
    control = digit_tuples(world, "train", 500, text="image")
    np.testing.assert_array_equal(words(control), numbers(control, "image_digit"))


def test_parts_share_neither_image_nor_voice(world, train):
    test = digit_tuples(world, "test", 5000)
    for column in ("image_id", "clip_id"):
        assert not set(numbers(train, column)) & set(numbers(test, column))
    assert not set(train["voice"]) & set(test["voice"])
    assert len(set(numbers(test, "image_id"))) == world.image_is_test.sum()  # and 5000 rows meet all of them
    assert len(set(numbers(test, "clip_id"))) == world.clip_is_test.sum()


def test_every_pair_of_modalities_is_independent(train):
    image, audio, text = numbers(train, "image_digit"), numbers(train, "audio_digit"), words(train)
    for first, second in ((image, audio), (image, text), (audio, text)):
        counts = np.zeros((10, 10))
        np.add.at(counts, (first, second), 1)
        expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / counts.sum()
        assert ((counts - expected) ** 2 / expected).sum() < chi2.ppf(0.9999, 81)


def test_digits_and_words_are_balanced(train):
    for values in (numbers(train, "image_digit"), numbers(train, "audio_digit"), words(train)):
        assert np.abs(np.bincount(values, minlength=10) / 2000 - 1).max() < 0.1


def test_same_seed_gives_same_rows_and_another_seed_others(world):
    first, again, other = (numbers(digit_tuples(world, "test", 100, seed), "image_id") for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_columns_are_what_encoders_decode(train):
    row = train[0]
    assert isinstance(row["image"], Image.Image)
    assert decode_image(row["image"]).size == (8, 8)
    assert 0.1 < len(decode_audio(row["audio"], 8000)) / 8000 < 1
    assert decode_text(row["text"]) in WORDS
    assert train.features["audio"].sampling_rate == 8000
    assert not train.features["audio"].decode


def test_dataset_survives_disk(world, tmp_path):
    import datasets

    before = digit_tuples(world, "test", 30)
    before.save_to_disk(tmp_path)
    after = datasets.load_from_disk(tmp_path)
    assert after.features == before.features
    assert after[29]["audio"] == before[29]["audio"]


def test_rows_across_chunks_stay_together(world, monkeypatch):
    whole = digit_tuples(world, "train", 1000)
    monkeypatch.setattr(digits, "ROWS_A_CHUNK", 300)
    chunked = digit_tuples(world, "train", 1000)
    assert [row["audio"] for row in chunked] == [row["audio"] for row in whole]
    assert np.array_equal(np.asarray(chunked[999]["image"]), world.images[whole[999]["image_id"]])


def test_many_rows_are_built_quickly(world):
    start = time.process_time()
    assert len(digit_tuples(world, "train", 20_000)) == 20_000
    assert time.process_time() - start < 5  # measured: 0.6 s


def test_no_rows_is_an_empty_dataset(world):
    empty = digit_tuples(world, "train", 0)
    assert len(empty) == 0
    assert "audio" in empty.column_names


def test_impossible_request_says_why(world):
    with pytest.raises(KeyError, match=r"unknown part 'validation'; choose from \['test', 'train'\]"):
        digit_tuples(world, "validation", 3)
    with pytest.raises(KeyError, match=r"unknown text 'product'; choose from \['image', 'sum'\]"):
        digit_tuples(world, "train", 3, text="product")
    with pytest.raises(ValueError, match="count must not be negative, got -1"):
        digit_tuples(world, "train", -1)
