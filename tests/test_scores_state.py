"""What a score keeps: float32 under every cast, a capped scale, and its values to the bit in a file."""

import math

import pytest
import torch
from torch import nn

from mmcl.scores import Hadamard, SumOfPairs, load_score, score_from_config

DIM = 8
NAMES = ("image", "audio", "text")


def dtypes_of(module):
    return {value.dtype for value in module.state_dict().values()}


def scales_of(score):
    return [p for name, p in score.named_parameters() if name.endswith("logit_scale")]


def push_scales(score, value):
    with torch.no_grad():
        for parameter in scales_of(score):
            parameter.fill_(value)


@pytest.mark.parametrize("cast", ["half", "bfloat16"])
def test_half_precision_casts_leave_scores_in_float32(kind, cast, make_score, unit_embeddings):
    score, embeddings = make_score(kind, 3, DIM), unit_embeddings(3, 4, DIM)
    before, expected = {k: v.clone() for k, v in score.state_dict().items()}, score(embeddings)
    model = nn.ModuleDict({"score": score, "tower": nn.Linear(2, 2)})
    getattr(model, cast)()
    assert dtypes_of(score) == {torch.float32}
    assert dtypes_of(model["tower"]) == {getattr(torch, "float16" if cast == "half" else cast)}
    model.to(torch.float16 if cast == "half" else torch.bfloat16)
    assert all(torch.equal(value, before[name]) for name, value in score.state_dict().items())
    assert torch.equal(score(embeddings), expected)


def test_double_precision_is_kept(kind, make_score, unit_embeddings):
    score, embeddings = make_score(kind, 3, DIM).double(), unit_embeddings(3, 4, DIM, dtype=torch.float64)
    assert dtypes_of(score) == {torch.float64}
    query = score.query_vectors({name: embeddings[name] for name in ("image", "text")})
    item = score.item_vectors({"audio": embeddings["audio"]})
    torch.testing.assert_close((query * item).sum(1), score(embeddings), rtol=1e-13, atol=1e-13)


def test_a_double_score_takes_float32_rows(kind, make_score, unit_embeddings):
    score, embeddings = make_score(kind, 3, DIM).double(), unit_embeddings(3, 4, DIM)
    vectors = score.query_vectors({"image": embeddings["image"]}), score.item_vectors({"text": embeddings["text"]})
    assert {each.dtype for each in (score(embeddings), *vectors)} == {torch.float64}


def test_autocast_changes_nothing(kind, make_score, unit_embeddings):
    score, embeddings = make_score(kind, 3, DIM), unit_embeddings(3, 4, DIM)
    pair = {name: embeddings[name] for name in ("image", "audio")}
    plain = score(embeddings), score.query_vectors(pair), score.item_vectors(pair)
    with torch.autocast("cpu", torch.bfloat16):
        cast = score(embeddings), score.query_vectors(pair), score.item_vectors(pair)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(plain, cast, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_scale_pushed_far_stays_finite(kind, dtype, make_score, unit_embeddings):
    score = make_score(kind, 3, DIM)
    push_scales(score, 50.0)
    embeddings = {name: rows.requires_grad_() for name, rows in unit_embeddings(3, 4, DIM, dtype=dtype).items()}
    query = score.query_vectors({"image": embeddings["image"]})
    item = score.item_vectors({name: embeddings[name] for name in ("audio", "text")})
    (score(embeddings).sum() + (query * item).sum()).backward()
    used = [p for name, p in score.named_parameters() if not name.endswith("neutral")]
    everything = [*embeddings.values(), *used]
    assert all(each.grad is not None and each.grad.isfinite().all() for each in everything)
    assert score(embeddings).isfinite().all()


def test_the_scale_is_capped_at_100(unit_embeddings):
    embeddings = unit_embeddings(2, 4, DIM)
    score = SumOfPairs(embeddings, DIM)
    push_scales(score, 50.0)
    capped = score(embeddings)
    assert score.scale.item() == pytest.approx(100.0, rel=1e-6)
    score.clamp_scales_()
    assert score.logit_scale.item() == pytest.approx(4.605170, abs=1e-6)
    assert torch.equal(score(embeddings), capped)


def test_clamping_reaches_every_part_and_leaves_small_scales_alone(make_score):
    score = make_score("pairs_and_neutral", 3, DIM)
    small, large = scales_of(score)
    with torch.no_grad():
        small.fill_(1.5)
        large.fill_(9.0)
    rest = {name: p.clone() for name, p in score.named_parameters() if not name.endswith("logit_scale")}
    score.clamp_scales_()
    assert small.item() == 1.5
    assert large.item() == pytest.approx(math.log(100))
    assert all(torch.equal(p, rest[name]) for name, p in score.named_parameters() if name in rest)


def test_saved_scores_come_back_to_the_bit(kind, make_score, unit_embeddings, tmp_path):
    score, embeddings = make_score(kind, 3, DIM), unit_embeddings(3, 4, DIM)
    folder = tmp_path / "a folder with spaces, 점수"
    folder.mkdir()
    for path in (folder / "score é.safetensors", str(folder / "as text.safetensors")):
        score.save(path)
        loaded = load_score(path)
        assert type(loaded) is type(score)
        assert loaded.modalities == score.modalities
        assert loaded.config() == score.config()
        assert list(loaded.state_dict()) == list(score.state_dict())
        assert all(torch.equal(v, score.state_dict()[k]) for k, v in loaded.state_dict().items())
        assert torch.equal(loaded(embeddings), score(embeddings))


def test_saved_doubles_come_back_to_the_bit(kind, make_score, tmp_path):
    score = make_score(kind, 3, DIM).double()
    with torch.no_grad():
        for parameter in score.parameters():
            parameter += torch.randn_like(parameter)
    score.save(tmp_path / "double.safetensors")
    loaded = load_score(tmp_path / "double.safetensors").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in score.state_dict().items())


def test_state_dict_goes_through_a_sum_of_scores(make_score, unit_embeddings):
    embeddings = unit_embeddings(3, 4, DIM)
    source = make_score("pairs_and_neutral", 3, DIM, seed=1)
    copy = score_from_config(source.config())
    assert not torch.equal(copy(embeddings), source(embeddings))
    copy.load_state_dict(source.state_dict())
    assert torch.equal(copy(embeddings), source(embeddings))


def test_names_and_dim_are_kept_whatever_they_are(tmp_path):
    score = Hadamard(("a.b", "이미지", "with space"), 3, tied=True)
    score.save(tmp_path / "s.safetensors")
    assert load_score(tmp_path / "s.safetensors").modalities == ("a.b", "이미지", "with space")


@pytest.mark.parametrize("score", [SumOfPairs, Hadamard])
@pytest.mark.parametrize("temperature", [0.0, -1.0, 0.009, math.nan, math.inf])
def test_temperatures_beyond_the_cap_are_refused(score, temperature):
    with pytest.raises(ValueError, match="temperature"):
        score(NAMES, DIM, temperature=temperature)


def test_the_smallest_temperature_is_the_cap():
    assert SumOfPairs(NAMES, DIM, temperature=0.01).scale.item() == pytest.approx(100.0, rel=1e-6)


def test_an_unknown_score_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"'cosine'.*'hadamard', 'sum_of_both', 'sum_of_pairs'"):
        score_from_config({"name": "cosine", "modalities": ["a", "b"], "dim": 3})


def test_a_foreign_file_is_refused_by_name(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    with pytest.raises((ValueError, KeyError), match=r"other\.safetensors"):
        load_score(tmp_path / "other.safetensors")
