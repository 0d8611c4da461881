"""Several indexes over the same items: the right one answers, and all change together or not at all."""

import json
import os
import pkgutil
import subprocess
import sys
import threading
from itertools import combinations

import numpy as np
import pytest

from mmcl.index import TupleIndex
from mmcl.index.side_by_side import TupleIndexes
from mmcl.index.side_by_side_files import folder_names

NAMES = ("image", "audio", "text")
TWO = [("image", "audio"), ("text",)]
SPLITS = [stored for size in (2, 1) for stored in combinations(NAMES, size)]


@pytest.fixture(scope="module")
def score(make_score):
    return make_score("pairs_and_neutral", 3, 16)


@pytest.fixture
def build_all(score, items):
    """build_all(rows=60, **options): every split of the first rows, under string ids."""

    def make(rows=60, **options):
        options = {"ids": [f"item {i}" for i in range(rows)], "metadata": {"row": list(range(rows))}} | options
        return TupleIndexes.build(score, {name: items[name][:rows] for name in NAMES}, **options)

    return make


def some(items, rows):
    return {name: items[name][rows] for name in NAMES}


def answer(indexes, items):
    """What every index says to a few queries, ids and scores."""
    found = []
    for stored in indexes.stored:
        query = {name: items[name][200:205] for name in NAMES if name not in stored}
        hits = indexes.search(query, k=100, target=stored)
        found.append((stored, hits.ids.tolist(), hits.scores.tolist()))
    return found


def same(a, b):
    return [each[:2] for each in a] == [each[:2] for each in b] and np.array_equal(
        [np.array(each[2]) for each in a], [np.array(each[2]) for each in b]
    )


@pytest.mark.parametrize("factory", ["auto", "IVF4,Flat", "SQ8", {("text", "image"): "IVF4,Flat", "audio": "SQ8"}])
def test_each_index_is_the_one_built_alone(factory, score, items, queries):
    rows = some(items, slice(0, 80))
    indexes = TupleIndexes.build(score, rows, factory=factory)
    assert indexes.stored == SPLITS
    for stored in SPLITS:
        chosen = factory
        if isinstance(factory, dict):
            chosen = {("image", "text"): "IVF4,Flat", ("audio",): "SQ8"}.get(stored, "auto")
        alone = TupleIndex.build(score, rows, factory=chosen, modalities=stored)
        assert indexes.storing(stored).info() == alone.info()
        asked = {name: queries for name in NAMES if name not in stored}
        a, b = indexes.search(asked, k=80), alone.search(asked, k=80)
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.scores, b.scores)


@pytest.mark.parametrize("queried", SPLITS)
def test_scores_are_those_of_the_tuples_whatever_is_asked(queried, build_all, score, items, brute_force, tolerance):
    asked = {name: items[name][300:307] for name in queried}
    rest = {name: items[name][:60] for name in NAMES if name not in queried}
    hits = build_all(ids=None).search(asked, k=60)
    true, bound = brute_force(score, rest, asked), tolerance(score, rest, asked)
    for ids, scores, truth, allowed in zip(hits.ids, hits.scores, true, bound):
        assert sorted(ids) == list(range(60))
        assert (np.abs(scores - truth[ids]) <= allowed[ids]).all()


def test_the_index_that_stores_most_of_the_rest_answers(score, items):
    stored = [("image",), ("image", "audio"), ("text",)]
    indexes = TupleIndexes.build(score, some(items, slice(0, 20)), stored=stored)
    assert indexes.stored == stored
    assert indexes.modalities == NAMES
    assert indexes.index_for("text").modalities == ("image", "audio")
    assert indexes.index_for(["text"], target="image").modalities == ("image",)
    assert indexes.index_for(["text"], target=["audio", "image"]).modalities == ("image", "audio")
    assert indexes.index_for(["text", "audio"]).modalities == ("image",)
    assert indexes.index_for({"image", "audio"}).modalities == ("text",)
    assert indexes.index_for(["audio"], target=("image",)).modalities == ("image",)


def test_an_absent_modality_is_left_to_the_score(build_all, score, items):
    hits = build_all(ids=None).search({"image": items["image"][300:303]}, k=60, target=("text",))
    query = score.query_vectors({"image": items["image"][300:303]}, absent=["audio"])
    expected = (query @ score.item_vectors({"text": items["text"][:60]}).T).detach().numpy()
    np.testing.assert_allclose(hits.scores, -np.sort(-expected, axis=1), rtol=1e-4, atol=1e-4)


def test_a_query_that_none_answers_is_told_what_each_takes(score, items):
    indexes = TupleIndexes.build(score, some(items, slice(0, 20)), stored=[("image", "audio"), ("image",)])
    query = items["image"][:2]
    with pytest.raises(KeyError, match=r"query of \['image'\].*\['image', 'audio'\] by some of \['text'\].*'audio'"):
        indexes.search({"image": query})
    with pytest.raises(KeyError, match=r"stores \['audio'\].*\['image', 'audio'\]"):
        indexes.search({"text": query}, target="audio")
    with pytest.raises(KeyError, match="stores \\['5'\\]"):
        indexes.search({"text": query}, target=5)
    with pytest.raises(KeyError, match=r"smell.*text"):
        indexes.search({"smell": query})
    with pytest.raises(KeyError, match="query of"):
        indexes.search({})
    with pytest.raises(ValueError, match=r"ndarray.*\['image'\] by some"):
        indexes.search(query)
    with pytest.raises(ValueError, match="'image' is stored"):
        indexes.search({"image": query}, target="image")


def test_several_that_answer_as_well_are_not_chosen_between(score, items):
    indexes = TupleIndexes.build(score, some(items, slice(0, 20)), stored=[("audio",), ("image",)])
    with pytest.raises(ValueError, match=r"\('audio',\) or \('image',\); name one as target="):
        indexes.search({"text": items["text"][:2]})
    assert len(indexes.search({"text": items["text"][:2]}, target="image")) == 2


def test_search_takes_what_a_single_index_takes(build_all, items):
    indexes = build_all(factory={"text": "IVF4,Flat"})
    query = {"image": items["image"][5], "audio": items["audio"][5]}
    hits = indexes.search(query, k=3, where="row < 10", nprobe=4)
    assert hits.counts.tolist() == [3]
    assert all(row["row"] < 10 for row in hits.metadata[0])
    with pytest.raises(ValueError, match="nprobe"):
        indexes.search({"text": items["text"][5]}, nprobe=4)


@pytest.mark.parametrize(
    ("stored", "error", "told"),
    [
        ([], ValueError, "got none"),
        ("image", ValueError, "got 'image'"),
        (5, ValueError, "got 5"),
        (["image", "audio"], ValueError, "'image' in it"),
        ([()], ValueError, "some of the modalities"),
        ([NAMES], ValueError, "leaves some to search by"),
        ([("image", "image")], ValueError, "each once"),
        ([("image", "audio"), ("audio", "image")], ValueError, "twice"),
        ([("smell",)], KeyError, r"smell.*image"),
    ],
)
def test_stored_that_makes_no_indexes_is_refused(stored, error, told, score, items):
    with pytest.raises(error, match=told):
        TupleIndexes.build(score, some(items, slice(0, 5)), stored=stored)


def test_bad_items_and_factories_are_refused_as_by_a_single_index(build_all, score, items):
    broken = {name: rows[:20].copy() for name, rows in items.items()}
    broken["text"][7] = np.nan
    with pytest.raises(ValueError, match="text: row 7 holds NaN"):
        TupleIndexes.build(score, broken)
    with pytest.raises(KeyError, match=r"'text'.*image"):
        TupleIndexes.build(score, {"image": items["image"]}, stored=[("image",), ("text",)])
    with pytest.raises(KeyError, match=r"smell.*\('image', 'audio'\)"):
        build_all(factory={"smell": "Flat"})
    with pytest.raises(ValueError, match="Nonsense"):
        build_all(factory="Nonsense")
    with pytest.raises(ValueError, match="duplicate id"):
        build_all(ids=["a"] * 60)
    with pytest.raises(ValueError, match="Score or a MultimodalModel"):
        TupleIndexes.build("score", items)


def test_items_that_lack_a_modality_are_indexed_by_those_they_have(score, items):
    indexes = TupleIndexes.build(score, {name: items[name][:20] for name in ("image", "audio")})
    assert indexes.stored == [("image", "audio"), ("image",), ("audio",)]


def test_m_is_two_as_it_is_three(make_score, items):
    score = make_score("hadamard", 2, 16)
    indexes = TupleIndexes.build(score, {name: items[name][:30] for name in ("image", "audio")})
    assert indexes.stored == [("image",), ("audio",)]
    truth = score({"image": items["image"][:30], "audio": np.tile(items["audio"][200], (30, 1))}).detach().numpy()
    hits = indexes.search({"audio": items["audio"][200]}, k=30)
    np.testing.assert_array_equal(hits.ids[0], np.argsort(-truth))


class Words:
    """A model whose raw values are row numbers; it counts what it encodes."""

    def __init__(self, score, items):
        self.score, self.items, self.encoded = score, items, []

    def encode(self, values, batch_size=None):
        self.encoded += [(name, row) for name, rows in values.items() for row in rows]
        return {name: self.items[name][[int(row) for row in rows]] for name, rows in values.items()}

    def fingerprint(self):
        return "words"


def test_every_raw_value_is_encoded_once_for_all_indexes(score, items, tmp_path):
    words, rows = Words(score, items), [str(row) for row in range(600)]
    indexes = TupleIndexes.build(words, dict.fromkeys(NAMES, rows), metadata={"row": rows})
    assert sorted(words.encoded) == sorted((name, row) for name in NAMES for row in rows)
    assert same(answer(indexes, items), answer(TupleIndexes.build(score, some(items, slice(0, 600))), items))
    words.encoded.clear()
    indexes.add({name: ["600", "601"] for name in NAMES})
    assert sorted(words.encoded) == sorted((name, row) for name in NAMES for row in ("600", "601"))
    indexes.save(tmp_path / "all")
    loaded = TupleIndexes.load(tmp_path / "all", model=words)
    assert loaded.search({"text": "7"}, k=1).ids == indexes.search({"text": items["text"][7]}, k=1).ids
    other = Words(score, items)
    other.fingerprint = lambda: "others"
    with pytest.raises(ValueError, match=r"words.*others"):
        TupleIndexes.load(tmp_path / "all", model=other)


def test_datasets_and_shards_are_read_once(score, items, tmp_path, monkeypatch):
    import datasets
    import pyarrow as pa

    from mmcl.shards import EmbeddingShards, ShardWriter

    writer = ShardWriter(tmp_path / "shards", {"fingerprint": "words"})
    for start in (0, 25):
        part = slice(start, start + 25)
        writer.write(some(items, part), pa.table({"key": [str(row) for row in range(start, start + 25)]}))
    writer.write_manifest(complete=True)
    reads, read = [], EmbeddingShards.__iter__
    monkeypatch.setattr(EmbeddingShards, "__iter__", lambda self: reads.append(self.modalities) or read(self))
    indexes = TupleIndexes.build(score, tmp_path / "shards")
    assert [set(each) for each in reads] == [set(NAMES)]
    assert indexes.get([3])[0]["key"] == "3"
    data = datasets.Dataset.from_dict({**{name: [str(row) for row in range(50)] for name in NAMES}, "year": [1] * 50})
    from_rows = TupleIndexes.build(Words(score, items), data)
    assert from_rows.get(7) == {"year": 1}
    assert same(answer(indexes, items), answer(from_rows, items))


def test_all_indexes_change_together(build_all, items, tmp_path):
    indexes, expected = build_all(), {f"item {i}": i for i in range(60)}
    indexes.add(some(items, slice(60, 70)), ids=[f"item {i}" for i in range(60, 70)], metadata={"row": [0] * 10})
    indexes.remove("item 3")
    indexes.remove(["item 4", "item 65"])
    indexes.upsert(some(items, [100, 101]), ids=["item 5", "new"])
    expected |= {f"item {i}": i for i in range(60, 70)} | {"item 5": 100, "new": 101}
    for gone in ("item 3", "item 4", "item 65"):
        del expected[gone]
    for _ in range(2):
        assert len(indexes) == len(expected)
        assert "new" in indexes and "item 3" not in indexes
        assert indexes.get("new") == {"row": None}
        for stored in SPLITS:
            index = indexes.storing(stored)
            assert set(index._tuples.ids()) == set(expected)
            true = index.score.item_vectors({name: items[name][list(expected.values())] for name in stored})
            np.testing.assert_allclose(index._tuples.vectors(list(expected)), true.detach().numpy(), rtol=1e-5)
        indexes.verify()
        indexes.compact()
        indexes.save(tmp_path / "all")
        indexes = TupleIndexes.load(tmp_path / "all")


def test_default_ids_go_on_alike_in_all(build_all, items):
    indexes = build_all(ids=None)
    indexes.remove(59)
    indexes.add(some(items, [60, 61]))
    assert all(60 in index._tuples and 59 not in index._tuples for index in map(indexes.storing, SPLITS))
    assert len(indexes) == 61


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda i, rows: i.add(rows, ids=["item 1", "x"]), ValueError, "'item 1'.*already"),
        (lambda i, rows: i.add(rows, ids=["x", "x"]), ValueError, "duplicate"),
        (lambda i, rows: i.add(rows, ids=[1, 2]), ValueError, "strings"),
        (lambda i, rows: i.add(rows), ValueError, "give one for each"),
        (lambda i, rows: i.add(rows, ids=["x", "y"], metadata={"row": ["a", "b"]}), ValueError, "'row'"),
        (lambda i, rows: i.add({"image": rows["image"]}, ids=["x", "y"]), ValueError, "indexes store"),
        (lambda i, rows: i.upsert(rows, ids=None), ValueError, "needs ids"),
        (lambda i, rows: i.remove(["item 2", "nobody"]), KeyError, "nobody"),
        (lambda i, rows: i.get("nobody"), KeyError, "nobody"),
    ],
)
def test_what_is_refused_changes_nothing(change, error, told, build_all, items):
    indexes = build_all(stored=TWO)
    before = answer(indexes, items)
    with pytest.raises(error, match=told):
        change(indexes, some(items, [70, 71]))
    assert same(answer(indexes, items), before)
    indexes.verify()


@pytest.mark.parametrize("how", ["add", "upsert"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_change_that_one_index_refuses_changes_none(at, how, build_all, items, monkeypatch):
    """Interrupted half-way: those that had changed go back, and later changes find nothing of it."""
    indexes = build_all(stored=TWO)
    indexes.add(some(items, [60, 61, 62]), ids=["a", "b", "c"])
    before, seen = answer(indexes, items), []
    failing = indexes.storing(TWO[at])._tuples

    def fail(*_):
        seen.append(indexes.storing(TWO[0])._tuples.snapshot)  # as a search that runs just then
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(failing, how, fail)
        with pytest.raises(KeyboardInterrupt):
            getattr(indexes, how)(some(items, [70, 71]), ids=["x", "y"])
    assert "x" not in indexes
    assert same(answer(indexes, items), before)
    held = seen[0].added.rows.copy(), seen[0].items.ids.copy()
    assert len(held[0]) == (3 if at == 0 else 5)
    indexes.add(some(items, [80]), ids=["y"])
    assert all(len(index) == 64 and "x" not in index and "y" in index for index in map(indexes.storing, TWO))
    np.testing.assert_array_equal(seen[0].added.rows, held[0])
    np.testing.assert_array_equal(seen[0].items.ids, held[1])
    indexes.verify()


@pytest.mark.parametrize("at", [0, 1])
def test_a_removal_that_is_interrupted_removes_nothing(at, build_all, items, monkeypatch):
    indexes = build_all(stored=TWO)
    indexes.add(some(items, [60, 61]), ids=["a", "b"])
    before = answer(indexes, items)

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(indexes.storing(TWO[at])._tuples, "remove", fail)
        with pytest.raises(MemoryError):
            indexes.remove(["item 3", "b"])
    assert same(answer(indexes, items), before)
    indexes.remove(["item 3", "b"])
    assert [len(indexes.storing(stored)) for stored in TWO] == [60, 60]
    indexes.verify()


def test_the_index_that_refuses_is_any_of_them(score, items):
    """float16 codes hold the one item and not the product of two."""
    rows = {name: np.where(np.arange(20)[:, None] == 0, 1, 1) * items[name][:20] for name in NAMES}
    stored = [("text",), ("image", "audio")]
    indexes = TupleIndexes.build(score, rows, factory={("image", "audio"): "SQfp16"}, stored=stored)
    with pytest.raises(ValueError, match="row 1.*float16"):
        indexes.add({name: rows[name][:2] * [[1], [3e3]] for name in NAMES})
    assert len(indexes) == len(indexes.storing("text")) == 20
    indexes.verify()


def test_an_index_changed_without_the_others_is_noticed(build_all, items):
    indexes = build_all()
    indexes.storing("text").remove("item 0")
    for change in (indexes.verify, lambda: indexes.remove("item 1")):
        with pytest.raises(ValueError, match=r"60 of \['image', 'audio'\], 59 of \['text'\].*without the others"):
            change()
    assert len(indexes.storing(("image", "audio"))) == 60


def test_a_bank_goes_to_the_indexes_that_do_not_store_it(build_all, score, items):
    bank = {name: items[name][400:450] for name in NAMES}
    indexes = build_all(bank=bank)
    for stored in SPLITS:
        rest = {name: rows for name, rows in bank.items() if name not in stored}
        alone = TupleIndex.build(score, some(items, slice(0, 60)), bank=rest, modalities=stored)
        asked = {name: items[name][300:310] for name in rest}
        a, b = indexes.search(asked), alone.search(asked)
        assert a.kind == "pmi"
        np.testing.assert_array_equal(a.scores, b.scores)
    with pytest.raises(ValueError, match=r"bank has \['text'\]; the index of \('image', 'text'\)"):
        build_all(bank={"text": bank["text"]})
    with pytest.raises(KeyError, match="smell"):
        build_all(bank={"smell": bank["text"]})
    with pytest.raises(ValueError, match="bank must be"):
        build_all(bank=bank["text"])


def test_what_is_saved_is_what_is_loaded_together_and_alone(build_all, items, tmp_path):
    indexes = build_all(factory={"text": "IVF4,Flat"})
    indexes.save(str(tmp_path / "all"))
    loaded = TupleIndexes.load(str(tmp_path / "all"))
    assert loaded.stored == indexes.stored == SPLITS
    assert same(answer(loaded, items), answer(indexes, items))
    assert loaded.get("item 7") == {"row": 7}
    assert loaded.info() == indexes.info()
    json.dumps(loaded.info())
    assert {each.name for each in (tmp_path / "all").iterdir() if each.is_dir()} == {"+".join(each) for each in SPLITS}
    alone = TupleIndex.load(tmp_path / "all" / "image+audio")
    hits = alone.search({"text": items["text"][200:205]}, k=100)
    np.testing.assert_array_equal(hits.scores, loaded.search({"text": items["text"][200:205]}, k=100).scores)
    with pytest.raises(ValueError, match=r"manifest\.json is not the manifest of an index.*TupleIndexes"):
        TupleIndex.load(tmp_path / "all")
    with pytest.raises(ValueError, match=r"is not the manifest of several.*TupleIndex\)"):
        TupleIndexes.load(tmp_path / "all" / "text")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TupleIndexes.load(tmp_path / "nowhere")


def test_any_modality_name_makes_a_folder(make_score, unit_rows, tmp_path):
    names = ("image+audio", "image", "audio", "../소리", "Text", "text", ".", "a%2Fb")
    folders = folder_names([names[:1], names[1:3], names[3:4], names[4:5], names[5:6], names[6:7], names[7:8]])
    assert folders[0] == "image%2Baudio"
    assert folders[1] == "image+audio"
    assert folders[2] == "%2E%2E%2F%EC%86%8C%EB%A6%AC"
    assert folders[5] == "%2E"
    assert len({folder.lower() for folder in folders}) == 7
    assert folder_names([("RGB", "text")]) == ["RGB+text"]
    score = make_score("sum_of_pairs", names, 8)
    rows = {name: unit_rows(9, 8, seed) for seed, name in enumerate(names)}
    indexes = TupleIndexes.build(score, rows, stored=[(name,) for name in names] + [names[1:3]])
    indexes.save(tmp_path / "all")
    assert os.listdir(tmp_path) == ["all"]
    loaded = TupleIndexes.load(tmp_path / "all")
    assert loaded.stored == indexes.stored
    hits = loaded.search({"text": rows["text"][:1]}, target="../소리", k=9)
    np.testing.assert_array_equal(hits.ids, indexes.search({"text": rows["text"][:1]}, target="../소리", k=9).ids)


def test_new_save_replaces_all_and_drops_the_indexes_that_are_gone(build_all, score, items, tmp_path):
    build_all().save(tmp_path / "all")
    smaller = TupleIndexes.build(score, some(items, slice(0, 7)), stored=[("text",), ("image",)])
    smaller.save(tmp_path / "all")
    assert {each.name for each in (tmp_path / "all").iterdir() if each.is_dir()} == {"text", "image"}
    assert len(TupleIndexes.load(tmp_path / "all")) == 7
    assert len([each for each in (tmp_path / "all" / "text").iterdir() if each.is_dir()]) == 1


def test_unchanged_vectors_are_linked_not_written_again(build_all, items, tmp_path):
    indexes = build_all(stored=TWO)
    indexes.save(tmp_path / "all")
    vectors = {file.parent.parent.name: file.stat().st_ino for file in (tmp_path / "all").rglob("index.faiss")}
    assert len(vectors) == 2
    indexes.add(some(items, [100]), ids=["new"])
    indexes.save(tmp_path / "all")
    assert {f.parent.parent.name: f.stat().st_ino for f in (tmp_path / "all").rglob("index.faiss")} == vectors


def test_another_writer_is_noticed(build_all, tmp_path):
    indexes = build_all(stored=TWO)
    indexes.save(tmp_path / "all")
    indexes.save(tmp_path / "all")
    TupleIndexes.load(tmp_path / "all").save(tmp_path / "all")
    with pytest.raises(ValueError, match="another writer"):
        indexes.save(tmp_path / "all")
    indexes.save(tmp_path / "all", replace=True)
    indexes.save(tmp_path / "all")


def test_an_index_saved_on_its_own_is_named(build_all, tmp_path):
    indexes = build_all(stored=TWO)
    indexes.save(tmp_path / "all")
    alone = TupleIndex.load(tmp_path / "all" / "text")
    alone.remove("item 0")
    alone.save(tmp_path / "all" / "text")
    for use in (lambda: TupleIndexes.load(tmp_path / "all"), indexes.verify):
        with pytest.raises(ValueError, match=r"all/text has been saved on its own"):
            use()
    assert len(TupleIndex.load(tmp_path / "all" / "text")) == 59
    indexes.save(tmp_path / "all")
    assert len(TupleIndexes.load(tmp_path / "all").storing("text")) == 60


@pytest.mark.parametrize("name", ["manifest.json", "image+audio/manifest.json", "text/index.faiss"])
def test_a_flipped_byte_is_refused_by_file_name(name, build_all, tmp_path):
    indexes = build_all(stored=TWO)
    indexes.save(tmp_path / "all")
    folder, _, file = name.rpartition("/")
    (found,) = [
        path
        for path in (tmp_path / "all" / folder).rglob(file)
        if file == "index.faiss" or path.parent == tmp_path / "all" / folder
    ]
    content = bytearray(found.read_bytes())
    content[len(content) // 2] ^= 1
    found.write_bytes(content)
    for use in (lambda: TupleIndexes.load(tmp_path / "all"), indexes.verify):
        with pytest.raises(ValueError, match=file):
            use()


def test_folders_of_others_are_left_alone(build_all, tmp_path):
    indexes = build_all(stored=[("text",), ("image",)])
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "a.tex").write_text("years of work")
    with pytest.raises(ValueError, match="'thesis'"):
        indexes.save(tmp_path)
    indexes.storing("text").save(tmp_path / "mine" / "text")
    with pytest.raises(ValueError, match="'text'"):
        indexes.save(tmp_path / "mine")
    with pytest.raises(ValueError, match="not the manifest of several"):
        indexes.save(tmp_path / "mine" / "text")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        indexes.save(tmp_path / "file")
    indexes.save(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"not the manifest of an index.*several"):
        indexes.storing("text").save(tmp_path / "empty")


KILLS = {
    "writing the second": ("mmcl.index.side_by_side_files.add_version", 2, 9),
    "before the switch": ("os.replace", 1, 9),
    "after the switch": ("mmcl.index.side_by_side_files.switch", 1, 4),
    "switching the second alone": ("os.replace", 3, 4),
    "cleaning up the second": ("mmcl.index.side_by_side_files.remove_other_versions", 2, 4),
}
"""{when: (what is called, for which time, the items that are there afterwards)}."""
KILLED = """
import json, os, sys
from pathlib import Path
import numpy as np
from mmcl.index.side_by_side import TupleIndexes
from mmcl.scores import SumOfPairs
kills, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
os.fsync = lambda _: None  # a process that dies loses nothing that the system has
score, stored = SumOfPairs(("a", "b", "c"), 9), [("a", "b"), ("c",)]
old, new = (TupleIndexes.build(score, {n: np.eye(9)[:rows] for n in "abc"}, stored=stored) for rows in (9, 4))
for when, (place, count, _) in kills.items():
    module, _, name = place.rpartition(".")
    real = getattr(sys.modules[module], name)
    old.save(folder / when)
    for path in (folder / when, folder / f"{when}, the first time"):
        left = count
        def die(*args, **options):
            global left
            left -= 1
            return real(*args, **options) if left else os._exit(9)
        if not os.fork():
            setattr(sys.modules[module], name, die)
            new.save(path)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 9, when
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder with the folders of savers that died, by when."""
    folder = tmp_path_factory.mktemp("killed")
    subprocess.run([sys.executable, "-c", KILLED, json.dumps(KILLS), str(folder)], check=True)
    return folder


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("when", KILLS)
def test_a_kill_at_any_step_leaves_all_the_old_or_all_the_new(when, first, killed):
    path = killed / (f"{when}, the first time" if first else when)
    after = KILLS[when][2]
    if first and after == 9:
        with pytest.raises(FileNotFoundError, match="no index"):
            TupleIndexes.load(path)
        return
    for alone in path.glob("*/manifest.json"):
        assert len(TupleIndex.load(alone.parent)) in (4, 9)
    loaded = TupleIndexes.load(path)
    assert [len(loaded.storing(stored)) for stored in loaded.stored] == [after, after]
    loaded.verify()
    loaded.add({name: np.eye(9)[:1] for name in "abc"})
    loaded.save(path)
    assert len(TupleIndexes.load(path)) == after + 1
    assert [len([each for each in folder.iterdir() if each.is_dir()]) for folder in path.glob("*/")] == [1, 1]


@pytest.mark.parametrize("step", ["mmcl.index.store.os.replace", "pyarrow.parquet.write_table"])
def test_a_full_disk_leaves_the_old_versions(step, build_all, items, tmp_path, monkeypatch):
    build_all(rows=9, stored=TWO).save(tmp_path / "all")

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(OSError, match="No space"):
            build_all(stored=TWO).save(tmp_path / "all")
    assert len(TupleIndexes.load(tmp_path / "all")) == 9
    assert len([each for each in (tmp_path / "all" / "text").iterdir() if each.is_dir()]) == 1


def test_readers_see_all_of_one_version_while_writers_write(build_all, tmp_path):

    many, failures = [build_all(rows=rows, stored=TWO) for rows in (11, 12)], []
    many[0].save(tmp_path / "all")

    def write(indexes):
        try:
            for _ in range(4):
                indexes.save(tmp_path / "all", replace=True)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(each,)) for each in many]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        loaded = TupleIndexes.load(tmp_path / "all")
        seen.add(tuple(len(loaded.storing(names)) for names in TWO))
    for thread in threads:
        thread.join()
    assert failures == []
    assert seen <= {(11, 11), (12, 12)}


def test_another_writer_s_items_are_not_lost_under_another_name_of_the_folder(build_all, items, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_all(stored=TWO).save("x")
    one, other = TupleIndexes.load("x"), TupleIndexes.load("x")
    one.add(some(items, [60]), ids=["one"])
    one.save("x")
    other.add(some(items, [61]), ids=["other"])
    with pytest.raises(ValueError, match="another writer"):
        other.save(tmp_path / "x")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir("below")
    one.verify()
    assert "one" in TupleIndexes.load(tmp_path / "x")


def test_each_folder_s_version_is_remembered(build_all, items, tmp_path):
    indexes = build_all(stored=TWO)
    for folder in ("p", "q", "p", "q"):
        indexes.save(tmp_path / folder)
    other = TupleIndexes.load(tmp_path / "p")
    other.add(some(items, [60]), ids=["other"])
    other.save(tmp_path / "p")
    indexes.save(tmp_path / "q")
    with pytest.raises(ValueError, match="another writer"):
        indexes.save(tmp_path / "p")
    assert "other" in TupleIndexes.load(tmp_path / "p")
    loaded = TupleIndexes.load(tmp_path / "q")
    loaded.save(tmp_path / "elsewhere")
    loaded.save(tmp_path / "q")
    with pytest.raises(ValueError, match="another writer"):
        indexes.save(tmp_path / "q")


@pytest.mark.parametrize(
    "step",
    [
        "mmcl.index.side_by_side_files.write_manifest",
        "mmcl.index.side_by_side_files.switch",
        "mmcl.index.side_by_side_files.remove_other_versions",
        "mmcl.index.store.os.replace",
        "mmcl.index.store.sync",
    ],
)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failure_behind_the_switch_leaves_the_next_save_its_own(error, step, build_all, items, tmp_path, monkeypatch):
    """Once the new versions count they are this writer's, wherever an interrupt comes."""
    indexes = build_all(stored=TWO)
    indexes.save(tmp_path / "all")
    indexes.add(some(items, [60]), ids=["new"])
    real, failed = pkgutil.resolve_name(step), []
    manifest = (tmp_path / "all" / "manifest.json").read_bytes()

    def fail(*args):
        found = real(*args)
        if not failed and (tmp_path / "all" / "manifest.json").read_bytes() != manifest:
            failed.append(args)
            raise error
        return found

    with monkeypatch.context() as patch:
        patch.setattr(step, fail)
        with pytest.raises(error):
            indexes.save(tmp_path / "all")
    assert failed
    assert "new" in TupleIndexes.load(tmp_path / "all")
    indexes.remove("item 0")
    indexes.save(tmp_path / "all")
    indexes.storing("text").verify()
    loaded = TupleIndexes.load(tmp_path / "all")
    assert len(loaded) == 60 and "new" in loaded and "item 0" not in loaded
    for folder in ("image+audio", "text"):
        assert len([each for each in (tmp_path / "all" / folder).iterdir() if each.is_dir()]) == 1
