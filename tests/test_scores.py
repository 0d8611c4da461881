"""What the scores are: the separability law for every split, their values, and what they can express."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmcl.scores import Hadamard, SumOfPairs

DIM = 8
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def splits(names):
    """Every (query, item) split with both sides non-empty."""
    for size in range(1, len(names)):
        for query in itertools.combinations(names, size):
            yield query, tuple(name for name in names if name not in query)


def pick(embeddings, names):
    return {name: embeddings[name] for name in names}


def assert_same_score(query, item, expected):
    """<query, item> = expected within 1e-5 of the sum of the products' sizes."""
    terms = query.double() * item.double()
    error = (terms.sum(1) - expected.double()).abs()
    assert (error <= 1e-5 * terms.abs().sum(1)).all(), error.max()


def plain_score(score, rows):
    """A score of one tuple in plain Python, from its definition."""
    if hasattr(score, "parts"):
        return sum(plain_score(part, rows) for part in score.parts)
    vectors = [rows[name].double().tolist() for name in score.modalities]
    if isinstance(score, SumOfPairs):
        pairs = itertools.combinations(vectors, 2)
        return math.exp(score.logit_scale.item()) * sum(dot(a, b) for a, b in pairs)
    factor = math.exp(score.logit_scale.item()) * len(vectors[0]) ** ((len(vectors) - 2) / 2)
    return sum(factor * w * math.prod(column) for w, *column in zip(score.weight.tolist(), *vectors, strict=True))


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("m", [2, 3, 4, 5])
def test_score_equals_its_definition(kind, m, make_score, unit_embeddings):
    score, embeddings = make_score(kind, m, DIM), unit_embeddings(m, 7, DIM)
    expected = [plain_score(score, {name: rows[i] for name, rows in embeddings.items()}) for i in range(7)]
    torch.testing.assert_close(score(embeddings), torch.tensor(expected), rtol=1e-5, atol=1e-5)


@given(
    m=st.integers(2, 5),
    n=st.integers(1, 9),
    dim=st.integers(1, 33),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(DTYPES),
    numpy=st.booleans(),
)
def test_every_split_gives_the_score(kind, make_score, unit_embeddings, m, n, dim, seed, dtype, numpy):
    score, embeddings = make_score(kind, m, dim, seed), unit_embeddings(m, n, dim, seed, dtype)
    if numpy and dtype != torch.bfloat16:
        embeddings = {name: rows.numpy() for name, rows in embeddings.items()}
    expected = score(embeddings)
    assert expected.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for query, item in splits(score.modalities):
        queries, items = score.query_vectors(pick(embeddings, query)), score.item_vectors(pick(embeddings, item))
        assert queries.shape == items.shape == (n, score.width)
        assert_same_score(queries, items, expected)


@given(m=st.integers(2, 5), seed=st.integers(0, 10**6), data=st.data())
def test_every_split_gives_the_score_of_rows_with_gaps(forgiving_kind, make_score, unit_embeddings, m, seed, data):
    score, embeddings = make_score(forgiving_kind, m, DIM, seed), unit_embeddings(m, 6, DIM, seed)
    masks = st.lists(st.booleans(), min_size=6, max_size=6)
    present = {name: data.draw(masks, name) for name in data.draw(st.sets(st.sampled_from(score.modalities)), "masked")}
    expected = score(embeddings, present=present)
    for query, item in splits(score.modalities):
        queries = score.query_vectors(pick(embeddings, query), present=present)
        assert_same_score(queries, score.item_vectors(pick(embeddings, item), present=present), expected)
    if present:
        name = next(iter(present))
        garbled = embeddings | {name: torch.where(torch.tensor(present[name])[:, None], embeddings[name], 7.0)}
        assert torch.equal(score(garbled, present=present), expected), "what an absent row holds does not matter"


@pytest.mark.parametrize("m", [3, 4, 5])
def test_absent_modalities_count_as_never_present(forgiving_kind, m, make_score, unit_embeddings):
    score, embeddings = make_score(forgiving_kind, m, DIM), unit_embeddings(m, 6, DIM)
    for size in range(1, m - 1):
        for absent in itertools.combinations(score.modalities, size):
            rest = tuple(name for name in score.modalities if name not in absent)
            expected = score(embeddings, present={name: np.zeros(6, bool) for name in absent})
            for query, item in splits(rest):
                queries = score.query_vectors(pick(embeddings, query), absent=absent)
                assert_same_score(queries, score.item_vectors(pick(embeddings, item)), expected)


def test_one_absent_modality_may_be_named_alone_or_twice(make_score, unit_embeddings):
    score, embeddings = make_score("neutral", 3, DIM), unit_embeddings(3, 4, DIM)
    image = pick(embeddings, ["image"])
    expected = score.query_vectors(image, absent=("audio",))
    assert torch.equal(score.query_vectors(image, absent="audio"), expected)
    assert torch.equal(score.query_vectors(image, absent=["audio", "audio"]), expected)


def test_sum_of_pairs_leaves_the_terms_of_absent_modalities_out(make_score, unit_embeddings):
    embeddings = unit_embeddings(3, 5, DIM)
    score, pair = (SumOfPairs(tuple(embeddings)[:m], DIM, temperature=0.2) for m in (3, 2))
    without = score(embeddings, present={"text": [False] * 5})
    torch.testing.assert_close(without, pair(pick(embeddings, ("image", "audio"))))


def test_clip_is_two_modalities_of_sum_of_pairs_and_of_tied_hadamard(unit_embeddings):
    embeddings = unit_embeddings(2, 5, DIM)
    image, audio = embeddings.values()
    clip = (image * audio).sum(1) / 0.07
    for score in (SumOfPairs(embeddings, DIM, temperature=0.07), Hadamard(embeddings, DIM, 0.07, tied=True)):
        torch.testing.assert_close(score(embeddings), clip, rtol=1e-5, atol=1e-5)
        assert math.isclose(score.logit_scale.item(), 2.659260, abs_tol=1e-6)


@pytest.mark.parametrize("m", [2, 3, 4, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_w_starts_at_clips_logit_scale_for_every_m(m, tied):
    score = Hadamard([f"m{i}" for i in range(m)], 16, temperature=0.07, tied=tied)
    torch.testing.assert_close(score.w, torch.full((16,), 16 ** ((m - 2) / 2) / 0.07), rtol=1e-5, atol=0)
    learned = {name for name, _ in score.named_parameters()}
    assert learned == {"logit_scale"} | ({"weight"} if not tied else set())


@pytest.mark.parametrize("m", [3, 4, 5])
def test_neutral_at_its_start_turns_m_into_m_minus_1_at_its_start(m, unit_embeddings):
    embeddings = unit_embeddings(m, 5, DIM)
    names = tuple(embeddings)
    score = Hadamard(names, DIM, temperature=0.1, neutral=True)
    for name in names:
        rest = tuple(other for other in names if other != name)
        smaller = Hadamard(rest, DIM, temperature=0.1)(pick(embeddings, rest))
        torch.testing.assert_close(score(embeddings, present={name: [False] * 5}), smaller, rtol=1e-5, atol=1e-6)


def all_tuples(tables):
    """Every tuple of the rows of each table."""
    choices = list(itertools.product(*(range(len(table)) for table in tables.values())))
    return {name: table[[choice[i] for choice in choices]] for i, (name, table) in enumerate(tables.items())}


@pytest.mark.parametrize(("s", "divergence"), [(1, 0.126928), (5, 4.54e-5)])
def test_hadamard_expresses_parity(s, divergence):
    """+-1 variables whose product is always 1: KL(mu || mu_a) = log(1 + e^(-2s)) for the score s a b c."""
    tables = {name: torch.tensor([[1.0], [-1.0]]) for name in ("a", "b", "c")}
    logits = Hadamard(tables, 1, temperature=1 / s)(all_tuples(tables)).double()
    even = all_tuples(tables)["a"] * all_tuples(tables)["b"] * all_tuples(tables)["c"] == 1
    log_model = logits.log_softmax(0)[even.squeeze(1)]
    assert (math.log(1 / 4) - log_model).mean().item() == pytest.approx(divergence, rel=2e-3)
    assert math.log1p(math.exp(-2 * s)) == pytest.approx(divergence, rel=2e-3)


def test_sum_of_pairs_misses_parity():
    """Whatever the embeddings, its KL from the parity distribution stays at log 2 or above."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        tables = {name: torch.randn(2, 4, generator=generator, requires_grad=True) for name in ("a", "b", "c")}
        score = SumOfPairs(tables, 4, temperature=1.0)
        even = [sum(choice) % 2 == 0 for choice in itertools.product(range(2), repeat=3)]
        optimizer = torch.optim.Adam([*tables.values(), *score.parameters()], lr=0.05)
        for _ in range(100):
            loss = math.log(1 / 4) - score(all_tuples(tables)).log_softmax(0)[even].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert loss.item() >= math.log(2) - 1e-5
    assert loss.item() == pytest.approx(math.log(2), abs=0.02), "and training comes down to it"


def test_a_sum_of_scores_is_the_sum_in_any_grouping(make_score, unit_embeddings):
    embeddings = unit_embeddings(3, 5, DIM)
    a, b, c = (make_score(kind, 3, DIM, seed) for seed, kind in enumerate(("sum_of_pairs", "hadamard", "tied")))
    expected = a(embeddings) + b(embeddings) + c(embeddings)
    for total in ((a + b) + c, a + (b + c)):
        torch.testing.assert_close(total(embeddings), expected)
        assert total.width == a.width + b.width + c.width
        assert len(total.parts) == 3
