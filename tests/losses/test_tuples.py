"""Losses over tuples against loops written from their definitions, and against numbers known by hand."""

import itertools
import math

import numpy as np
import pytest
import torch

from mmcl.losses import TUPLE_LOSSES, contrastive_loss, joint_loss, pairwise_loss
from mmcl.scores import Hadamard, SumOfPairs

DIM = 5
N = 6


def guesses(m):
    """Options of guess for the first m modalities."""
    tuples = [[("audio", "image"), ("text",)], [("image",), ("text", "audio")]] if m > 2 else []
    return ["each", [("audio",)], *tuples]


CASES = [
    (m, guess, candidates, grouped)
    for m in (2, 3, 4, 5)
    for guess in guesses(m)
    for candidates in ("batch", "shuffled")
    for grouped in ("none", "some", "all")
]


@pytest.mark.parametrize(("m", "guess", "candidates", "grouped"), CASES)
def test_contrastive_loss_equals_three_loops(
    kind, m, guess, candidates, grouped, make_score, unit_embeddings, loop_contrastive
):
    score, embeddings = make_score(kind, m, DIM).double(), unit_embeddings(m, N, DIM, dtype=torch.float64)
    named = {"none": (), "some": ("audio",), "all": tuple(embeddings)}[grouped]
    generator = np.random.default_rng(m)
    groups = {name: generator.integers(0, 3, N) for name in named}
    expected = loop_contrastive(score, embeddings, guess, candidates == "shuffled", groups, seed=7)
    loss = contrastive_loss(
        score,
        embeddings,
        guess=guess,
        candidates=candidates,
        groups=groups or None,
        generator=torch.Generator().manual_seed(7),
    )
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("m", [2, 3, 4, 5])
@pytest.mark.parametrize("negatives", [1, 4])
def test_joint_loss_equals_loops(kind, m, negatives, make_score, unit_embeddings, loop_joint):
    score, embeddings = make_score(kind, m, DIM).double(), unit_embeddings(m, N, DIM, dtype=torch.float64)
    loss = joint_loss(score, embeddings, negatives=negatives, generator=torch.Generator().manual_seed(3))
    assert loss.item() == pytest.approx(loop_joint(score, embeddings, negatives, seed=3), rel=1e-12)


@pytest.mark.parametrize("m", [2, 3, 4, 5])
def test_pairwise_loss_is_the_mean_of_clips(m, make_score, unit_embeddings, loop_clip):
    score, embeddings = make_score("sum_of_pairs", m, DIM).double(), unit_embeddings(m, N, DIM, dtype=torch.float64)
    pairs = [loop_clip(a, b, score.scale.item()) for a, b in itertools.combinations(embeddings.values(), 2)]
    assert pairwise_loss(score, embeddings).item() == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)


@pytest.mark.parametrize("kind", ["hadamard", "tied", "neutral", "pairs_and_hadamard"])
def test_pairwise_loss_is_for_sum_of_pairs_only(kind, make_score, unit_embeddings):
    with pytest.raises(TypeError, match=r"SumOfPairs.*contrastive_loss"):
        pairwise_loss(make_score(kind, 3, DIM), unit_embeddings(3, N, DIM))


def test_clip_logits_by_hand():
    score, rows = SumOfPairs(("image", "text"), 2, temperature=0.5), torch.eye(2)
    for guess in ("each", [("image",)], [("text",)]):
        loss = contrastive_loss(score, {"image": rows, "text": rows}, guess=guess)
        assert loss.item() == pytest.approx(0.126928011, abs=1e-7)
    assert pairwise_loss(score, {"image": rows, "text": rows}).item() == pytest.approx(0.126928011, abs=1e-7)


@pytest.mark.parametrize("candidates", ["batch", "shuffled"])
@pytest.mark.parametrize("count", [2, 4, 9])
def test_equal_logits_give_the_log_of_their_number(kind, candidates, count, make_score, unit_embeddings):
    embeddings = {name: rows.expand(count, DIM) for name, rows in unit_embeddings(3, 1, DIM).items()}
    score = make_score(kind, 3, DIM)
    for guess in ("each", [("image", "text")]):
        loss = contrastive_loss(score, embeddings, guess=guess, candidates=candidates)
        assert loss.item() == pytest.approx(math.log(count), abs=1e-5)
    assert joint_loss(score, embeddings).item() == pytest.approx(0.0, abs=1e-5)
    assert math.log(4) == pytest.approx(1.386294361)


def test_each_is_the_mean_over_single_guesses(kind, make_score, unit_embeddings):
    score, embeddings = make_score(kind, 4, DIM), unit_embeddings(4, N, DIM)
    singles = [contrastive_loss(score, embeddings, guess=[(name,)]) for name in embeddings]
    assert contrastive_loss(score, embeddings).item() == pytest.approx(torch.stack(singles).mean().item(), rel=1e-6)
    assert len({round(single.item(), 6) for single in singles}) == 4


def test_a_guessed_tuple_and_its_rest_trade_places(kind, make_score, unit_embeddings):
    """Guessing T from Q reads rows of the matrix of scores, guessing Q from T its columns."""
    score, embeddings = make_score(kind, 4, DIM).double(), unit_embeddings(4, N, DIM, dtype=torch.float64)
    first, rest = ("image", "text"), ("audio", "touch")
    logits = score.query_vectors({name: embeddings[name] for name in first})
    logits = logits @ score.item_vectors({name: embeddings[name] for name in rest}).T
    for guess, expected in ((rest, logits), (first, logits.T)):
        loss = contrastive_loss(score, embeddings, guess=[guess])
        torch.testing.assert_close(loss, -expected.log_softmax(1).diagonal().mean())


def test_order_inside_a_guess_does_not_matter(kind, make_score, unit_embeddings):
    score, embeddings = make_score(kind, 3, DIM), unit_embeddings(3, N, DIM)
    losses = [
        contrastive_loss(score, embeddings, [guess], "shuffled", generator=torch.Generator().manual_seed(1))
        for guess in (("image", "text"), ["text", "image"])
    ]
    assert torch.equal(*losses)


def test_a_generator_makes_shuffles_reproducible(make_score, unit_embeddings):
    score, embeddings = make_score("hadamard", 3, DIM), unit_embeddings(3, N, DIM)

    def losses(seed):
        generator = torch.Generator().manual_seed(seed)
        shuffled = contrastive_loss(score, embeddings, candidates="shuffled", generator=generator)
        return shuffled.item(), joint_loss(score, embeddings, generator=generator).item()

    state = torch.get_rng_state()
    assert losses(1) == losses(1) != losses(2)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"


@pytest.mark.parametrize("loss", TUPLE_LOSSES)
def test_a_batch_of_one_is_refused(loss, make_score, unit_embeddings):
    score = make_score("sum_of_pairs", 3, DIM)
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"at least 2 rows, got {count}"):
            TUPLE_LOSSES[loss](score, unit_embeddings(3, count, DIM))
    TUPLE_LOSSES[loss](score, unit_embeddings(3, 2, DIM))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("loss", TUPLE_LOSSES)
def test_other_precisions_give_float32s_loss(loss, dtype, make_score, unit_embeddings):
    score, embeddings = make_score("sum_of_pairs", 3, DIM), unit_embeddings(3, N, DIM, dtype=dtype)
    rounded = {name: rows.float() for name, rows in embeddings.items()}
    options = {} if loss == "pairwise" else {"generator": torch.Generator().manual_seed(0)}
    value = TUPLE_LOSSES[loss](score, embeddings, **options)
    options = {} if loss == "pairwise" else {"generator": torch.Generator().manual_seed(0)}
    expected = TUPLE_LOSSES[loss](score, rounded, **options)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("loss", TUPLE_LOSSES)
def test_numpy_and_mixed_precision_are_taken(loss, make_score, unit_embeddings):
    score, embeddings = make_score("sum_of_pairs", 3, DIM), unit_embeddings(3, N, DIM)
    torch.manual_seed(0)
    expected = TUPLE_LOSSES[loss](score, embeddings)
    mixed = {**embeddings, "image": embeddings["image"].numpy(), "text": embeddings["text"].numpy().astype(np.float64)}
    torch.manual_seed(0)
    assert TUPLE_LOSSES[loss](score, mixed).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("loss", TUPLE_LOSSES)
def test_autocast_changes_nothing(loss, make_score, unit_embeddings):
    score, embeddings = make_score("sum_of_pairs", 3, DIM), unit_embeddings(3, N, DIM)
    torch.manual_seed(0)
    plain = TUPLE_LOSSES[loss](score, embeddings)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        cast = TUPLE_LOSSES[loss](score, embeddings)
    assert torch.equal(plain, cast)
    assert cast.dtype == torch.float32


PAIRED = [(loss, build) for loss in TUPLE_LOSSES for build in (SumOfPairs, Hadamard)]


@pytest.mark.parametrize(("loss", "build"), [pair for pair in PAIRED if pair != ("pairwise", Hadamard)])
def test_a_learned_scale_far_past_the_cap_stays_finite_in_float16(loss, build, unit_embeddings):
    embeddings = unit_embeddings(3, N, DIM, dtype=torch.float16)
    embeddings = {name: rows.requires_grad_() for name, rows in embeddings.items()}
    score = build(embeddings, DIM)
    with torch.no_grad():
        score.logit_scale.fill_(100.0)
    value = TUPLE_LOSSES[loss](score, embeddings)
    value.backward()
    assert value.isfinite()
    assert all(each.grad.isfinite().all() for each in (*embeddings.values(), *score.parameters()))


SCORE = SumOfPairs(("image", "audio", "text"), DIM)
BAD = {
    "guess": (lambda e: contrastive_loss(SCORE, e, guess="all"), KeyError, r"guess 'all'.*\['each'\]"),
    "candidates": (
        lambda e: contrastive_loss(SCORE, e, candidates="all"),
        KeyError,
        r"candidates 'all'.*'batch', 'shuffled'",
    ),
    "guess unknown": (lambda e: contrastive_loss(SCORE, e, guess=[("touch",)]), KeyError, r"'touch'.*'image'"),
    "guess all": (lambda e: contrastive_loss(SCORE, e, guess=[tuple(e)]), ValueError, "not all"),
    "guess nothing": (lambda e: contrastive_loss(SCORE, e, guess=[()]), ValueError, "each guess names"),
    "guess twice": (lambda e: contrastive_loss(SCORE, e, guess=[("image", "image")]), ValueError, "each once"),
    "no guess": (lambda e: contrastive_loss(SCORE, e, guess=[]), ValueError, "no tuple"),
    "guess of strings": (lambda e: contrastive_loss(SCORE, e, guess=["image"]), TypeError, "'image'"),
    "missing": (lambda e: contrastive_loss(SCORE, {"image": e["image"]}), KeyError, r"'audio', 'text'"),
    "extra": (lambda e: joint_loss(SCORE, e | {"touch": e["image"]}), KeyError, "'touch'"),
    "width": (lambda e: joint_loss(SCORE, e | {"text": e["text"][:, 1:]}), ValueError, r"text.*5.*\(6, 4\)"),
    "rows": (lambda e: pairwise_loss(SCORE, e | {"text": e["text"][1:]}), ValueError, r"image has 6.*text has 5"),
    "1-D": (lambda e: pairwise_loss(SCORE, e | {"text": e["text"][0]}), ValueError, "text"),
    "block": (lambda e: contrastive_loss(SCORE, e, block_size=0), ValueError, "block_size"),
    "negatives": (lambda e: joint_loss(SCORE, e, negatives=0), ValueError, "negatives"),
    "gather": (lambda e: contrastive_loss(SCORE, e, gather=True), RuntimeError, r"torch\.distributed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_are_refused_by_name(case, unit_embeddings):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call(unit_embeddings(3, N, DIM))


def test_inputs_are_left_alone(make_score, unit_embeddings):
    score, embeddings = make_score("sum_of_pairs", 3, DIM), unit_embeddings(3, N, DIM)
    arrays = {name: np.asfortranarray(rows.numpy()) for name, rows in embeddings.items()}
    for array in arrays.values():
        array.flags.writeable = False
    for loss in TUPLE_LOSSES.values():
        assert loss(score, arrays).isfinite()
    assert all(np.array_equal(arrays[name], embeddings[name]) for name in arrays)
