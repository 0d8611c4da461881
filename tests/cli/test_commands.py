import json
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest
from typer.testing import CliRunner

from mmcl import MultimodalModel
from mmcl.cli import app

WORDS = ["zero", "one", "two", "three"]
RECIPE = """
out = "run"
[data]
source = "data.parquet"
columns = { a = "left" }
groups = { text = "equal" }
[score]
name = "hadamard"
dim = 16
[encoders.a]
name = "vectors"
width = 4
[encoders.b]
name = "vectors"
width = 4
[encoders.text]
name = "categories"
[train]
epochs = 12
batch_size = 64
lr = 1e-2
"""


def mmcl(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A recipe, its data, and what train, embed and index build made of them."""
    folder = tmp_path_factory.mktemp("work é")
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 4, (2, 640))
    rows = {"left": np.eye(4)[a].tolist(), "b": np.eye(4)[b].tolist(), "text": [WORDS[i] for i in (a + b) % 4]}
    rows |= {"i": a.tolist(), "j": b.tolist()}
    datasets.Dataset.from_dict(rows).to_parquet(folder / "data.parquet")
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "pairs.toml").write_text('model = "run/model"\nembeddings = "emb"\nmodalities = ["a", "b"]\n')
    for step in (
        ("train", folder / "recipe.toml", "--json"),
        ("embed", folder / "run/model", folder / "data.parquet", "--out", folder / "emb", "--column", "a=left"),
        ("index", "build", folder / "pairs.toml"),
    ):
        result = mmcl(*step)
        assert result.exit_code == 0, result.output
    return folder


def test_search_finds_tuples_whose_sum_is_the_word(folder):
    result = mmcl(
        "index", "search", folder / "built/pairs", "--model", folder / "run/model", "--query", "text=two", "--json"
    )
    hits = json.loads(result.stdout)["hits"]
    assert result.exit_code == 0
    assert len(hits) == 10
    assert all((hit["i"] + hit["j"]) % 4 == 2 for hit in hits)
    assert all(earlier["score"] >= later["score"] for earlier, later in pairwise(hits))
    read = mmcl(
        "index", "search", folder / "built/pairs", "--model", folder / "run/model", "--query", "text=two", "-k", 3
    )
    assert len(read.stdout.splitlines()) == 3
    assert "text=two" in read.stdout


def test_zero_shot_takes_values_of_the_other_modalities(folder, tmp_path):
    np.save(tmp_path / "b.npy", np.eye(4)[2])
    arguments = ("--classes", ",".join(WORDS), "--query", "a=[0, 1, 0, 0]", "--query", f"b={tmp_path / 'b.npy'}")
    result = mmcl("zero-shot", folder / "run/model", *arguments, "--json")
    (prediction,) = json.loads(result.stdout)["predictions"]
    assert prediction["class"] == "three"
    assert sum(prediction["probabilities"].values()) == pytest.approx(1)


def test_info_and_verify_tell_what_an_index_holds(folder):
    info = json.loads(mmcl("index", "info", folder / "built/pairs", "--json").stdout)
    assert (info["count"], info["modalities"], info["query_modalities"]) == (640, ["a", "b"], ["text"])
    assert json.loads(mmcl("index", "verify", folder / "built/pairs", "--json").stdout)["ok"] is True


def test_an_index_recipe_takes_ids_and_factory(folder, tmp_path):
    recipe = folder / "named.toml"
    recipe.write_text((folder / "pairs.toml").read_text() + 'ids = "key"\nfactory = "HNSW8"\n')
    result = mmcl("index", "build", recipe, "--out", tmp_path / "named", "--json")
    assert json.loads(result.stdout)["factory"] == "HNSW8"
    recipe.write_text(recipe.read_text().replace('"key"', '"name"'))
    wrong = mmcl("index", "build", recipe, "--out", tmp_path / "wrong")
    assert wrong.exit_code == 1
    assert "no column 'name'; it has ['key'," in wrong.stderr


def test_tuples_are_added_replaced_and_removed_on_disk(folder, tmp_path):
    recipe = folder / "life.toml"
    recipe.write_text((folder / "pairs.toml").read_text() + 'ids = "key"\n')
    out = tmp_path / "life"
    assert mmcl("index", "build", recipe, "--out", out).exit_code == 0
    removed = mmcl("index", "remove", out, 3, 5, "--json")
    assert json.loads(removed.stdout) == {"path": str(out), "removed": 2, "count": 638}
    again = mmcl("index", "remove", out, 4, 5)
    assert again.exit_code == 1
    assert "no item 5" in again.stderr
    known = mmcl("index", "add", out, folder / "emb", "--ids", "key")
    assert known.exit_code == 1
    assert "id 0 (row 0) is in the index already" in known.stderr
    replaced = mmcl("index", "add", out, folder / "emb", "--ids", "key", "--upsert", "--json")
    assert json.loads(replaced.stdout) == {"path": str(out), "before": 638, "count": 640}
    assert json.loads(mmcl("index", "compact", out, "--json").stdout)["count"] == 640
    assert mmcl("index", "add", out, folder / "emb", "--upsert").exit_code == 1
    assert mmcl("index", "remove", out, "three").exit_code == 1
    assert mmcl("index", "verify", out).exit_code == 0


def test_tune_keeps_a_setting_and_draws_the_curve(folder, tmp_path):
    recipe = folder / "lists.toml"
    recipe.write_text((folder / "pairs.toml").read_text() + 'factory = "IVF8,Flat"\n')
    out = tmp_path / "lists"
    assert mmcl("index", "build", recipe, "--out", out).exit_code == 0
    result = mmcl("index", "tune", out, "--queries", folder / "emb", "--modality", "text", "--json")
    told = json.loads(result.stdout)
    assert told["reached"] and told["recall"] >= 0.95
    assert all(Path(file).is_file() for file in told["curve"])
    info = json.loads(mmcl("index", "info", out, "--json").stdout)
    assert info["search_parameters"] == told["parameters"]
    assert mmcl("index", "tune", out, "--queries", folder / "emb", "--modality", "smell").exit_code == 1
    assert mmcl("index", "tune", out, "--queries", folder / "emb", "--modality", "a").exit_code == 1


def test_a_recipe_takes_a_bank_and_a_budget(folder, tmp_path):
    recipe = folder / "bank.toml"
    recipe.write_text((folder / "pairs.toml").read_text() + 'bank = 64\nmemory_budget = "1MB"\n')
    told = json.loads(mmcl("index", "build", recipe, "--out", tmp_path / "bank", "--json").stdout)
    assert told["bank"] == {"modalities": ["text"], "rows": 64}
    assert told["kind"] == "pmi"
    assert "640 vectors" in told["reason"]
    recipe.write_text((folder / "pairs.toml").read_text() + 'memory_budget = "1kB"\n')
    wrong = mmcl("index", "build", recipe, "--out", tmp_path / "small")
    assert wrong.exit_code == 1
    assert "the least is" in wrong.stderr


def test_a_recipe_goes_to_milvus_by_one_line(folder, tmp_path):
    recipe = folder / "milvus.toml"
    recipe.write_text((folder / "pairs.toml").read_text() + f'backend = "milvus"\nuri = "{tmp_path}/tuples.db"\n')
    built = mmcl("index", "build", recipe, "--out", tmp_path / "there", "--json")
    assert json.loads(built.stdout)["backend"] == "milvus"
    search = ("--model", folder / "run/model", "--query", "text=two", "-k", 5, "--where", "i = 1", "--json")
    there = json.loads(mmcl("index", "search", tmp_path / "there", *search).stdout)["hits"]
    here = json.loads(mmcl("index", "search", folder / "built/pairs", *search).stdout)["hits"]
    assert [hit["score"] for hit in there] == pytest.approx([hit["score"] for hit in here], rel=1e-4)
    assert {hit["i"] for hit in there} == {1}


def test_the_sum_of_both_scores_trains_and_is_indexed(folder, tmp_path):
    recipe = RECIPE.replace('"hadamard"', '"sum_of_both"').replace("epochs = 12", "epochs = 1")
    (tmp_path / "recipe.toml").write_text(recipe)
    (tmp_path / "data.parquet").symlink_to(folder / "data.parquet")
    assert mmcl("train", tmp_path / "recipe.toml").exit_code == 0
    model = MultimodalModel.from_pretrained(tmp_path / "run/model")
    assert (type(model.score).__name__, model.score.width) == ("SumOfScores", 2 * 16 + 2)


def test_verify_names_the_file_that_differs(folder, tmp_path):
    assert mmcl("index", "build", folder / "pairs.toml", "--out", tmp_path / "copy").exit_code == 0
    (path,) = tmp_path.rglob("index.faiss")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    result = mmcl("index", "verify", tmp_path / "copy")
    assert result.exit_code == 1
    assert "index.faiss" in result.stderr


@pytest.mark.parametrize("table", ["encoders", "losses", "scores", "recipes"])
def test_list_shows_every_name_and_its_options(table):
    rows = json.loads(mmcl("list", table, "--json").stdout)
    expected = {
        "encoders": "open_clip_image",
        "losses": "contrastive",
        "scores": "hadamard",
        "recipes": "train",
    }[table]
    assert expected in rows
    assert all(row["about"] for row in rows.values())
    assert expected in mmcl("list", table).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("list", "colours"), 2, "Invalid value"),
        (("train", "nowhere.toml"), 1, "no recipe at nowhere.toml"),
        (("train",), 2, "Missing argument"),
        (("trian",), 2, "No such command"),
        (("index", "info", "nowhere"), 1, "nowhere"),
        (("index", "search", "nowhere", "--model", "m"), 2, "Missing option"),
        (("zero-shot", "nowhere/model", "--classes", "a", "--query", "a=1"), 1, "nowhere/model"),
        (("demo", "--seed", "-1"), 2, "Invalid value"),
        (("embed", "m", "d.parquet", "--out", "x", "--batch-size", "0"), 2, "Invalid value"),
    ],
)
def test_wrong_input_ends_with_its_exit_code_and_one_message(tmp_path, monkeypatch, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    result = mmcl(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs = 12", "epoch = 12", "unknown key 'train.epoch'; the keys there are"),
        ("dim = 16", "dims = 16", r"[score]: "),
        (
            'name = "hadamard"',
            'name = "clip"',
            "unknown score 'clip'; choose from ['hadamard', 'sum_of_both', 'sum_of_pairs']",
        ),
        ("width = 4", "widht = 4", "[encoders.a]: "),
        ('name = "categories"', 'name = "bert"', "unknown encoder 'bert'; choose from"),
        ('a = "left"', 'a = "up"', "no column 'up' for modality 'a'"),
        ("data.parquet", "date.parquet", "no data at"),
        ("[data]", "[data", "recipe.toml: "),
        ("lr = 1e-2", "lr = -1", "train.lr = -1"),
        ("width = 4", "width = 5", "a (column 'left'): expected vectors of shape (n, 5), got (64, 4)"),
        ("dim = 16", "dim = 0", "[score]: dim must be a positive integer, got 0"),
    ],
)
def test_a_wrong_recipe_says_which_key_and_what_there_is(folder, tmp_path, old, new, message):
    (tmp_path / "recipe.toml").write_text(RECIPE.replace(old, new, 1))
    (tmp_path / "data.parquet").symlink_to(folder / "data.parquet")
    result = mmcl("train", tmp_path / "recipe.toml")
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_query_that_is_not_name_equals_value_is_a_usage_error(folder):
    result = mmcl("index", "search", folder / "built/pairs", "--model", folder / "run/model", "--query", "seven")
    assert result.exit_code == 2
    assert "NAME=VALUE" in result.stderr
    unknown = mmcl("index", "search", folder / "built/pairs", "--model", folder / "run/model", "--query", "a=[1,0,0,0]")
    assert unknown.exit_code == 1
    assert "'a'" in unknown.stderr


def test_numbers_and_class_names_can_be_asked_for(tmp_path):
    """Categories that are numbers, and the names of a label column."""
    rng = np.random.default_rng(0)
    a = rng.integers(0, 2, 256)
    rows = {"a": np.eye(4)[a].tolist(), "number": a.tolist(), "label": a.tolist()}
    data = datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["blue", "red"]))
    data.to_parquet(tmp_path / "data.parquet")
    for column, classes in (("number", ["0", "1"]), ("label", ["blue", "red"])):
        recipe = RECIPE.replace('[encoders.b]\nname = "vectors"\nwidth = 4\n', "").replace(
            'out = "run"', f'out = "{column}"'
        )
        recipe = recipe.replace('a = "left"', f'text = "{column}"').replace("epochs = 12", "epochs = 5")
        (tmp_path / "recipe.toml").write_text(recipe)
        trained = mmcl("train", tmp_path / "recipe.toml")
        assert trained.exit_code == 0, trained.stderr
        asked = ("--classes", ",".join(classes), "--query", "a=[0, 1, 0, 0]", "--json")
        result = mmcl("zero-shot", tmp_path / column / "model", *asked)
        assert json.loads(result.stdout)["predictions"][0]["class"] == classes[1], result.stderr


def test_a_finished_run_is_not_overwritten_and_resume_returns_it(folder):
    again = mmcl("train", folder / "recipe.toml")
    assert again.exit_code == 1
    assert "--resume" in again.stderr
    resumed = mmcl("train", folder / "recipe.toml", "--resume", "--json")
    assert json.loads(resumed.stdout)["steps"] == 120


def test_an_interrupted_training_ends_with_130_and_a_checkpoint(folder, tmp_path, monkeypatch):
    import os
    import signal

    import mmcl.training as training

    def interrupt(self, step, lr, kept=training.Reporter.record):
        kept(self, step, lr)
        if step == 10:  # looked at already: the next step ends the run
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(training.Reporter, "record", interrupt)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "data.parquet").symlink_to(folder / "data.parquet")
    result = mmcl("train", tmp_path / "recipe.toml")
    assert result.exit_code == 130
    assert "stopped after step 11 of 120" in result.stderr
    assert (tmp_path / "run/checkpoints/step-00000011/state.pt").is_file()


def test_every_command_shows_an_example_in_its_help():
    for command in (
        ["demo"],
        ["train"],
        ["embed"],
        ["zero-shot"],
        ["list"],
        *(["index", x] for x in ("build", "search", "add", "remove", "compact", "tune", "info", "verify")),
    ):
        result = mmcl(*command, "--help")
        assert result.exit_code == 0
        assert f"mmcl {' '.join(command)}" in result.stdout.replace("Usage:", "", 1).split("Example", 1)[1]
