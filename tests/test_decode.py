"""Texts, missing values, and errors that name the row."""

import pickle

import numpy as np
import pytest

from mmcl.decode import RowError, decode_audio, decode_image, decode_rows, decode_text

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
