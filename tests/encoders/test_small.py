import numpy as np
import pytest
import torch
from PIL import Image

from mmcl.decode import RowError
from mmcl.encoders import ENCODERS, categories, small_audio, small_image, vectors

EXAMPLES = {
    "small_image": (lambda: small_image(16, size=8), [Image.new("L", (20, 10), shade) for shade in (0, 90, 255)]),
    "small_audio": (
        lambda: small_audio(16, seconds=0.25),
        [(np.sin(np.arange(n) / 4).astype(np.float32), 8000) for n in (500, 2000, 9000)],
    ),
    "vectors": (lambda: vectors(3, 16), [[1.0, 2.0, 3.0], [0.5, 0.0, -1.0], [2.0, 2.0, 2.0]]),
    "categories": (lambda: categories(["x", "y", "z"], 16), ["z", "x", "z"]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_small_encoder_gives_unit_rows_and_rebuilds_from_its_config(name):
    build, values = EXAMPLES[name]
    encoder = build().eval()
    rows = encoder(encoder.prepare(values))
    assert rows.shape == (3, 16)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(3))
    options = dict(encoder.config)
    again = ENCODERS[options.pop("name")](**options).eval()
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again(again.prepare(values)), rows)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_value_that_cannot_be_used_names_its_row(name):
    build, values = EXAMPLES[name]
    with pytest.raises(RowError, match="row 1: ") as error:
        build().prepare([values[0], None, values[2]])
    assert error.value.row == 1


def test_same_category_same_row_and_an_unknown_one_lists_the_known():
    encoder = categories(["x", "y"], 4)
    rows = encoder(encoder.prepare(["y", "x", "y"]))
    assert torch.equal(rows[0], rows[2])
    with pytest.raises(RowError, match="row 1: unknown category 'q'; the categories are x, y"):
        encoder.prepare(["x", "q"])
    with pytest.raises(ValueError, match="distinct"):
        categories(["x", "x"])


def test_vectors_of_a_wrong_width_or_with_nan_are_refused():
    encoder = vectors(3, 4)
    with pytest.raises(ValueError, match=r"\(n, 3\), got \(2, 4\)"):
        encoder.prepare(np.zeros((2, 4)))
    with pytest.raises(RowError, match="row 1: holds NaN"):
        encoder.prepare(np.array([[1.0, 2, 3], [1, np.nan, 3]]))
    with pytest.raises(RowError, match="row 1: expected 3 numbers, got shape"):
        encoder.prepare([[1.0, 2, 3], [1.0, 2]])


def test_vectors_of_one_number_keep_what_they_say():
    encoder = vectors(1, 8).eval()
    rows = encoder(encoder.prepare([[-1.0], [1.0]]))
    assert not torch.allclose(rows[0], rows[1])


def test_noise_and_dropout_act_in_training_alone():
    encoder = vectors(3, 8, dropout=0.5, noise=1.0)
    inputs = encoder.prepare([[1.0, 2, 3]])
    assert not torch.equal(encoder.train()(inputs), encoder(inputs))
    assert torch.equal(encoder.eval()(inputs), encoder(inputs))


def test_sounds_are_cut_and_padded_to_one_length():
    encoder = small_audio(8, seconds=0.25)
    long, short = np.ones(4000, np.float32) * 0.5, np.ones(100, np.float32) * 0.5
    inputs = encoder.prepare([(long, 8000), (short, 8000), (long[:2000], 8000)])
    assert torch.equal(inputs[0], inputs[2])
    assert inputs.shape[0] == 3


def test_a_frozen_encoder_moves_its_head_alone():
    from mmcl.encoders import Encoder

    encoder = Encoder(torch.nn.Linear(3, 5), 5, dim=4, frozen=True)
    encoder(torch.randn(2, 3)).sum().backward()
    assert encoder.backbone.weight.grad is None
    assert encoder.head.weight.grad is not None
    with pytest.raises(ValueError, match="keeps the backbone's 5 features"):
        Encoder(torch.nn.Linear(3, 5), 5, dim=4, head="none")
