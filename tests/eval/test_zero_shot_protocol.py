"""The zero-shot protocol on tiny models whose vectors are known, and as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import protocols
import pytest
import torch
import zero_shot
import zero_shot_task
from sklearn.metrics import balanced_accuracy_score
from torch.nn import functional as F

from mmcl.encoders import categories, vectors
from mmcl.metrics import expected_calibration_error, fit_temperature
from mmcl.model import MultimodalModel
from mmcl.scores import Hadamard, SumOfPairs
from mmcl.zero_shot import ZeroShotClassifier

EVAL = Path(__file__).parents[2] / "eval"

DIM = 8
CLASSES = ["cat", "dog", "owl", "fox", "elk", "bee"]
TEMPLATES = ["{}", "a {}", "one {} more"]
SCORES = {"hadamard": Hadamard, "pairs": SumOfPairs}


def tiny_model(kind="pairs", modalities=("image", "audio", "text"), seed=0):
    """Images and sounds are vectors, texts words and phrases; the phrases' weights have very different norms."""
    torch.manual_seed(seed)
    texts = [template.format(name) for template in TEMPLATES for name in CLASSES]
    encoders = {name: vectors(4, DIM, hidden=16) for name in modalities if name != "text"}
    model = MultimodalModel({**encoders, "text": categories(texts, DIM)}, SCORES[kind](modalities, DIM))
    with torch.no_grad():
        for weight in model.encoders["text"].parameters():
            weight *= torch.linspace(0.1, 9, len(texts))[:, None]
    return model.eval()


def rows(count=60, seed=0, classes=CLASSES):
    """Random vectors whose first number goes with the class, a little."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, len(classes), count)
    values = {name: generator.standard_normal((count, 4)) + labels[:, None] / 3 for name in ("image", "audio")}
    columns = {name: value.astype(np.float32).tolist() for name, value in values.items()}
    return datasets.Dataset.from_dict({**columns, "text": [classes[label] for label in labels]})


def task_for(model, classes=CLASSES, templates=TEMPLATES, validation=True):
    others = [name for name in model.modalities if name != "text"]
    parts = [rows(60, 0), rows(40, 1)]
    prompts = {name: [template.format(name) for template in templates] for name in classes}
    labels = [zero_shot_task.positions(part["text"][:], classes, "rows") for part in parts]
    made = [protocols.embedded(model, part, None, others) for part in parts]
    extra = (made[1], labels[1]) if validation else (None, None)
    return zero_shot_task.Task("tiny", "text", prompts, made[0], labels[0], *extra)


def records_of(model, **options):
    return zero_shot.protocol(protocols.Subject("tiny", "here", model), task_for(model, **options))


def test_every_subset_is_judged_and_metrics_are_those_of_the_classifier():
    model, data = tiny_model(), rows(60, 0)
    records = records_of(model)
    assert [tuple(record["query"]) for record in records] == [("image", "audio"), ("image",), ("audio",)]
    classifier = ZeroShotClassifier(model, CLASSES, TEMPLATES)
    for record in records:
        inputs = {name: data[name][:] for name in record["query"]}
        predicted, found = classifier.predict(inputs), record["metrics"]
        right = np.array([a == b for a, b in zip(predicted, data["text"][:])])
        assert found["acc1"] == pytest.approx(right.mean())
        assert found["mean_per_class_recall"] == pytest.approx(balanced_accuracy_score(data["text"][:], predicted))
        first = classifier.scores(inputs).topk(5, dim=1).indices.tolist()
        among = [CLASSES.index(label) in row for label, row in zip(data["text"][:], first)]
        assert found["acc5"] == pytest.approx(np.mean(among))
        labels = [CLASSES.index(label) for label in data["text"][:]]
        error = expected_calibration_error(classifier.probabilities(inputs), labels)
        assert found["ece"] == pytest.approx(error, abs=1e-6)
        counts = np.array(record["confusion"])
        assert counts.sum() == 60 and np.trace(counts) == right.sum()
        for place, name in enumerate(CLASSES):
            own = [hit for hit, label in zip(right, data["text"][:]) if label == name]
            assert record["per_class_accuracy"][name] == pytest.approx(np.mean(own))
            assert counts[place].sum() == len(own)
    assert len({record["metrics"]["log_loss"] for record in records}) == 3


def test_a_subset_that_the_score_cannot_do_is_recorded_with_the_reason():
    both, image, audio = records_of(tiny_model("hadamard"))
    assert both["metrics"] is not None
    assert image["metrics"] is None and "'audio' is absent" in image["not_possible"]
    assert audio["metrics"] is None and "'image' is absent" in audio["not_possible"]


def test_permuting_classes_permutes_predictions():
    model, order = tiny_model(), [3, 0, 5, 1, 4, 2]
    plain, permuted = records_of(model), records_of(model, classes=[CLASSES[place] for place in order])
    for before, after in zip(plain, permuted):
        np.testing.assert_array_equal(np.array(before["confusion"])[np.ix_(order, order)], after["confusion"])
        assert after["per_class_accuracy"] == before["per_class_accuracy"]
        for name, value in before["metrics"].items():
            assert after["metrics"][name] == pytest.approx(value, rel=1e-5)
        assert after["calibration"]["temperature"] == pytest.approx(before["calibration"]["temperature"], rel=1e-4)


def test_templates_may_come_in_any_order():
    model = tiny_model()
    plain, turned = records_of(model)[0], records_of(model, templates=TEMPLATES[::-1])[0]
    for name, value in plain["metrics"].items():
        assert turned["metrics"][name] == pytest.approx(value, rel=1e-5)
    assert turned["confusion"] == plain["confusion"]
    alone = [record["prompts"]["acc1_of_each_alone"] for record in (plain, turned)]
    assert alone[0] == alone[1][::-1]
    for template, accuracy in zip(TEMPLATES, alone[0]):
        assert records_of(model, templates=[template])[0]["metrics"]["acc1"] == accuracy


def test_the_prompt_ensemble_normalises_averages_and_normalises():
    model = tiny_model(modalities=("image", "text"))
    task = task_for(model)
    (weight,) = model.encoders["text"].parameters()
    unit = F.normalize(weight, dim=1).reshape(len(TEMPLATES), len(CLASSES), DIM)
    image = task.rows.embeddings(["image"])["image"]
    by_hand = (model.score.scale * image @ F.normalize(unit.mean(dim=0), dim=1).T).detach().numpy()
    classifier = ZeroShotClassifier(model, task.prompts)
    np.testing.assert_allclose(zero_shot.scores_of(classifier, task.rows, ["image"]), by_hand, atol=1e-5)
    unnormalised = F.normalize(weight.reshape(len(TEMPLATES), len(CLASSES), DIM).mean(dim=0), dim=1)
    assert not np.allclose((model.score.scale * image @ unnormalised.T).detach().numpy(), by_hand, atol=1e-2)


def test_the_temperature_is_fitted_on_validation_rows_alone():
    model = tiny_model()
    task = task_for(model)
    found = records_of(model)[0]
    classifier = ZeroShotClassifier(model, task.prompts)
    validation = zero_shot.scores_of(classifier, task.validation, ("image", "audio"))
    assert found["calibration"]["temperature"] == pytest.approx(fit_temperature(validation, task.validation_labels))
    assert found["calibration"]["validation_rows"] == 40
    assert found["metrics"]["log_loss_with_temperature"] < found["metrics"]["log_loss"]
    bare = records_of(model, validation=False)[0]
    assert bare["calibration"]["temperature"] is None and "ece_with_temperature" not in bare["metrics"]
    assert bare["metrics"]["ece"] == found["metrics"]["ece"]


def test_counts_by_hand():
    scores = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 1.0], [5.0, 0.0, 1.0]])
    assert zero_shot.top_k_accuracy(scores, np.array([0, 2, 2]), 1) == pytest.approx(1 / 3)
    assert zero_shot.top_k_accuracy(scores, np.array([1, 2, 2]), 1) == 0, "the first of equals is predicted"
    assert zero_shot.top_k_accuracy(scores, np.array([1, 2, 1]), 2) == pytest.approx(2 / 3)
    confusion = np.array([[2, 0, 0], [3, 1, 0], [0, 0, 0]])
    np.testing.assert_allclose(zero_shot.class_recalls(confusion), [1, 0.25, np.nan])
    wrong = zero_shot.most_confused(confusion, ["a", "b", "c"])
    assert wrong == [{"class": "b", "predicted": "a", "rows": 3}]


# As a user runs it.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """model/, test.parquet and validation.parquet."""
    folder = tmp_path_factory.mktemp("own")
    tiny_model().save_pretrained(folder / "model")
    rows(60, 0).rename_columns({"image": "photo", "text": "kind"}).to_parquet(folder / "test.parquet")
    rows(40, 1).rename_columns({"image": "photo", "text": "kind"}).to_parquet(folder / "validation.parquet")
    return folder


RECIPE = """
name = "mine"
model = "model"
label = "kind"
templates = ["{}", "a {}"]
[data]
source = "test.parquet"
columns = { image = "photo" }
[validation]
source = "validation.parquet"
columns = { image = "photo" }
"""


def run(folder, recipe, monkeypatch, script=zero_shot):
    """Exit code of the script, as it runs on a recipe; results in folder/out."""
    (folder / "recipe.toml").write_text(recipe)
    arguments = [str(folder / "recipe.toml"), "--out", str(folder / "out")]
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    with pytest.raises(SystemExit) as end:
        script.main()
    return end.value.code


def test_a_recipe_gives_records_and_pictures(folder, monkeypatch, capsys):
    assert run(folder, RECIPE, monkeypatch) == 0
    summary = json.loads((folder / "out/zero_shot.json").read_text())
    assert summary["command"].startswith("python eval/zero_shot.py ") and "recipe.toml" in summary["command"]
    expected = records_of(tiny_model(), templates=TEMPLATES[:2])
    assert len(summary["results"]) == 3
    for found, record in zip(summary["results"], expected):
        assert (found["dataset"], found["model"], found["task"]) == ("mine", "model", "zeroshot_classification")
        assert found["pretrained"] == str(folder / "model")
        assert {"acc1", "acc5", "mean_per_class_recall"} <= set(found["metrics"])
        assert found["metrics"]["acc1"] == pytest.approx(record["metrics"]["acc1"], abs=1e-6)
        assert found["classes"] == sorted(CLASSES)
        temperature = record["calibration"]["temperature"]
        assert found["calibration"]["temperature"] == pytest.approx(temperature, rel=1e-3)
    assert "image+audio" in capsys.readouterr().out
    for picture in ("zero_shot.png", "zero_shot_calibration.png"):
        assert (folder / "out" / picture).stat().st_size > 10_000


def test_classes_may_be_named_for_prompts_and_given_by_examples(folder, monkeypatch):
    named = "label = 'kind'\nclasses = { " + ", ".join(f'{name} = "a {name}"' for name in CLASSES) + " }"
    assert (
        run(folder, RECIPE.replace('label = "kind"', named).replace('templates = ["{}", "a {}"]', ""), monkeypatch) == 0
    )
    found = json.loads((folder / "out/zero_shot.json").read_text())["results"][0]
    expected = records_of(tiny_model(), templates=["a {}"])[0]
    assert found["metrics"]["acc1"] == pytest.approx(expected["metrics"]["acc1"], abs=1e-6)
    examples = RECIPE.replace('templates = ["{}", "a {}"]', 'examples = 3\ntarget = "audio"')
    text = 'columns = { image = "photo", text = "kind" }'
    assert run(folder, examples.replace('columns = { image = "photo" }', text), monkeypatch) == 0
    found = json.loads((folder / "out/zero_shot.json").read_text())["results"]
    assert [record["query"] for record in found] == [["image", "text"], ["image"], ["text"]]
    assert found[0]["prompts"]["per_class"] == len(found[0]["prompts"]["acc1_of_each_alone"]) == 3


def test_examples_are_the_first_rows_of_their_class():
    data = datasets.Dataset.from_dict({"audio": [1, 2, 2, 3, 4, 5], "kind": ["a", "b", "b", "a", "b", "a"]})
    prompts = zero_shot_task.example_prompts(data, "audio", data["kind"][:], ["b", "a"], 2)
    assert prompts == {"b": [2, 4], "a": [1, 3]}
    with pytest.raises(ValueError, match="'b' has 2 distinct validation rows, fewer than examples = 3"):
        zero_shot_task.example_prompts(data, "audio", data["kind"][:], ["a", "b"], 3)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("label =", "lable =", "unknown key 'lable'; the keys there are ['bins', 'classes', 'data'"),
        ("columns = {", "colums = {", "unknown key 'data.colums'; the keys there are ['columns', 'source', 'split']"),
        ('name = "mine"', "", "key 'name' is missing"),
        ('"photo"', '"foto"', "no column 'foto' for modality 'image'"),
        ('label = "kind"', "", "no column 'text' for label"),
        ('model = "model"', 'model = "./nowhere"', "no model"),
        ('"test.parquet"', '"none.parquet"', "no data at"),
        ('["{}", "a {}"]', '["a photo"]', "needs exactly one place"),
        ('["{}", "a {}"]', '["{}"]\nexamples = 2', "templates and examples"),
        (
            'label = "kind"',
            'label = "kind"\nclasses = ["cat", "dog"]',
            "row 0 has the label 'bee', which is none of the 2 classes",
        ),
        ('label = "kind"', 'label = "kind"\ntarget = "smell"', "unknown modality 'smell'"),
        ('name = "mine"', "name = ", "Invalid value"),
    ],
)
def test_faults_of_a_recipe_are_told_in_one_line(folder, monkeypatch, capsys, old, new, fault):
    assert run(folder, RECIPE.replace(old, new, 1), monkeypatch) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert fault in error and error.startswith("Error: ")


def test_a_missing_recipe_is_told_in_one_line(tmp_path):
    command = [sys.executable, str(EVAL / "zero_shot.py"), str(tmp_path / "none.toml"), "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: no recipe at") and len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_demo_keeps_what_is_expected(tmp_path):
    command = [sys.executable, str(EVAL / "zero_shot.py"), "--quick", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    records = json.loads((tmp_path / "zero_shot.json").read_text())["results"]
    best = {(each["model"], each["target"]): each["metrics"] for each in records if len(each["query"]) == 2}
    assert best["hadamard", "text"]["acc1"] > 0.9 > 0.2 > best["sum_of_pairs", "text"]["acc1"]
