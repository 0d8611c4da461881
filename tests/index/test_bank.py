"""The bank's coordinate: exact on finite joints, stable, blockwise equal to dense, and what an index ranks by."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from mmcl.index import TupleIndex
from mmcl.index import bank as bank_module
from mmcl.index.bank import balance, bank_vectors, query_with_bank, random_embeddings, with_bank
from mmcl.index.fusion import Fusion
from mmcl.index.store import read_manifest, write_manifest
from mmcl.metrics import hubness_skew
from mmcl.synthetic.joints import JOINTS

ROOT = Path(__file__).parents[2]


def dense(vectors, bank):
    """All scores at once, in float64."""
    scores = np.asarray(vectors, np.float64) @ np.asarray(bank, np.float64).T
    return math.log(len(bank)) - logsumexp(scores, axis=1)


def test_coordinate_by_hand():
    items = np.array([[math.log(2), 0], [math.log(4), math.log(8)]], np.float32)
    found = with_bank(items, [[1, 0], [0, 1]])
    np.testing.assert_allclose(found, [[*items[0], -math.log(1.5)], [*items[1], -math.log(6)]], rtol=1e-6)
    asked = query_with_bank([[1, 0]])
    assert asked.tolist() == [[1, 0, 1]] and asked.dtype == found.dtype == np.float32
    np.testing.assert_allclose(asked @ found.T, [[math.log(2 / 1.5), math.log(4 / 6)]], rtol=1e-6)


def lookup_vectors(joint, queried):
    """(query vectors, item vectors) whose inner products are the joint's own log ratio: one-hot rows, its columns."""
    axes = [joint.modalities.index(name) for name in queried]
    rest = [axis for axis in range(joint.table.ndim) if axis not in axes]
    table = joint.log_ratio().permute(*axes, *rest).flatten(0, len(axes) - 1).flatten(1)
    return np.eye(len(table), dtype=np.float32), table.T.float().numpy()


@pytest.mark.parametrize("name", ["random_tensor", "random_pairwise", "coherent_pairs", "softened_sum"])
def test_a_bank_of_the_query_distribution_gives_the_exact_answer(name):
    joint = JOINTS[name]()
    # the query's probabilities as counts in a bank: exact for the joint that has just these
    counts = (joint.marginal("x1") * 4000).round().clamp(min=1)
    conditional = joint.table / joint.marginal("x1")[:, None, None]
    joint = replace(joint, table=conditional * (counts / counts.sum())[:, None, None])
    queries, items = lookup_vectors(joint, ("x1",))
    bank = np.repeat(queries, counts.long().numpy(), axis=0)
    found = query_with_bank(queries) @ with_bank(items, bank).T
    exact = (joint.conditional("x1") / joint.marginal("x1")[:, None, None]).log().flatten(1).numpy()
    np.testing.assert_allclose(found, exact, atol=2e-5)
    assert np.abs(queries @ items.T - exact).max() > 1e-3 or name == "softened_sum", "the score alone is not the answer"


def test_the_constant_of_the_score_cancels():
    queries, items = lookup_vectors(JOINTS["random_tensor"](), ("x1",))
    shifted = np.concatenate([items, np.full((64, 1), 3.7, np.float32)], axis=1)
    ones = np.concatenate([queries, np.ones((8, 1), np.float32)], axis=1)
    np.testing.assert_allclose(with_bank(shifted, ones)[:, -1] + 3.7, with_bank(items, queries)[:, -1], atol=1e-5)


def test_several_query_modalities_need_the_product_of_their_marginals():
    joint = JOINTS["random_tensor"](n=4, m=4)
    queried = ("x1", "x2")
    queries, items = lookup_vectors(joint, queried)
    product = torch.outer(*(joint.marginal(name) for name in queried)).flatten()
    conditional = (joint.table / joint.marginal(("x3", "x4"))).flatten(0, 1).flatten(1)
    exact = (conditional / product[:, None]).log().numpy()
    weighted = {
        "product": product.numpy(),
        "joint": joint.marginal(queried).flatten().numpy(),
    }
    error = {}
    for kind, weights in weighted.items():
        bank = np.repeat(queries, np.round(weights * 20_000).astype(int), axis=0)
        found = query_with_bank(queries) @ with_bank(items, bank).T
        error[kind] = np.abs(found - exact).max()
    assert error["product"] < 5e-3 < 0.1 < error["joint"]


def test_a_bank_of_several_modalities_is_shuffled_apart(make_score, unit_rows):
    score = make_score("hadamard", 3, 8)
    audio, text = unit_rows(50, 8, seed=1), unit_rows(50, 8, seed=2)
    found = bank_vectors(score, {"audio": audio, "text": text})
    pairs = (score.w * audio[:, None] * text[None]).detach().flatten(0, 1).numpy()  # every pairing
    place = np.abs(found[:, None] - pairs[None]).max(axis=2).argmin(axis=1)
    np.testing.assert_allclose(found, pairs[place], atol=1e-6)
    assert sorted(place // 50) == sorted(place % 50) == list(range(50)), "each row stands once"
    assert (place // 50 == place % 50).sum() < 8, "and hardly any with its own partner"
    np.testing.assert_array_equal(found, bank_vectors(score, {"text": text, "audio": audio}), "in any order of names")
    assert not np.array_equal(found, bank_vectors(score, {"audio": audio, "text": text}, seed=1))


def test_bank_rows_are_query_vectors(kind, make_score, unit_rows):
    score, rows = make_score(kind, 3, 8), unit_rows(6, 8)
    found = bank_vectors(score, {"text": rows.half()})
    assert found.dtype == np.float32
    expected = score.query_vectors({"text": rows.half()}).detach().numpy()
    np.testing.assert_array_equal(found, expected)


def test_absent_modalities_go_into_the_bank_as_into_a_query(forgiving_kind, make_score, unit_rows):
    score, rows = make_score(forgiving_kind, 4, 8), unit_rows(6, 8)
    expected = score.query_vectors({"text": rows}, absent=("touch",)).detach().numpy()
    np.testing.assert_array_equal(bank_vectors(score, {"text": rows}, ("touch",)), expected)


@pytest.mark.parametrize("largest", [1e-3, 1.0, 30.0, 1e3])
def test_coordinate_is_stable_at_any_size_of_score(largest):
    generator = np.random.default_rng(0)
    items, bank = generator.standard_normal((40, 6)), generator.standard_normal((70, 6))
    items = (items * largest / np.abs(items @ bank.T).max()).astype(np.float32)
    bank = bank.astype(np.float32)
    found = with_bank(items, bank)[:, -1]
    assert np.isfinite(found).all()
    # what float32 allows the scores themselves, and a little for the sum
    np.testing.assert_allclose(
        found, dense(items, bank), atol=1e-5 * (np.abs(items) @ np.abs(bank.T)).max() / 10 + 1e-6
    )


@pytest.mark.parametrize("blocks", [(1, 1), (7, 5), (16, 64), (1000, 1000)])
def test_blockwise_equals_dense(monkeypatch, blocks):
    monkeypatch.setattr(bank_module, "ITEM_BLOCK", blocks[0])
    monkeypatch.setattr(bank_module, "BANK_BLOCK", blocks[1])
    generator = np.random.default_rng(1)
    items, bank = generator.standard_normal((33, 4)), 3 * generator.standard_normal((64, 4))
    found = with_bank(items, bank)
    np.testing.assert_array_equal(found[:, :-1], items.astype(np.float32))
    np.testing.assert_allclose(found[:, -1], dense(items, bank), atol=1e-5)


@pytest.mark.parametrize("shape", [np.float16, np.float64, "torch", "bfloat16", "list", "strided", "readonly"])
def test_every_kind_of_array_is_taken_and_left_alone(shape):
    items, bank = np.arange(12.0).reshape(4, 3) / 8, np.arange(6.0).reshape(2, 3) / 4  # exact in half precision
    kinds = {
        "torch": torch.tensor,
        "bfloat16": lambda array: torch.tensor(array, dtype=torch.bfloat16),
        "list": np.ndarray.tolist,
        "strided": lambda array: np.repeat(array, 2, axis=0)[::2],
        "readonly": lambda array: np.asfortranarray(array),
    }
    convert = kinds.get(shape, lambda array: array.astype(shape))
    ours = [convert(items), convert(bank)]
    if shape == "readonly":
        for array in ours:
            array.flags.writeable = False
    found = with_bank(*ours)
    np.testing.assert_array_equal(found, with_bank(items, bank))
    for array, original in zip(ours, (items, bank)):
        values = array.double() if isinstance(array, torch.Tensor) else array
        np.testing.assert_array_equal(np.asarray(values, np.float64), original)
    np.testing.assert_allclose(found[:, -1], dense(items, bank), rtol=1e-6)


def test_no_items_give_no_rows():
    assert with_bank(np.zeros((0, 3)), np.ones((2, 3))).shape == (0, 4)
    assert query_with_bank(np.zeros((0, 3))).shape == (0, 4)


def test_a_vanished_product_is_an_item_that_says_nothing():
    assert with_bank([[0.0, 0.0]], [[5.0, 1.0], [-3.0, 2.0]]).tolist() == [[0, 0, 0]]


BAD = torch.eye(4)
BAD = torch.cat([BAD, torch.full((1, 4), math.nan)])


@pytest.mark.parametrize(
    ("bank", "error", "message"),
    [
        ({}, ValueError, "the bank is empty"),
        ({"text": np.zeros((0, 4))}, ValueError, r"bank of \['text'\] has no rows"),
        ({"text": BAD}, ValueError, "bank text: row 4 holds NaN"),
        ({"text": torch.zeros(2, 4)}, ValueError, "bank text: row 0 holds only zeros"),
        ({"text": BAD[:3, :3]}, ValueError, r"text: expected 4 columns.*\(3, 3\)"),
        ({"text": BAD[:3], "audio": BAD[:4]}, ValueError, "text has 3, audio has 4"),
        ({"smell": BAD[:4]}, KeyError, r"'smell'.*'image', 'audio', 'text'"),
        ({"image": BAD[:4], "audio": BAD[:4], "text": BAD[:4]}, ValueError, "all the modalities"),
        (BAD[:4], ValueError, "query modality.*Tensor"),
    ],
)
def test_bad_banks_are_refused_by_name(make_score, bank, error, message):
    with pytest.raises(error, match=message):
        bank_vectors(make_score("sum_of_pairs", 3, 4), bank)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: with_bank([[1.0, 2.0]], [[1.0]]), r"\(1, 2\).*\(1, 1\).*width"),
        (lambda: with_bank([[1.0]], np.zeros((0, 1))), "no rows"),
        (lambda: with_bank([[1.0], [math.nan]], [[1.0]]), "item vectors: row 1 is not finite"),
        (lambda: with_bank([[1.0]], [[1.0], [math.inf]]), "bank: row 1 is not finite"),
        (lambda: with_bank([[1.0], [3e38]], [[3e38]]), "coordinate: row 1 is not finite"),
        (lambda: query_with_bank([[math.nan]]), "query vectors: row 0"),
        (lambda: query_with_bank([1.0, 2.0]), r"\(2,\)"),
    ],
)
def test_bad_vectors_are_refused_by_row(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.fixture(scope="module")
def tables(unit_rows):
    """Items, queries and a bank of three modalities, with one item that fits every query."""
    rows = {name: unit_rows(60, 16, seed=seed).numpy() for seed, name in enumerate(("image", "audio", "text"))}
    return rows, {"text": unit_rows(300, 16, seed=9).numpy()}


def test_an_index_ranks_by_the_pure_functions(kind, make_score, tables):
    rows, bank = tables
    score = make_score(kind, 3, 16)
    items = {name: rows[name] for name in ("image", "audio")}
    hits = TupleIndex.build(score, items, bank=bank).search({"text": rows["text"]}, k=60)
    fused = with_bank(score.item_vectors(items).detach(), bank_vectors(score, bank))
    expected = query_with_bank(score.query_vectors({"text": rows["text"]}).detach()) @ fused.T
    assert hits.kind == "pmi"
    np.testing.assert_allclose(hits.scores, np.take_along_axis(expected, hits.ids, axis=1), atol=1e-5, rtol=1e-5)
    assert (np.diff(hits.scores, axis=1) <= 0).all()


@pytest.mark.parametrize("scale", [1 / 64, 0.25, 4.0])
def test_the_scale_of_the_coordinate_changes_no_score(scale, make_score, tables):
    """Items' vectors have it and queries' its inverse: powers of two, so to the last bit."""
    rows, bank = tables
    items = {name: rows[name] for name in ("image", "audio")}
    plain = replace(
        Fusion(make_score("hadamard", 3, 16), ("image", "audio")).with_bank(bank, None, True), bank_scale=1.0
    )
    scaled = replace(plain, bank_scale=scale)
    block = {name: torch.from_numpy(each) for name, each in items.items()}
    stored = [next(each.fused([(block, None)], [])) for each in (plain, scaled)]
    asked = [each.queries({"text": rows["text"]}, None, True) for each in (plain, scaled)]
    np.testing.assert_array_equal(stored[1][:, -1], scale * stored[0][:, -1])
    np.testing.assert_array_equal(asked[1][:, -1], np.float32(1 / scale))
    np.testing.assert_array_equal(asked[0] @ stored[0].T, asked[1] @ stored[1].T)


def test_the_scale_balances_what_codes_err(make_score, tables):
    """f^4 = V / (B Q), of other items than those it was taken of, within the rounding to a power of two and chance."""
    _, bank = tables
    score = make_score("hadamard", 3, 16)
    vectors = bank_vectors(score, bank)
    scale = balance(score, ("image", "audio"), vectors)
    spread = with_bank(score.item_vectors(random_embeddings(("image", "audio"), 16, 5000, seed=5)), vectors).var(axis=0)
    exact = (spread[:-1].sum() / spread[-1] / (vectors**2).sum(axis=1).mean()) ** 0.25
    assert scale == 2.0 ** round(math.log2(scale))
    assert 0.6 < scale / exact < 1.6
    assert balance(score, ("image", "audio"), 0 * vectors) == 1


def test_an_index_saved_with_its_scale_is_read_with_it(make_score, tables, tmp_path):
    rows, bank = tables
    items = {name: rows[name] for name in ("image", "audio")}
    index = TupleIndex.build(make_score("hadamard", 3, 16), items, bank=bank)
    assert index.info()["bank_scale"] != 1
    index.save(tmp_path / "index")
    before = index.search({"text": rows["text"]})
    loaded = TupleIndex.load(tmp_path / "index")
    assert loaded.info()["bank_scale"] == index.info()["bank_scale"]
    np.testing.assert_array_equal(loaded.search({"text": rows["text"]}).scores, before.scores)
    manifest = read_manifest(tmp_path / "index")
    write_manifest(tmp_path / "index", {k: v for k, v in manifest.items() if k not in ("sha256", "bank_scale")})
    assert TupleIndex.load(tmp_path / "index").info()["bank_scale"] == 1  # as it was before there was one


def test_hubs_vanish(make_score, tables):
    rows, bank = tables
    score = make_score("sum_of_pairs", 3, 16)
    items = {name: rows[name].copy() for name in ("image", "audio")}
    items["audio"][:10] = items["image"][:10]  # parts that fit each other perfectly, whatever is asked
    skews = {}
    for kind, given in (("score", None), ("pmi", bank)):
        hits = TupleIndex.build(score, items, bank=given).search(bank, k=5)
        assert hits.kind == kind
        skews[kind] = hubness_skew(hits.ids, 60)
    assert skews["score"] > 1 > 0.7 > abs(skews["pmi"])


@pytest.mark.slow
def test_figures_come_out_again(tmp_path):
    command = [sys.executable, str(ROOT / "eval" / "bank.py"), "--quick", "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    again, committed = (json.loads((place / "bank.json").read_text()) for place in (tmp_path, ROOT / "eval/results"))
    for row, published in zip(again["results"], committed["results"]):
        assert (row["joint"], row["score"]) == (published["joint"], published["score"])
        for name in ("score", "exact"):
            assert row["mrr"][name] == pytest.approx(published["mrr"][name], abs=0.005)
        assert row["mrr"]["bank"]["512"]["mean"] == pytest.approx(published["mrr"]["bank"]["512"]["mean"], abs=0.005)
    assert (tmp_path / "bank.png").stat().st_size > 10_000
