"""What a score takes: any float rows, untouched; and errors that name the modality, the names or the shapes."""

import copy

import numpy as np
import pytest
import torch

from mmcl.scores import Hadamard, SumOfPairs

DIM = 4
NAMES = ("image", "audio", "text")
N = 6


@pytest.fixture(scope="module")
def arrays(unit_embeddings):
    return {name: rows.numpy() for name, rows in unit_embeddings(3, N, DIM).items()}


def read_only(rows):
    rows = rows.copy()
    rows.flags.writeable = False
    return rows


def record_field(rows):
    """A column of a packed record array: its stride is not a multiple of 4 bytes."""
    records = np.zeros(len(rows), dtype=[("flag", "i1"), ("rows", "f4", (DIM,))])
    records["rows"] = rows
    return records["rows"]


LAYOUTS = {
    "list": lambda rows: rows.tolist(),
    "read_only": read_only,
    "fortran": np.asfortranarray,
    "row_stride": lambda rows: np.repeat(rows, 2, axis=0)[::2],
    "column_stride": lambda rows: np.repeat(rows, 3, axis=1)[:, ::3],
    "negative_rows": lambda rows: rows[::-1].copy()[::-1],
    "negative_columns": lambda rows: rows[:, ::-1].copy()[:, ::-1],
    "big_endian": lambda rows: rows.astype(">f4"),
    "little_endian": lambda rows: rows.astype("<f4"),
    "big_endian_double": lambda rows: rows.astype(">f8"),
    "record_field": record_field,
    "double": lambda rows: rows.astype(np.float64),
    "torch": torch.from_numpy,
    "torch_strided": lambda rows: torch.from_numpy(rows.repeat(2, axis=1))[:, ::2],
    "torch_expanded": lambda rows: torch.from_numpy(rows).unsqueeze(0).expand(2, N, DIM)[1],
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_layout_gives_the_same_score_and_is_left_alone(layout, arrays, make_score):
    score = make_score("pairs_and_hadamard", 3, DIM)
    values = {name: LAYOUTS[layout](rows) for name, rows in arrays.items()}
    copies = {name: copy.deepcopy(rows) for name, rows in values.items()}
    torch.testing.assert_close(score(values).float(), score(arrays), rtol=1e-6, atol=1e-6)
    score.query_vectors({"image": values["image"]})
    score.item_vectors({"audio": values["audio"], "text": values["text"]})
    assert all(np.array_equal(np.asarray(values[name]), np.asarray(copies[name])) for name in NAMES)


@pytest.mark.parametrize("layout", ["double", "big_endian_double"])
def test_double_precision_input_is_not_rounded(layout, arrays, make_score):
    score = make_score("hadamard", 3, DIM)
    values = {name: LAYOUTS[layout](rows) for name, rows in arrays.items()}
    assert score(values).dtype == torch.float64


@pytest.mark.parametrize("other", [np.float64, np.float16])
def test_modalities_may_come_in_different_precision(kind, other, arrays, make_score):
    score = make_score(kind, 3, DIM)
    mixed = {**arrays, "audio": arrays["audio"].astype(other)}
    torch.testing.assert_close(score(mixed).float(), score(arrays), rtol=0, atol=1e-2)
    query, item = score.query_vectors({"audio": mixed["audio"]}), score.item_vectors({"text": mixed["text"]})
    expected = score.query_vectors({"audio": arrays["audio"]}) @ score.item_vectors({"text": arrays["text"]}).T
    torch.testing.assert_close((query @ item.to(query.dtype).T).float(), expected, rtol=0, atol=1e-2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mask", [read_only, lambda mask: mask[::-1].copy()[::-1], lambda mask: mask.repeat(2)[::2]])
def test_masks_in_any_layout(mask, arrays, make_score):
    score, present = make_score("neutral", 3, DIM), np.arange(N) % 2 == 0
    expected = score(arrays, present={"text": present.tolist()})
    assert torch.equal(score(arrays, present={"text": mask(present)}), expected)


def test_order_of_the_dict_does_not_matter(kind, arrays, make_score):
    score = make_score(kind, 3, DIM)
    torch.testing.assert_close(score(dict(reversed(arrays.items()))), score(arrays))


def test_no_rows_give_no_scores(kind, arrays, make_score):
    score = make_score(kind, 3, DIM)
    assert score({name: rows[:0] for name, rows in arrays.items()}).shape == (0,)
    assert score.query_vectors({"image": arrays["image"][:0]}).shape == (0, score.width)


@pytest.mark.parametrize("build", [SumOfPairs, Hadamard])
@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("image",), ValueError, "at least two.*'image'"),
        ((), ValueError, "at least two"),
        ("image", TypeError, "'image'"),
        (("image", "text", "image"), ValueError, r"distinct.*'image', 'text', 'image'"),
        (("image", ""), ValueError, "non-empty"),
        (("image", 3), ValueError, "3"),
    ],
)
def test_names_of_modalities_are_checked(build, names, error, message):
    with pytest.raises(error, match=message):
        build(names, DIM)


@pytest.mark.parametrize("dim", [0, -1, 2.0, True, "8"])
def test_dim_must_be_a_positive_integer(dim):
    with pytest.raises((ValueError, TypeError), match="dim"):
        SumOfPairs(NAMES, dim)


def test_sums_need_the_same_modalities_and_dim():
    with pytest.raises(ValueError, match=r"'text'"):
        SumOfPairs(NAMES, DIM) + Hadamard(("image", "audio"), DIM)
    with pytest.raises(ValueError, match=r"4.*5"):
        SumOfPairs(NAMES, DIM) + Hadamard(NAMES, 5)
    with pytest.raises(TypeError):
        SumOfPairs(NAMES, DIM) + 1.0


LISTED = r"\['image', 'audio', 'text'\]"
CALLS = {
    "missing": (lambda s, e: s({"image": e["image"]}), KeyError, rf"'audio', 'text'.*{LISTED}"),
    "extra": (lambda s, e: s({**e, "touch": e["text"]}), KeyError, rf"'touch'.*{LISTED}"),
    "none": (lambda s, e: s({}), (KeyError, ValueError), LISTED),
    "width": (lambda s, e: s({**e, "text": e["text"][:, :3]}), ValueError, r"text.*4.*\(6, 3\)"),
    "rows": (lambda s, e: s({**e, "text": e["text"][:5]}), ValueError, "image has 6.*text has 5"),
    "1-D": (lambda s, e: s({**e, "text": e["text"][0]}), ValueError, r"text.*\(n, 4\).*\(4,\)"),
    "3-D": (lambda s, e: s({**e, "text": e["text"][None]}), ValueError, r"text.*\(1, 6, 4\)"),
    "strings": (lambda s, e: s({**e, "text": ["a"] * N}), ValueError, "text"),
    "ragged": (lambda s, e: s({**e, "text": [[1.0], [1.0, 2.0]]}), ValueError, "."),
    "query of all": (lambda s, e: s.query_vectors(e), ValueError, "all the modalities"),
    "item of all": (lambda s, e: s.item_vectors(e), ValueError, "all the modalities"),
    "query of none": (lambda s, e: s.query_vectors({}), ValueError, LISTED),
    "item of none": (lambda s, e: s.item_vectors({}), ValueError, LISTED),
    "query unknown": (lambda s, e: s.query_vectors({"touch": e["text"]}), KeyError, rf"'touch'.*{LISTED}"),
    "item unknown": (lambda s, e: s.item_vectors({"touch": e["text"]}), KeyError, rf"'touch'.*{LISTED}"),
    "query width": (lambda s, e: s.query_vectors({"text": e["text"][:, 1:]}), ValueError, r"text.*4.*\(6, 3\)"),
    "absent unknown": (lambda s, e: s.query_vectors({"text": e["text"]}, absent=["touch"]), KeyError, "'touch'"),
    "absent and given": (lambda s, e: s.query_vectors({"text": e["text"]}, absent=["text"]), ValueError, "'text'"),
    "nothing left": (
        lambda s, e: s.query_vectors({"text": e["text"]}, absent=["image", "audio"]),
        ValueError,
        "all the modalities",
    ),
    "mask unknown": (lambda s, e: s(e, present={"touch": [True] * N}), KeyError, rf"'touch'.*{LISTED}"),
    "mask length": (lambda s, e: s(e, present={"text": [True] * 5}), ValueError, r"text.*\(6,\).*\(5,\)"),
    "mask shape": (lambda s, e: s(e, present={"text": [[True]] * N}), ValueError, r"text.*\(6, 1\)"),
    "mask dtype": (lambda s, e: s(e, present={"text": [1] * N}), ValueError, r"text.*bool.*int64"),
}


@pytest.mark.parametrize("case", CALLS)
def test_bad_calls_are_refused_by_name(kind, case, arrays, make_score):
    call, error, message = CALLS[case]
    if (kind, case) == ("neutral", "missing"):
        assert call(make_score(kind, 3, DIM), arrays).shape == (N,)  # its neutral vectors stand in
        return
    with pytest.raises(error, match=message):
        call(make_score(kind, 3, DIM), arrays)


@pytest.mark.parametrize("kind", ["hadamard", "tied", "pairs_and_hadamard"])
def test_hadamard_without_neutral_names_the_absent_modality(kind, arrays, make_score):
    score = make_score(kind, 3, DIM)
    with pytest.raises(KeyError, match=r"'audio'.*neutral"):
        score.query_vectors({"image": arrays["image"]}, absent=("audio",))
    with pytest.raises(KeyError, match=r"'text'.*neutral"):
        score(arrays, present={"text": [True] * 5 + [False]})
    everywhere = score(arrays, present={"text": [True] * N})
    assert torch.equal(everywhere, score(arrays)), "a mask that hides nothing needs no neutral vector"
