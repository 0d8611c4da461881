"""Zero-shot classification equals asking the score about every (row, class) pair."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmcl.model import MultimodalModel
from mmcl.scores import SumOfPairs
from mmcl.zero_shot import ZeroShotClassifier

DIM = 6
CLASSES = ["cat", "dog", "owl"]


class Table(nn.Module):
    """Each distinct value its own fixed random row (or a given one); dropout shows whether eval mode is on."""

    def __init__(self, rows=None):
        super().__init__()
        self.rows = rows or {}
        self.dropout = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(()))

    def row(self, value):
        seed = sum(ord(letter) * 31**place for place, letter in enumerate(str(value))) % 2**31
        return self.rows.get(value, torch.randn(DIM, generator=torch.Generator().manual_seed(seed)))

    def forward(self, values):
        rows = values if isinstance(values, torch.Tensor) else torch.stack([self.row(value) for value in values])
        return F.normalize(self.dropout(rows.float() * self.weight), dim=1)


class TableModel(nn.Module):
    """What the classifier asks of a model, with nothing learned."""

    def __init__(self, score, rows=None):
        super().__init__()
        self.score = score
        self.towers = nn.ModuleDict({name: Table(rows) for name in score.modalities})
        self.encoded = []

    @property
    def encoders(self):
        return dict(self.towers.items())

    def encode(self, values, batch_size=None):
        self.encoded.append((dict(values), batch_size))
        empty = torch.empty(0, DIM)
        return {name: self.encoders[name](rows) if len(rows) else empty for name, rows in values.items()}


@pytest.fixture
def clip():
    """A CLIP whose dropout never acts while the classifier works."""
    return TableModel(SumOfPairs(("image", "text"), DIM, temperature=0.3))


def rows_of(model, name, values):
    model.eval()
    with torch.no_grad():
        return model.encode({name: values})[name]


def brute_force(model, inputs, classes, target="text"):
    """score(row, class) for every pair, one call each."""
    vectors = rows_of(model, target, classes)
    queries = {name: rows_of(model, name, values) for name, values in inputs.items()}
    count = len(next(iter(queries.values())))
    missing = set(model.score.modalities) - set(inputs) - {target}
    table = torch.empty(count, len(classes))
    for i in range(count):
        for j in range(len(classes)):
            pair = {name: rows[i : i + 1] for name, rows in queries.items()} | {target: vectors[j : j + 1]}
            pair |= {name: torch.zeros(1, DIM) for name in missing}
            table[i, j] = model.score(pair, present={name: [False] for name in missing}).item()
    return table


@pytest.mark.parametrize("m", [2, 3, 4])
@pytest.mark.parametrize("target", ["text", "image"])
def test_scores_equal_the_score_of_every_pair(kind, m, target, make_score):
    model = TableModel(make_score(kind, ("image", "text", "audio", "touch")[:m], DIM))
    inputs = {name: [f"{name}{i}" for i in range(5)] for name in model.score.modalities if name != target}
    scores = ZeroShotClassifier(model, CLASSES, target=target).scores(inputs)
    torch.testing.assert_close(scores, brute_force(model, inputs, CLASSES, target), rtol=0, atol=2e-5)


@pytest.mark.parametrize("given", [("image",), ("audio",), ("image", "touch"), ("audio", "touch")])
def test_any_subset_of_the_other_modalities_is_enough(forgiving_kind, given, make_score):
    model = TableModel(make_score(forgiving_kind, 4, DIM))
    inputs = {name: ["x", "y"] for name in given}
    scores = ZeroShotClassifier(model, CLASSES).scores(inputs)
    torch.testing.assert_close(scores, brute_force(model, inputs, CLASSES), rtol=0, atol=2e-5)


def test_a_score_without_neutral_vector_names_the_absent_modality(make_score):
    classifier = ZeroShotClassifier(TableModel(make_score("hadamard", 3, DIM)), CLASSES)
    with pytest.raises(KeyError, match="audio"):
        classifier.scores({"image": ["x"]})


def test_present_masks_pass_through(forgiving_kind, make_score):
    model = TableModel(make_score(forgiving_kind, 3, DIM))
    classifier = ZeroShotClassifier(model, CLASSES)
    both = {"image": ["a", "b", "c"], "audio": ["d", "e", "f"]}
    masked = classifier.scores(both, present={"audio": [True, False, True]})
    torch.testing.assert_close(masked[[0, 2]], classifier.scores(both)[[0, 2]])
    torch.testing.assert_close(masked[1:2], classifier.scores({"image": ["b"]}))
    assert not torch.allclose(masked[1], classifier.scores(both)[1])
    best = classifier.predict(both, present={"audio": [True, False, True]})
    assert best[1:2] == classifier.predict({"image": ["b"]})
    probabilities = classifier.probabilities(both, present={"audio": [True, False, True]})
    torch.testing.assert_close(probabilities, masked.softmax(dim=1))


def test_prediction_is_the_class_whose_vector_matches(clip):
    rows = {name: torch.eye(DIM)[i] for i, name in enumerate(CLASSES)}
    model = TableModel(clip.score, rows)
    classifier = ZeroShotClassifier(model, CLASSES)
    inputs = {"image": ["owl", "cat", "dog", "owl"]}
    assert classifier.predict(inputs) == ["owl", "cat", "dog", "owl"], "4 rows against 3 classes"
    assert classifier.predict({"image": ["dog"]}) == ["dog"], "1 row against 3 classes"
    probabilities = classifier.probabilities(inputs)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(4))
    odds = np.exp(1 / 0.3)
    torch.testing.assert_close(probabilities[0], torch.tensor([1, 1, odds]).float() / (odds + 2))


def test_permuting_the_classes_permutes_the_predictions(clip):
    inputs = {"image": [f"photo {i}" for i in range(20)]}
    names = [f"class {i}" for i in range(7)]
    order = [4, 2, 6, 0, 5, 1, 3]
    plain = ZeroShotClassifier(clip, names, ("a {}", "the {}"))
    permuted = ZeroShotClassifier(clip, [names[i] for i in order], ("a {}", "the {}"))
    torch.testing.assert_close(permuted.scores(inputs), plain.scores(inputs)[:, order])
    assert permuted.predict(inputs) == plain.predict(inputs)
    assert len(set(plain.predict(inputs))) > 2


def test_a_tie_goes_to_the_class_listed_first(clip):
    rows = {"cat": torch.eye(DIM)[0], "dog": torch.eye(DIM)[0]}
    model = TableModel(clip.score, rows)
    assert ZeroShotClassifier(model, ["cat", "dog"]).predict({"image": ["cat"]}) == ["cat"]
    assert ZeroShotClassifier(model, ["dog", "cat"]).predict({"image": ["cat"]}) == ["dog"]


def test_templates_are_normalised_averaged_and_normalised(clip):
    rows = {"a cat": torch.tensor([3.0, 0, 0, 0, 0, 0]), "the cat": torch.tensor([0, 1.0, 0, 0, 0, 0])}
    classifier = ZeroShotClassifier(TableModel(clip.score, rows), ["cat"], ["a {}", "the {}"])
    expected = torch.tensor([[0.5**0.5, 0.5**0.5, 0, 0, 0, 0]])
    torch.testing.assert_close(classifier.class_vectors, expected)


def test_template_order_and_spelling_do_not_matter(clip):
    texts = ["a photo of a {}", "{name}, drawn", "{0} and {0}", "{} beside {}", "100 % {{}} {:s}"]
    inputs = {"image": ["x", "y"]}
    scores = ZeroShotClassifier(clip, CLASSES, texts).scores(inputs)
    torch.testing.assert_close(ZeroShotClassifier(clip, CLASSES, texts[::-1]).scores(inputs), scores)
    spoken = [
        lambda name: f"a photo of a {name}",
        lambda name: f"{name}, drawn",
        lambda name: f"{name} and {name}",
        lambda name: f"{name} beside {name}",
        lambda name: f"100 % {{}} {name}",
    ]
    torch.testing.assert_close(ZeroShotClassifier(clip, CLASSES, spoken).scores(inputs), scores)
    alone = ZeroShotClassifier(clip, CLASSES, texts[0])
    torch.testing.assert_close(ZeroShotClassifier(clip, CLASSES, spoken[0]).scores(inputs), alone.scores(inputs))


def test_class_names_may_hold_braces(clip):
    classifier = ZeroShotClassifier(clip, ["{x}", "{}"], "a {}")
    assert clip.encoded[-1][0] == {"text": ["a {x}", "a {}"]}
    assert classifier.classes == ("{x}", "{}")


def test_classes_of_raw_values(clip):
    model = TableModel(clip.score)
    views = {"cat": ["cat 1", "cat 2"], "dog": "dog 1"}
    classifier = ZeroShotClassifier(model, views, target="image")
    cat, dog = rows_of(model, "image", ["cat 1", "cat 2"]), rows_of(model, "image", ["dog 1"])
    expected = torch.cat([F.normalize(cat.mean(0, keepdim=True), dim=1), dog])
    torch.testing.assert_close(classifier.class_vectors, expected)
    tensors = {name: [model.towers["image"].row(view) for view in np.atleast_1d(each)] for name, each in views.items()}
    by_tensor = ZeroShotClassifier(model, tensors, target="image")
    torch.testing.assert_close(by_tensor.class_vectors, expected)
    assert by_tensor.classes == ("cat", "dog")


def test_class_vectors_are_computed_once_in_batches(clip):
    classifier = ZeroShotClassifier(clip, CLASSES, ("a {}", "the {}"), batch_size=4)
    assert clip.encoded == [({"text": ["a cat", "the cat", "a dog", "the dog", "a owl", "the owl"]}, 4)]
    classifier.predict({"image": ["x"]})
    classifier.probabilities({"image": ["x"]})
    assert [set(values) for values, _ in clip.encoded[1:]] == [{"image"}, {"image"}]


def test_every_module_returns_to_its_own_mode_and_no_gradient_is_kept(clip):
    clip.train()
    clip.towers["image"].eval()
    before = [module.training for module in clip.modules()]
    classifier = ZeroShotClassifier(clip, CLASSES)
    first, second = classifier.scores({"image": ["x"]}), classifier.scores({"image": ["x"]})
    assert torch.equal(first, second), "dropout is off"
    assert not first.requires_grad
    assert not classifier.class_vectors.requires_grad
    with pytest.raises(TypeError):
        classifier.scores({"image": 3})
    assert [module.training for module in clip.modules()] == before
    assert {True, False} == set(before)


def test_a_trained_model_gives_the_same_as_its_embeddings(clip):
    model = MultimodalModel({"image": nn.Linear(4, DIM), "text": nn.Linear(3, DIM)}, clip.score)
    classes = {"cat": torch.randn(3), "dog": [torch.randn(3), torch.randn(3)]}
    images = torch.randn(5, 4)
    scores = ZeroShotClassifier(model, classes).scores({"image": images})
    cat, *dogs = F.normalize(model.encoders["text"].backbone(torch.stack([classes["cat"], *classes["dog"]])), dim=1)
    vectors = torch.stack([cat, F.normalize(sum(dogs), dim=0)])
    torch.testing.assert_close(scores, F.normalize(model.encoders["image"].backbone(images), dim=1) @ vectors.T / 0.3)


def test_autocast_changes_nothing(clip):
    classifier = ZeroShotClassifier(clip, CLASSES)
    inputs = {"image": torch.randn(3, DIM)}
    plain = classifier.scores(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(classifier.scores(inputs), plain)


def same_text(name):
    return "x" * 0


@pytest.mark.parametrize(
    ("classes", "templates", "message"),
    [
        ([], "{}", "no classes"),
        ({}, ("{}",), "no classes"),
        ("cat", "{}", "list of names"),
        (None, "{}", "list of names"),
        (["cat", "dog", "cat"], "{}", r"\['cat'\]"),
        (["cat", 3], "{}", "class 1 must be a non-empty string, got 3"),
        (["cat", " "], "{}", "class 1 must be a non-empty string"),
        ({"": "x"}, ("{}",), "class 0 must be a non-empty string"),
        (CLASSES, (), "no templates"),
        (CLASSES, 3, "texts or callables"),
        (CLASSES, ["{}", 3], "text or a callable, got 3"),
        (CLASSES, "a photo", "'a photo' needs exactly one place"),
        (CLASSES, "", "needs exactly one place"),
        (CLASSES, ["{}", "{{}}"], r"'\{\{\}\}' needs exactly one place"),
        (CLASSES, "{a} {b}", "needs exactly one place"),
        (CLASSES, "{0} {}", "needs exactly one place"),
        (CLASSES, "a {", "not a format string"),
        (CLASSES, "{name.__class__}", "plain"),
        (CLASSES, "{1}", "plain"),
        (CLASSES, "{:d}", "cannot be filled with class 'cat'"),
        (CLASSES, "{:{width}}", "cannot be filled"),
        (CLASSES, len, "made 3 of class 'cat'"),
        (CLASSES, [same_text], "made '' of class 'cat'"),
        ({"cat": "x"}, ("a {}",), "leave them out"),
        ({"cat": []}, ("{}",), "'cat' has no raw value"),
    ],
)
def test_classes_and_templates_that_say_nothing_are_refused(clip, classes, templates, message):
    with pytest.raises(ValueError, match=message):
        ZeroShotClassifier(clip, classes, templates)
    assert clip.encoded == []


def test_prompts_that_cancel_out_are_refused(clip):
    rows = {"up cat": torch.eye(DIM)[0], "down cat": -torch.eye(DIM)[0]}
    with pytest.raises(ValueError, match=r"class 'cat'.*cancel"):
        ZeroShotClassifier(TableModel(clip.score, rows), ["cat"], ["up {}", "down {}"])


def test_an_unknown_target_lists_the_modalities(clip):
    with pytest.raises(KeyError, match=r"'txt'.*\['image', 'text'\]"):
        ZeroShotClassifier(clip, CLASSES, target="txt")


def test_inputs_that_cannot_be_classified_are_refused(clip):
    classifier = ZeroShotClassifier(clip, CLASSES)
    for inputs, message in (({}, "image"), (["x"], "list"), ({"image": []}, "no row"), ({"text": ["x"]}, "'text'")):
        with pytest.raises(ValueError, match=message):
            classifier.predict(inputs)
    with pytest.raises(ValueError, match="'text' is what the classes stand for"):
        classifier.predict({"image": ["x"], "text": ["x"]})
    with pytest.raises(KeyError, match=r"'audio'.*\['image'\]"):
        classifier.predict({"image": ["x"], "audio": ["x"]})
