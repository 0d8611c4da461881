"""Processes are exactly invertible, and their mirrors can be that inverse."""

import pytest
import torch
from torch import nn

from mmcl.metrics import angle_error
from mmcl.synthetic.decoder_world import digit_decoder
from mmcl.synthetic.processes import MIRRORS, PROCESSES, fourier_encoder, mlp_encoder, well_conditioned
from mmcl.synthetic.worlds import uniform_sphere

Z = uniform_sphere(2_000, 3, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dim", [3, 5])
def test_the_inverse_gives_the_latents_back(name, seed, dim):
    z = uniform_sphere(500, dim, torch.Generator().manual_seed(seed))
    process = PROCESSES[name](dim, seed=seed)
    torch.testing.assert_close(process.inverse(process(z)), z, rtol=1e-9, atol=1e-9)
    assert torch.equal(PROCESSES[name](dim, seed=seed)(z), process(z)), "the same seed, the same process"


@pytest.mark.parametrize("name", [name for name in PROCESSES if name != "identity"])
def test_a_process_is_not_the_identity(name):
    assert not torch.allclose(PROCESSES[name](3, seed=1)(Z), Z, atol=0.05)


def test_pieces_of_patches_do_not_overlap():
    process = PROCESSES["patches"](3, seed=1)
    x = process(Z)
    signs = ((Z >= 0).long() * torch.tensor([4, 2, 1])).sum(1)
    assert len({(a, b) for a, b in zip(signs.tolist(), process.patch(x).tolist())}) == 8


def test_layers_are_well_conditioned():
    for seed in range(20):
        matrix = well_conditioned(5, torch.Generator().manual_seed(seed))
        assert torch.linalg.cond(matrix) < 2


@pytest.mark.parametrize("name", MIRRORS)
def test_a_mirror_with_the_right_numbers_is_the_inverse(name):
    process = PROCESSES[name](3, seed=1)
    encoder = MIRRORS[name](process, 0).double()
    squares = [part for part in encoder if isinstance(part, nn.Linear)]
    with torch.no_grad():
        for square in squares:
            square.weight.copy_(torch.eye(3))
        if name == "linear":
            squares[0].weight.copy_(torch.linalg.inv(process.matrix))
        elif name == "spiral":
            encoder[0].pitch.fill_(process.pitch)
        elif name == "patches":
            encoder[0].shifts.copy_(process.centres)
            encoder[0].log_scales.copy_(-process.scales.log())
        elif name == "invertible_mlp":
            for square, layer in zip(squares, reversed(process.layers)):
                square.weight.copy_(torch.linalg.inv(layer))
    torch.testing.assert_close(encoder(process(Z)), Z, rtol=1e-6, atol=1e-6)


def test_encoders_give_unit_rows():
    torch.manual_seed(0)
    for encoder in (mlp_encoder(3), fourier_encoder(3), mlp_encoder(3, out=7)):
        rows = encoder(Z.float())
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(Z)))
    assert not torch.allclose(mlp_encoder(3, unit=False)(Z.float()).norm(dim=1), torch.ones(len(Z)))


def test_the_decoder_of_digits_is_a_frozen_injective_world():
    decoder = digit_decoder(5, steps=150)
    z = uniform_sphere(400, 5, torch.Generator().manual_seed(1))
    x = decoder(z)
    assert x.shape == (400, 64)
    assert x.min() >= 0
    assert x.max() <= 1
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    torch.testing.assert_close(digit_decoder(5, steps=150)(z), x)
    apart, pictures = torch.pdist(z), torch.pdist(x.double())
    assert float((pictures / apart).min()) > 1e-3, "different latents, different pictures"
    assert angle_error(z, z) == pytest.approx(0, abs=1e-12)
