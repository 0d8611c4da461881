"""Synthetic speech: the same samples for the same request, voices that differ, a cache that can be broken."""

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from mmcl.synthetic import speech
from mmcl.synthetic.speech import RATE, VOICES, WORDS, spoken_digits, synthesize

pytest.importorskip("espeakng_loader")


@pytest.fixture(scope="module")
def spoken():
    return spoken_digits(takes=2, cache=False)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMCL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(speech, "VOICES", VOICES[:2])  # fewer, to be quick
    return tmp_path / "cache"


def same(first, second) -> bool:
    return (
        all(np.array_equal(a, b) for a, b in zip(first.clips, second.clips, strict=True))
        and np.array_equal(first.digits, second.digits)
        and np.array_equal(first.voices, second.voices)
    )


# One utterance


def test_speech_is_loud_finite_and_as_long_as_a_word():
    waveform = synthesize("seven")
    assert waveform.dtype == np.float32
    assert 0.3 < len(waveform) / 22050 < 1.0
    assert 0.2 < np.abs(waveform).max() <= 1


def test_same_request_gives_same_samples_whatever_was_said_between():
    first = synthesize("seven", "en-gb+f2", 160, 40)
    synthesize("a longer sentence, in another voice", "en-us+m3", 300, 80)
    np.testing.assert_array_equal(synthesize("seven", "en-gb+f2", 160, 40), first)


def test_another_process_gives_the_same_samples():
    code = "from mmcl.synthetic.speech import synthesize; print(synthesize('seven', 'en-029+m4').tobytes().hex())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert bytes.fromhex(said) == synthesize("seven", "en-029+m4").tobytes()


def test_faster_speech_is_shorter():
    slow, normal, fast = (len(synthesize("seventy seven", speed=speed)) for speed in (100, 175, 300))
    assert slow > 1.3 * normal > 1.6 * fast


def test_higher_pitch_raises_the_fundamental():
    def fundamental(pitch: int) -> float:
        middle = synthesize("aaah", pitch=pitch, sampling_rate=8000)[1000:2600]
        correlation = np.correlate(middle, middle, "full")[len(middle) - 1 :]
        return 8000 / (20 + correlation[20:200].argmax())

    assert fundamental(90) > 1.3 * fundamental(10)


def test_sampling_rate_changes_the_length_and_not_the_duration():
    assert len(synthesize("two", sampling_rate=8000)) / 8000 == pytest.approx(len(synthesize("two")) / 22050, abs=0.001)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"text": " "}, "blank"),
        ({"text": None}, "missing"),
        ({"voice": "gibberish"}, "unknown voice 'gibberish'; choose from"),
        ({"voice": "en-us+f99"}, "unknown variant 'f99' of voice 'en-us\\+f99'"),
        ({"voice": "en-us+"}, "unknown variant ''"),
        ({"speed": 10}, "speed must lie in 80 to 450, got 10"),
        ({"pitch": 100}, "pitch must lie in 0 to 99, got 100"),
        ({"sampling_rate": 0}, "sampling_rate"),
    ],
)
def test_impossible_request_says_why(options, reason):
    with pytest.raises(ValueError, match=reason):
        synthesize(**{"text": "seven", **options})


def test_missing_package_says_what_to_install(monkeypatch, cache):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    speech._short_data_path.cache_clear()
    for speak in (lambda: synthesize("seven"), lambda: spoken_digits(takes=1)):
        with pytest.raises(ImportError, match=r"pip install 'mmcl\[demo\]'"):
            speak()


def test_text_that_has_no_sound_is_silence():
    assert np.abs(synthesize("...")).sum() == 0


def test_installation_under_a_long_path_speaks(tmp_path, monkeypatch):
    import espeakng_loader

    wanted = synthesize("seven")
    folder = tmp_path / ("long" * 40)
    folder.symlink_to(Path(espeakng_loader.get_data_path()).parent, target_is_directory=True)
    monkeypatch.setattr(espeakng_loader, "get_data_path", lambda: str(folder / "espeak-ng-data"))
    speech._short_data_path.cache_clear()
    np.testing.assert_array_equal(synthesize("seven"), wanted)
    speech._short_data_path.cache_clear()


# All digits


def test_every_word_in_every_voice_and_take(spoken):
    assert len(VOICES) == 15
    assert len(spoken.clips) == len(WORDS) * len(VOICES) * 2
    pairs = list(zip(spoken.digits.tolist(), spoken.voices.tolist(), strict=True))
    assert {pairs.count(pair) for pair in set(pairs)} == {2}
    assert len(set(pairs)) == 150


def test_clips_are_trimmed_full_scale_and_short(spoken):
    for clip in spoken.clips:
        loudness = np.abs(clip.astype(int))
        assert clip.dtype == np.int16
        assert loudness.max() == 32767
        assert min(loudness[0], loudness[-1]) > 300
        assert 0.15 * RATE < len(clip) < RATE


def spectra(clips) -> np.ndarray:
    """Unit rows: how much of each of 64 frequencies a clip holds."""
    rows = np.array([np.sqrt(np.abs(np.fft.rfft(clip, 16384)[:8192]).reshape(64, -1).mean(1)) for clip in clips])
    rows -= rows.mean(0)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_voices_can_be_told_apart(spoken):
    """Two takes of one voice sound more alike than two voices do, for every pair of voices, over the ten words."""
    rows = spectra(spoken.clips).reshape(10, 15, 2, 64)
    likeness = np.einsum("wate,wbte->ab", rows[:, :, :1], rows[:, :, 1:]) / 10
    for first, second in combinations(range(15), 2):
        within, between = likeness[first, first] + likeness[second, second], likeness[first, second] * 2
        assert within > between, (VOICES[first], VOICES[second])


def test_accents_of_two_or_more_voices():
    accents = [voice.partition("+")[0] for voice in VOICES]
    assert len(set(VOICES)) == 15
    assert min(accents.count(accent) for accent in accents) >= 2


def test_seed_decides_the_takes(monkeypatch):
    monkeypatch.setattr(speech, "VOICES", VOICES[:2])
    first, again, other = (spoken_digits(seed=seed, takes=1, cache=False) for seed in (0, 0, 1))
    assert same(first, again)
    assert sum(np.array_equal(a, b) for a, b in zip(first.clips, other.clips, strict=True)) <= 2


def test_takes_must_be_positive():
    with pytest.raises(ValueError, match="takes must be at least 1, got 0"):
        spoken_digits(takes=0)


# The cache


def test_cached_clips_are_the_synthesised_ones(cache, monkeypatch):
    first = spoken_digits(takes=1)
    assert [path.suffix for path in cache.iterdir()] == [".npz"]
    monkeypatch.setattr(speech, "_synthesize_digits", None)  # reading must not need it
    assert same(first, spoken_digits(takes=1))


def test_every_setting_has_a_file_of_its_own(cache, spoken, monkeypatch):
    monkeypatch.setattr(speech, "_synthesize_digits", lambda seed, takes: spoken)
    spoken_digits(takes=1), spoken_digits(takes=2), spoken_digits(seed=1, takes=1)
    monkeypatch.setattr(speech, "SPEEDS", (100, 300))
    spoken_digits(takes=1)
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "text", "other"])
def test_broken_cache_file_is_rebuilt_with_a_warning(cache, damage):
    first = spoken_digits(takes=1)
    (path,) = cache.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "other":
        np.savez(path, something=np.zeros(3))
    else:
        data[len(data) // 2] ^= 255
        path.write_bytes({"empty": b"", "short": data[:-100], "flipped": data, "text": b"not an archive"}[damage])
    with pytest.warns(UserWarning, match=f"rebuilding .*{path.name}"):
        assert same(first, spoken_digits(takes=1))
    assert same(first, spoken_digits(takes=1))


def test_interrupted_write_leaves_nothing(cache, monkeypatch, spoken):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(speech, "_synthesize_digits", lambda seed, takes: spoken)
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        spoken_digits(takes=2)
    assert list(cache.iterdir()) == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MMCL_CACHE", str(tmp_path))
    assert speech._cache_folder() == tmp_path
    monkeypatch.delenv("MMCL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert speech._cache_folder() == tmp_path / "mmcl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert speech._cache_folder() == Path.home() / ".cache" / "mmcl"


def test_without_cache_nothing_is_written(cache):
    spoken_digits(takes=1, cache=False)
    assert not cache.exists()
