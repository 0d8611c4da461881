"""The retrieval protocol on rows whose right answers are known, and as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import protocols
import pytest
import retrieval
import retrieval_task
import torch

from mmcl.encoders import categories
from mmcl.index import TupleIndex
from mmcl.model import MultimodalModel
from mmcl.scores import Hadamard, SumOfPairs

EVAL = Path(__file__).parents[2] / "eval"

DIM = 8
NAMES = ("image", "audio", "text")


def tiny_model(score=SumOfPairs, values=10, seed=0):
    """Random vectors for the numbers of each modality."""
    torch.manual_seed(seed)
    return MultimodalModel({name: categories(range(values), DIM) for name in NAMES}, score(NAMES, DIM)).eval()


def rows_of(model, **columns):
    """(dataset, its rows through the model)."""
    dataset = datasets.Dataset.from_dict(columns)
    return dataset, protocols.embedded(model, dataset, None, NAMES)


def random_columns(count=40, seed=0):
    generator = np.random.default_rng(seed)
    return {name: generator.integers(0, 10, count).tolist() for name in NAMES}


def test_there_are_as_many_directions_as_disjoint_pairs_of_subsets():
    assert list(retrieval_task.directions(("a", "b"), True)) == [(("a",), ("b",)), (("b",), ("a",))]
    for m in (2, 3, 4, 5):
        found = list(retrieval_task.directions("abcde"[:m], True))
        assert len(found) == len(set(found)) == 3**m - 2 * 2**m + 1
        assert all(query and items and not set(query) & set(items) for query, items in found)
        whole = list(retrieval_task.directions("abcde"[:m], False))
        assert found[: len(whole)] == whole and len(whole) == 2**m - 2
        assert all(len(query) + len(items) == m for query, items in whole)


def test_what_occurs_together_is_right_by_hand():
    columns = {"image": [0, 0, 1, 2], "audio": [5, 6, 5, 5], "text": [7, 8, 8, 7]}
    _, rows = rows_of(tiny_model(), **columns)
    found = retrieval_task.direction(rows, rows.ids, ("text",), ("image", "audio"))
    words = [columns["text"][row] for row in found.query_rows]
    stored = [(columns["image"][row], columns["audio"][row]) for row in found.item_rows]
    assert sorted(words) == [7, 8] and sorted(stored) == [(0, 5), (0, 6), (1, 5), (2, 5)]
    together = {7: {(0, 5), (2, 5)}, 8: {(0, 6), (1, 5)}}
    for word, right in zip(words, found.relevant(0, 2)):
        assert {pair for pair, each in zip(stored, right) if each} == together[word]


def test_values_of_one_group_are_one_answer():
    """Two photos of product 0, and a caption that only one of them has: right for both."""
    columns = {"image": [0, 1, 2], "audio": [0, 0, 0], "text": [3, 4, 5]}
    dataset, rows = rows_of(tiny_model(), **columns, product=["x", "x", "y"])
    groups = retrieval_task.group_codes(dataset, rows, {"image": "product", "text": "equal"})
    found = retrieval_task.direction(rows, groups, ("image", "audio"), ("text",))
    photos = [columns["image"][row] for row in found.query_rows]
    captions = [columns["text"][row] for row in found.item_rows]
    right = {photo: {c for c, each in zip(captions, row) if each} for photo, row in zip(photos, found.relevant(0, 3))}
    assert right == {0: {3, 4}, 1: {3, 4}, 2: {5}}


def test_with_a_modality_absent_a_query_is_asked_once_for_each_of_its_answers():
    columns = {"image": [0, 0, 0, 1], "audio": [5, 6, 7, 5], "text": [7, 8, 8, 7]}
    _, rows = rows_of(tiny_model(), **columns)
    found = retrieval_task.direction(rows, rows.ids, ("image",), ("text",))
    words = [columns["text"][row] for row in found.item_rows]
    asked = []
    for row, right in zip(found.query_rows, found.relevant(0, 3)):
        asked.append((columns["image"][row], [word for word, each in zip(words, right) if each]))
    assert sorted(asked) == [(0, [7]), (0, [8]), (1, [7])] and sorted(words) == [7, 8]


@pytest.mark.parametrize("block", [1, 3, 512])
@pytest.mark.parametrize("score", [SumOfPairs, Hadamard])
def test_brute_force_equals_the_score_of_every_pair(score, block, monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK", block)
    model = tiny_model(score)
    columns = random_columns()
    _, rows = rows_of(model, **columns)
    record = retrieval.judged(
        model.score, rows, retrieval_task.direction(rows, rows.ids, ("text",), NAMES[:2]), ["Flat"]
    )
    pairs = sorted(set(zip(columns["image"], columns["audio"])))
    ranks, shares = [], []
    for word in sorted(set(columns["text"])):
        values = {"image": [a for a, _ in pairs], "audio": [b for _, b in pairs], "text": [word] * len(pairs)}
        with torch.no_grad():
            scores = model.score({name: rows.double() for name, rows in model.encode(values).items()}).tolist()
        own = {pair for *pair, text in zip(*columns.values()) if text == word for pair in [tuple(pair)]}
        best = max(value for pair, value in zip(pairs, scores) if pair in own)
        ranks.append(1 + sum(value >= best for pair, value in zip(pairs, scores) if pair not in own))
        shares.append(len(own) / len(pairs))
    found = record["metrics"]
    for k in (1, 5, 10):
        assert found[f"image+audio_retrieval_recall@{k}"] == pytest.approx(np.mean([rank <= k for rank in ranks]))
    assert found["image+audio_retrieval_mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    first_ten = np.mean([1 / rank if rank <= 10 else 0 for rank in ranks])
    assert found["image+audio_retrieval_mrr@10"] == pytest.approx(first_ten)
    assert record["chance_recall@1"] == pytest.approx(np.mean(shares))
    assert (record["queries_asked"], record["items_stored"]) == (len(ranks), len(pairs))


@pytest.mark.parametrize("score", [SumOfPairs, Hadamard])
def test_exact_indexes_agree_in_every_direction(score):
    model = tiny_model(score)
    _, rows = rows_of(model, **random_columns(60))
    subject = protocols.Subject("tiny", "here", model)
    records = retrieval.protocol(subject, "numbers", rows, rows.ids, ["Flat", "Exact"], absent=True)
    assert len(records) == 12
    assert retrieval.disagreements(records) == []
    for record in records:
        absent = len(record["query"]) + len(record["items"]) < 3
        if absent and score is Hadamard:
            assert record["metrics"] is None and "is absent" in record["not_possible"]
            continue
        for found in record["indexes"]:
            assert found["agrees"] and found["share_of_true_first_10"] == 1
            for name, value in found["metrics"].items():
                assert value == pytest.approx(record["metrics"][name])


def test_an_index_that_misses_or_misjudges_items_is_found_out():
    model = tiny_model()
    _, rows = rows_of(model, **random_columns(60))
    task = retrieval_task.direction(rows, rows.ids, ("text",), NAMES[:2])
    asked, stored = (
        retrieval_task.taken(rows, *side) for side in ((task.query, task.query_rows), (task.items, task.item_rows))
    )
    with torch.no_grad():
        queries = model.score.query_vectors({name: part.double() for name, part in asked.items()}).numpy()
        items = model.score.item_vectors({name: part.double() for name, part in stored.items()}).numpy()
    brute = retrieval.brute_force(queries, items, task)

    def agrees(part, ids=None):
        index = TupleIndex.build(model.score, {name: value[part] for name, value in stored.items()}, ids=ids)
        found = retrieval.through_index(index, asked, queries, items, task, brute)
        return found["agrees"]

    assert agrees(slice(None))
    first = np.argsort(-(queries @ items.T), axis=1)[:, 0].min()
    kept = np.delete(np.arange(len(items)), first)
    assert not agrees(kept, kept), "an item is missing that comes first for a query"
    top = brute.scores[:, 0].argmax()
    best = int((queries[top] @ items.T).argmax())
    swapped = np.arange(len(items))
    swapped[[best, (best + 1) % len(items)]] = swapped[[(best + 1) % len(items), best]]
    assert not agrees(slice(None), swapped), "two items have each other's id"


def test_fewer_items_than_ten_are_enough():
    model = tiny_model()
    _, rows = rows_of(model, image=[0, 1, 2], audio=[3, 4, 5], text=[6, 7, 8])
    record = retrieval.judged(
        model.score, rows, retrieval_task.direction(rows, rows.ids, NAMES[:2], ("text",)), ["Flat"]
    )
    assert record["metrics"]["text_retrieval_recall@5"] == 1
    assert record["indexes"][0]["metrics"]["text_retrieval_recall@10"] == 1
    assert record["indexes"][0]["agrees"]


def test_partners_with_one_vector_are_found_and_strangers_are_not():
    """The same vectors in image and text: sum of pairs finds each partner; shifted by one, none."""
    model = tiny_model()
    with torch.no_grad():
        model.encoders["text"].backbone.weight.copy_(model.encoders["image"].backbone.weight)
    for shift, expected in ((0, 1.0), (1, 0.0)):
        texts = [(number + shift) % 10 for number in range(10)]
        _, rows = rows_of(model, image=list(range(10)), audio=[0] * 10, text=texts)
        task = retrieval_task.direction(rows, rows.ids, ("image",), ("text",))
        record = retrieval.judged(model.score, rows, task, ["Flat"])
        assert record["metrics"]["text_retrieval_recall@1"] == expected
        assert record["chance_recall@1"] == pytest.approx(0.1)


# As a user runs it.

RECIPE = """
name = "numbers"
model = "model"
factories = ["Flat", "IVF2,Flat"]
[data]
source = "test.parquet"
columns = { image = "photo" }
[groups]
image = "product"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """model/ and test.parquet."""
    folder = tmp_path_factory.mktemp("own")
    tiny_model().save_pretrained(folder / "model")
    columns = random_columns(80)
    columns["product"] = [value // 2 for value in columns["image"]]
    columns["photo"] = columns.pop("image")
    datasets.Dataset.from_dict(columns).to_parquet(folder / "test.parquet")
    return folder


def run(folder, recipe, monkeypatch):
    """Exit code of the script, as it runs on a recipe; results in folder/out."""
    (folder / "recipe.toml").write_text(recipe)
    monkeypatch.setattr(sys, "argv", ["retrieval.py", str(folder / "recipe.toml"), "--out", str(folder / "out")])
    with pytest.raises(SystemExit) as end:
        retrieval.main()
    return end.value.code


def test_a_recipe_gives_records_and_a_picture(folder, monkeypatch):
    assert run(folder, RECIPE, monkeypatch) == 0
    summary = json.loads((folder / "out/retrieval.json").read_text())
    assert summary["command"].startswith("python eval/retrieval.py ")
    assert len(summary["results"]) == 12
    for record in summary["results"]:
        assert (record["dataset"], record["model"], record["task"]) == ("numbers", "model", "zeroshot_retrieval")
        kind = "+".join(record["items"])
        assert {f"{kind}_retrieval_recall@{k}" for k in (1, 5, 10)} < set(record["metrics"])
        flat, lists = record["indexes"]
        assert flat["factory"] == "Flat" and flat["agrees"]
        assert lists["asked_for"] == "IVF2,Flat" and 0 < lists["share_of_true_first_10"] <= 1
    assert (folder / "out/retrieval.png").stat().st_size > 10_000


def test_directions_with_absent_modalities_can_be_left_out(folder, monkeypatch):
    assert run(folder, RECIPE.replace("[data]", "absent = false\n[data]"), monkeypatch) == 0
    records = json.loads((folder / "out/retrieval.json").read_text())["results"]
    assert [len(each["query"]) + len(each["items"]) for each in records] == [3] * 6


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("factories", "factory", "unknown key 'factory'; the keys there are"),
        ("[groups]", "[group]", "unknown key 'group'; the keys there are"),
        ('"photo"', '"foto"', "no column 'foto' for modality 'image'"),
        ('"product"', '"produkt"', "no column 'produkt' for groups of 'image'"),
        ('image = "product"', 'smell = "product"', "unknown modality 'smell'"),
        ('model = "model"', 'model = "./nowhere"', "no model"),
        ('"IVF2,Flat"', '"IVF2,Flt"', "IVF2,Flt"),
        ('"test.parquet"', '"none.parquet"', "no data at"),
    ],
)
def test_faults_of_a_recipe_are_told_in_one_line(folder, monkeypatch, capsys, old, new, fault):
    assert run(folder, RECIPE.replace(old, new, 1), monkeypatch) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert fault in error and error.startswith("Error: ")


@pytest.mark.slow
def test_the_demo_keeps_what_is_expected(tmp_path):
    command = [sys.executable, str(EVAL / "retrieval.py"), "--quick", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    records = json.loads((tmp_path / "retrieval.json").read_text())["results"]
    exact = [each for record in records for each in record.get("indexes", ()) if each["asked_for"] in retrieval.EXACT]
    assert len(exact) == 2 * (6 + 12) and all(each["agrees"] for each in exact)
