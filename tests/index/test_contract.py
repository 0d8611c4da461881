"""What every way to hold tuples promises: the same calls, the same answers, brute force's to 1e-5 of the terms' sum."""

import copy
import itertools

import numpy as np
import pytest

from mmcl.index import TupleIndex, exact_backend, local_files

LISTS = {"nprobe": 4}
WAYS = {
    "Flat": ({"factory": "Flat"}, {}),
    "IVF": ({"factory": "IVF4,Flat"}, LISTS),
    "MIPS and IVF": ({"factory": "MIPS,IVF4,Flat"}, LISTS),
    "codes, ranked anew": ({"factory": "IVF4,PQ4x4,RFlat"}, {**LISTS, "k_factor": 1e6}),
    "IVF on disk": ({"factory": "IVF4,Flat", "out": True}, LISTS),
    "Flat on disk": ({"factory": "Flat", "out": True}, {}),
    "Exact": ({"factory": "Exact"}, {}),
    "Exact on disk": ({"factory": "Exact", "out": True}, {}),
    "Milvus Lite": ({"backend": "milvus", "uri": "lite"}, {}),
    "Milvus server": ({"backend": "milvus", "uri": "server"}, {}),
}
"""{way: (how it is built, what makes a search look at every item)}."""
STORED, DIM, POOL, ROWS = ("image", "audio"), 16, 90, 60
numbers = itertools.count()


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """How tuples are held; `Exact` is itself also where it would not pay."""
    for module in (exact_backend, local_files):
        monkeypatch.setattr(module, "exact_pays", lambda device: True)
    return request.param


@pytest.fixture
def build_it(way, uris, make_score, items, tmp_path):
    """build_it(rows=60, kind=..., items=..., **options): an index of the first rows, held that way."""

    def make(rows=ROWS, kind="pairs_and_neutral", given=None, **options):
        held = dict(WAYS[way][0])
        if held.pop("out", False):
            held["out"] = tmp_path / f"built-{next(numbers)}"
        if "uri" in held:
            held |= {"uri": uris[held["uri"]], "collection": f"contract{next(numbers)}"}
        given = given or {name: items[name][:rows] for name in STORED}
        return TupleIndex.build(make_score(kind, 3, DIM), given, **held, **options)

    return make


@pytest.fixture
def check(way, make_score, items, queries, tolerance):
    """check(index, {id: row of `items`}): all of it, and the best 7, as brute force ranks them in float64."""
    score = make_score("pairs_and_neutral", 3, DIM)

    def compare(index, stored, question=None, given=items, kept=STORED, **options):
        question = question or {"text": queries[:4]}
        absent = tuple(set(score.modalities) - set(kept) - set(question))
        tuples = {name: np.asarray(given[name][:POOL]) for name in kept}
        true, bound = in_float64(score, tuples, question, absent), tolerance(score, tuples, question, absent)
        keys, there = list(stored), list(stored.values())
        for k in (7, len(stored) + 2):
            hits = index.search(question, k=k, **WAYS[way][1], **options)
            count = min(k, len(stored))
            assert hits.counts.tolist() == [count] * len(true) and hits.exact and hits.kind == "score"
            assert hits.ids.shape == hits.scores.shape == (len(true), k) and hits.scores.dtype == np.float32
            for row, ids in enumerate(hits.ids.tolist()):
                found = [stored[key] for key in ids[:count]]
                assert len(set(found)) == count
                assert (np.abs(hits.scores[row, :count] - true[row, found]) <= bound[row, found]).all()
                best = np.sort(true[row, there])[::-1][:count]
                assert (np.abs(best - true[row, found]) <= 2 * bound[row].max()).all()
                assert (hits.scores[row, count:] == -np.inf).all()
                assert set(ids[count:]) <= {"" if keys and isinstance(keys[0], str) else -1}

    return compare


def in_float64(score, items, question, absent):
    """(nq, n) scores from vectors in float64; that these are `score(x)` is what test_separability.py is for."""
    score = copy.deepcopy(score).double()
    asked = {name: np.float64(np.atleast_2d(rows)) for name, rows in question.items()}
    query = score.query_vectors(asked, absent=absent).detach().numpy()
    return query @ score.item_vectors({name: np.float64(rows) for name, rows in items.items()}).detach().numpy().T


def read_only_map(rows, folder):
    file = folder / f"rows-{next(numbers)}.npy"
    np.save(file, rows)
    return np.load(file, mmap_mode="r")


LAYOUTS = {
    "float16": lambda rows, folder: rows.astype(np.float16),
    "float64": lambda rows, folder: rows.astype(np.float64),
    "strided": lambda rows, folder: np.repeat(np.repeat(rows, 2, axis=0), 3, axis=1)[::2, ::3],
    "Fortran": lambda rows, folder: np.asfortranarray(rows),
    "read-only map": read_only_map,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_every_layout(layout, build_it, check, items, queries, tmp_path):
    given = {name: LAYOUTS[layout](items[name][:POOL], tmp_path) for name in STORED}
    index = build_it(given={name: rows[:ROWS] for name, rows in given.items()})
    check(index, {row: row for row in range(ROWS)}, {"text": LAYOUTS[layout](queries[:3], tmp_path)}, given)


def test_every_part_of_the_query(build_it, check, items, queries, unit_rows):
    index = build_it(given={"image": items["image"][:ROWS]})
    rows = {"text": queries[:3], "audio": unit_rows(3, DIM, seed=5).numpy()}
    for names in (("text",), ("audio",), ("text", "audio")):
        check(index, {row: row for row in range(ROWS)}, {name: rows[name] for name in names}, kept=("image",))


@pytest.mark.parametrize("named", [False, True])
def test_a_life_and_a_second_one_from_disk(named, build_it, check, items, tmp_path):
    key = (lambda row: f"항목 {row}") if named else (lambda row: row)
    stored = {key(row): row for row in range(ROWS)}
    index = build_it(ids=list(stored), metadata={"row": list(range(ROWS))})
    path = tmp_path / "saved"

    def step(ids, rows, change):
        change({name: items[name][rows] for name in STORED}, ids=ids, metadata={"row": rows})
        stored.update(zip(ids, rows, strict=True))
        check(index, stored)

    for life in range(2):
        gone = [key(row) for row in (0, 7, 59)]
        index.remove(gone)
        for each in gone:
            del stored[each]
            assert each not in index
        check(index, stored)
        step([key(60), key(61)], [60, 61], index.upsert)
        step([key(7)], [62 + life], index.add)  # an id that was there is the new item only
        step([key(3), key(0)], [70 + life, 80 + life], index.upsert)
        step([key(59)], [59], index.add)
        index.compact()
        check(index, stored)
        assert len(index) == len(stored) and set(index.ids().tolist()) == set(stored)
        assert index.get([key(7), key(3)]) == [{"row": 62 + life}, {"row": 70 + life}]
        vectors = index.score.item_vectors({name: items[name][list(stored.values())] for name in STORED})
        np.testing.assert_allclose(index.vectors(list(stored)), vectors.detach(), rtol=1e-6, atol=1e-6)
        index.save(path)
        index = TupleIndex.load(path)
        index.verify()
        check(index, stored)
    path.rename(tmp_path / "moved away")
    check(TupleIndex.load(tmp_path / "moved away"), stored)


def test_ids_are_all_of_one_kind(build_it, check, items):
    pair = {name: items[name][60:62] for name in STORED}
    named = build_it(ids=[f"{row}" for row in range(ROWS)])
    for ids, told in (([5, 6], "ids of this index are strings, these are integers: 5"), (None, "give one for each")):
        with pytest.raises(ValueError, match=told):
            named.add(pair, ids=ids)
    with pytest.raises(KeyError, match="5"):
        named.remove([5])
    assert "5" in named and 5 not in named
    check(named, {f"{row}": row for row in range(ROWS)})


def test_emptied_and_filled_again(build_it, check, items):
    index = build_it()
    index.remove(list(range(ROWS)))
    assert len(index) == 0
    check(index, {})
    index.add({name: items[name][:5] for name in STORED})
    check(index, {ROWS + row: row for row in range(5)})


def test_begun_without_items(way, build_it, check, items):
    if "IVF" in WAYS[way][0].get("factory", ""):
        with pytest.raises(ValueError, match="IVF"):
            build_it(rows=0)
        return
    index = build_it(rows=0, metadata={"year": []})
    check(index, {})
    check(index, {}, where="year > 2000")
    index.add({name: items[name][:5] for name in STORED}, metadata={"year": [2000, 2001, None, 2003, 2004]})
    check(index, {row: row for row in (1, 3, 4)}, where="year > 2000")


def test_metadata_and_filters(build_it, check):
    years = [None if row % 10 == 3 else 1990 + row for row in range(ROWS)]
    tags = [None if row % 7 == 0 else ["a", "b"][: row % 3] for row in range(ROWS)]
    index = build_it(metadata={"year": years, "이름": [f"곡 '{row}'" for row in range(ROWS)], "tags": tags})
    for where, meets in {
        ("year >= ?", (2010,)): lambda row: row % 10 != 3 and row >= 20,
        ("year is null", ()): lambda row: row % 10 == 3,
        ('year < $y or "이름" = $name', (("y", 1995), ("name", "곡 '59'"))): lambda row: row in (0, 1, 2, 4, 59),
        ("id in (4, 5) and year > 1900", ()): lambda row: row in (4, 5),
        ("list_contains(tags, ?)", ("b",)): lambda row: row % 7 and row % 3 == 2,
        ("tags is null and year < 2020", ()): lambda row: row % 7 == 0 and row % 10 != 3 and row < 30,
        ("not list_contains(tags, 'a')", ()): lambda row: row % 7 and row % 3 == 0,
        ("year > 9999", ()): lambda row: False,
    }.items():
        expression, values = where
        values = dict(values) if "$" in expression else list(values)
        check(index, {row: row for row in range(ROWS) if meets(row)}, where=(expression, values))
    hits = index.search({"text": np.ones(DIM)}, k=1, where=("year = ?", [2000]))
    assert hits.metadata == [[{"year": 2000, "이름": "곡 '10'", "tags": ["a"]}]]
    with pytest.raises(ValueError, match="no metadata column 'jahr'"):
        index.search({"text": np.ones(DIM)}, where="jahr = 1")


def test_a_bank_is_one_more_coordinate(way, build_it, make_score, items, queries, unit_rows):
    bank = {"text": unit_rows(50, DIM, seed=3).numpy()}
    index = build_it(bank=bank)
    index.add({name: items[name][ROWS:POOL] for name in STORED})
    score = make_score("pairs_and_neutral", 3, DIM)
    tuples = {name: items[name][:POOL] for name in STORED}
    to_bank = in_float64(score, tuples, bank, ())
    largest = to_bank.max(axis=0)
    expected = in_float64(score, tuples, {"text": queries[:4]}, ())
    expected -= largest + np.log(np.exp(to_bank - largest).mean(axis=0))
    best = np.argsort(-expected, axis=1)[:, :5]
    hits = index.search({"text": queries[:4]}, k=5, **WAYS[way][1])
    assert hits.kind == "pmi"
    np.testing.assert_array_equal(hits.ids, best)
    np.testing.assert_allclose(hits.scores, np.take_along_axis(expected, best, axis=1), atol=1e-4)


def test_what_is_wrong_is_refused_and_changes_nothing(build_it, check, items):
    index = build_it()
    pair = {name: items[name][60:62] for name in STORED}
    for told, spoil in {
        "audio: row 1 holds NaN": lambda rows: np.where(np.arange(2)[:, None] == 1, np.nan, rows),
        "row 0 holds an infinite value": lambda rows: np.where(np.arange(2)[:, None] == 0, np.inf, rows),
        "row 1 holds only zeros": lambda rows: rows * [[1], [0]],
        "audio.*16 columns": lambda rows: rows[:, :15],
    }.items():
        with pytest.raises(ValueError, match=told):
            index.add({"image": pair["image"], "audio": spoil(pair["audio"])})
    for ids, told in (([60, 5], "id 5 .*upsert"), ([60, 60], "60"), ([60, -1], "-1"), (["a", "b"], "integers")):
        with pytest.raises(ValueError, match=told):
            index.add(pair, ids=ids)
    for ids in ([1, 99], ["1"], [1.5], [-1]):
        with pytest.raises(KeyError):
            index.remove(ids)
    with pytest.raises(KeyError):
        index.get([99])
    with pytest.raises(ValueError, match="k must be"):
        index.search({"text": items["text"][:1]}, k=0)
    with pytest.raises(ValueError, match="stored in this index"):
        index.search({"image": items["image"][:1]})
    with pytest.raises(ValueError, match="unknown search parameter 'ef'"):
        index.search({"text": items["text"][:1]}, ef=3)
    check(index, {row: row for row in range(ROWS)})


def test_one_query_and_none(build_it, items, queries):
    index = build_it()
    one = index.search({"text": queries[0]}, k=3)
    assert one.ids.shape == (1, 3) and [len(row) for row in one] == [3]
    np.testing.assert_array_equal(one.ids, index.search({"text": queries[:1].tolist()}, k=3).ids)
    assert index.search({"text": np.empty((0, DIM))}, k=3).ids.shape == (0, 3)
