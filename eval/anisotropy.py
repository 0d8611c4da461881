"""Positives that vary more in some latent directions than in others: InfoNCE against AnInfoNCE.

    python eval/anisotropy.py            # minutes
    python eval/anisotropy.py --quick    # identity mixing of five latents, both losses, under 90 s

Latents are uniform on the sphere of R^n; the positive of z has a density proportional to exp(-(x-z)'L(x-z)/2) there, L
diagonal, "concentrations" from 5 to 25. AnInfoNCE learns its own L = softplus(free) from equal starts. Parts:

    mixing      identity (n = 5, 10), two equal blocks, concentrations in another range, invertible perceptrons
    hard        negatives drawn around the anchor with L-: what is learned is L+ - L-; from a warm and a cold start
    ensemble    two kinds of positives, each with its L, one encoder, the sum of both losses
    pictures    latents through the decoder of a VAE trained on digits
    collapsed   digits under augmentation: what features tell of the augmentation's own numbers, and of the class

Recovery is MCC against the true latents, R^2, |correlation| and L / true L a latent. Writes results/anisotropy.json and
.png; the exit code says whether what is expected came out.

Source: Rusak et al. 2024 (AnInfoNCE).
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from latent_training import on_all_cores, train
from protocols import command_line, ended, told, write_results
from torch import Tensor, nn
from torch.nn import functional as F

from mmcl.losses import an_info_nce, an_info_nce_ensemble, info_nce
from mmcl.metrics import linear_r2, matched_correlations
from mmcl.synthetic.decoder_world import digit_decoder
from mmcl.synthetic.processes import PROCESSES, linear_mirror, mlp_encoder
from mmcl.synthetic.worlds import anisotropic_on_sphere, uniform_sphere

BATCH, POOL = 512, 64
"""Rows a step, and batches that are drawn at once."""
NEGATIVES = 32
LOW = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
"""Concentrations of hard negatives."""
OTHER = torch.tensor([25.0, 9.0, 5.0, 21.0, 13.0])
"""Of the ensemble's second kind of positives."""


def spread(dim: int, low: float = 5.0, high: float = 25.0) -> Tensor:
    """Concentrations from low to high."""
    return torch.linspace(low, high, dim)


def blocks(dim: int) -> Tensor:
    """Two equal halves."""
    return torch.tensor([5.0] * (dim // 2) + [25.0] * (dim - dim // 2))


class Concentrations(nn.Module):
    """softplus of free numbers, all equal at the start."""

    def __init__(self, start: Tensor):
        super().__init__()
        self.free = nn.Parameter(start + torch.log(-torch.expm1(-start)))

    def forward(self) -> Tensor:
        return F.softplus(self.free)


Draw = Callable[[int, torch.Generator], tuple[Tensor, ...]]


def pooled(draw: Draw, rows: int = BATCH, pool: int = POOL) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Batches of so many rows, `pool` of them drawn at once, as drawing is cheaper so."""
    waiting: list[tuple[Tensor, ...]] = []

    def batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        if not waiting:
            waiting.extend(zip(*(part.split(rows) for part in draw(rows * pool, generator)), strict=True))
        return waiting.pop()

    return batch


def groups(encoder: nn.Module, *scales: Concentrations) -> list[dict[str, Any]]:
    """Of an optimiser: concentrations move faster than weights."""
    learned = [parameter for each in scales for parameter in each.parameters()]
    return [{"params": list(encoder.parameters())}, *([{"params": learned, "lr": 5e-2}] if learned else [])]


def recovery(encode: Callable[[Tensor], Tensor], dim: int, scales: Tensor | None, true: Tensor) -> dict[str, Any]:
    """MCC and R^2 on fresh latents; of each latent the correlation and the learned concentration over the true one."""
    with torch.no_grad():
        z = uniform_sphere(5_000, dim, torch.Generator().manual_seed(77))
        h = encode(z)
    columns, correlations = matched_correlations(h, z)
    row = {"mcc": float(correlations.mean()), "r2": linear_r2(h, z), "correlations": correlations.tolist()}
    if scales is not None:
        learned = scales.detach()[torch.from_numpy(columns)]
        ordered = bool((torch.argsort(learned) == torch.argsort(true)).all())
        row |= {"ratios": (learned / true).tolist(), "order": ordered}
    return row | {"concentrations": true.tolist()}


def mixing(world: str, true: Tensor, loss: str, seed: int, steps: int = 3_000) -> dict[str, Any]:
    """One world, one loss."""
    dim = len(true)
    process = digit_decoder(dim, seed=seed) if world == "pictures" else PROCESSES[world](dim, seed=seed + 1)
    torch.manual_seed(seed)
    if world == "identity":
        encoder, lr = linear_mirror(process, seed), 2e-2
    else:
        encoder, lr = mlp_encoder(64 if world == "pictures" else dim, dim, hidden=128), 3e-3
    scales = Concentrations(torch.full((dim,), float(true.mean())))

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        z = uniform_sphere(count, dim, generator)
        return z, anisotropic_on_sphere(z, true, generator)

    def encode(z: Tensor) -> Tensor:
        return encoder(process(z).float())

    def value(generator: torch.Generator) -> Tensor:
        a, b = (encode(z) for z in batch(generator))
        return an_info_nce(a, b, scales()) if loss == "an_info_nce" else info_nce(a, b, scale=float(true.mean()))

    batch = pooled(draw)
    train(groups(encoder, *([scales] if loss == "an_info_nce" else [])), value, steps, lr, seed)
    return recovery(encode, dim, scales() if loss == "an_info_nce" else None, true)


def hard_negatives(start: str, seed: int) -> dict[str, Any]:
    """Negatives around the anchor; the encoder starts at the truth, or at random."""
    true = spread(5)
    torch.manual_seed(seed)
    encoder = linear_mirror(PROCESSES["identity"](5), seed) if start == "warm" else mlp_encoder(5, hidden=64)
    if start == "warm":
        with torch.no_grad():
            encoder[0].weight.copy_(torch.eye(5) + 0.05 * torch.randn(5, 5))
    scales = Concentrations(torch.full((5,), 10.0))

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        z = uniform_sphere(count, 5, generator)
        negatives = anisotropic_on_sphere(z.repeat_interleave(NEGATIVES, 0), LOW, generator)
        return z, anisotropic_on_sphere(z, true, generator), negatives.view(count, NEGATIVES, 5)

    def value(generator: torch.Generator) -> Tensor:
        z, positive, negatives = (part.float() for part in batch(generator))
        far = encoder(negatives.flatten(0, 1)).view(len(z), NEGATIVES, 5)
        return an_info_nce(encoder(z), encoder(positive), scales(), far)

    batch = pooled(draw, BATCH // 4, 16)
    losses: list[float] = []

    def noted(generator: torch.Generator) -> Tensor:
        losses.append(value(generator))
        return losses[-1]

    train(
        [{"params": list(encoder.parameters())}, {"params": list(scales.parameters()), "lr": 2e-2}],
        noted,
        1_500,
        3e-3,
        seed,
    )
    found = recovery(lambda z: encoder(z.float()), 5, scales(), true - LOW)
    return {**found, "loss": float(torch.stack(losses[-100:]).mean().detach())}


def ensemble(seed: int) -> dict[str, Any]:
    """Two kinds of positives: spread(5), and another order of it."""
    kinds = [spread(5), OTHER]
    torch.manual_seed(seed)
    encoder = linear_mirror(PROCESSES["identity"](5), seed)
    scales = [Concentrations(torch.full((5,), 15.0)) for _ in kinds]

    def draw(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        z = uniform_sphere(count, 5, generator)
        return z, *(anisotropic_on_sphere(z, kind, generator) for kind in kinds)

    def value(generator: torch.Generator) -> Tensor:
        anchor, *positives = (encoder(z.float()) for z in batch(generator))
        return an_info_nce_ensemble([(anchor, each) for each in positives], torch.stack([each() for each in scales]))

    batch = pooled(draw)
    learned = [parameter for each in scales for parameter in each.parameters()]
    train([{"params": list(encoder.parameters())}, {"params": learned, "lr": 2e-2}], value, 3_000, 2e-2, seed)
    first, second = (
        recovery(lambda z: encoder(z.float()), 5, s(), kind) for s, kind in zip(scales, kinds, strict=True)
    )
    return {**first, "second": {key: second[key] for key in ("ratios", "order", "concentrations")}}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"mixing": mixing, "hard": hard_negatives, "ensemble": ensemble}


def tasks(quick: bool, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """(part, what it is called with)."""
    losses = ("an_info_nce", "info_nce")
    five = [("mixing", {"world": "identity", "true": spread(5), "loss": loss, "seed": seed}) for loss in losses]
    if quick:
        return five
    worlds = [
        *[("identity", spread(10), seed), ("identity", blocks(6), seed), ("identity", spread(5, 2.0, 50.0), seed)],
        *[("invertible_mlp", spread(5), seed + more) for more in range(3)],
        ("pictures", spread(5), seed),
    ]
    rest = [("mixing", {"world": w, "true": t, "loss": loss, "seed": s}) for w, t, s in worlds for loss in losses]
    others = [("hard", {"start": start, "seed": seed}) for start in ("warm", "cold")] + [("ensemble", {"seed": seed})]
    from anisotropy_digits import PARTS as DIGITS

    return [*others, *rest, *five, *[("collapsed", {"loss": loss, "crop": crop}) for loss, crop in DIGITS]]


def run(task: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """One row of the results."""
    part, options = task
    started = time.perf_counter()
    if part == "collapsed":
        from anisotropy_digits import collapsed

        found = collapsed(**options)
    else:
        found = PARTS[part](**options)
        if part == "mixing" and options["world"] == "invertible_mlp" and options["loss"] == "an_info_nce":
            found = found | {"worst_layer_condition": worst_condition(len(options["true"]), options["seed"])}
    shown = {key: value for key, value in options.items() if key != "true"}
    return {"part": part, **shown, **found, "seconds": round(time.perf_counter() - started, 1)}


def worst_condition(dim: int, seed: int) -> float:
    process = PROCESSES["invertible_mlp"](dim, seed=seed + 1)
    return float(torch.linalg.cond(process.layers).max())


def failures(rows: list[dict[str, Any]], quick: bool) -> list[str]:
    """What did not come out as expected."""
    found = []

    def of(part: str, **wanted: Any) -> list[dict[str, Any]]:
        return [row for row in rows if row["part"] == part and all(row.get(k) == v for k, v in wanted.items())]

    plain = next(
        row for row in of("mixing", world="identity", loss="an_info_nce") if row["concentrations"] == spread(5).tolist()
    )
    if plain["mcc"] < 0.98 or not plain["order"] or off(plain) > 0.1:
        found.append(f"identity, n = 5: MCC {plain['mcc']:.3f}, L off by {off(plain):.2f}")
    if plain["seconds"] > 90:
        found.append(f"identity, n = 5 takes {plain['seconds']} s")
    if quick:
        return found
    worlds = of("mixing", world="invertible_mlp", loss="an_info_nce")
    median = sorted(row["mcc"] for row in worlds)[len(worlds) // 2]
    if median < 0.95 or not all(row["order"] for row in worlds):
        found.append(f"invertible perceptrons: median MCC {median:.3f}, in order {[row['order'] for row in worlds]}")
    warm, cold = of("hard", start="warm")[0], of("hard", start="cold")[0]
    if off(warm) > 0.1:
        found.append(f"hard negatives, warm start: L+ - L- off by {off(warm):.2f}")
    if abs(warm["loss"] - cold["loss"]) > 0.15:
        found.append(f"hard negatives: the cold start ends at {cold['loss']:.3f}, the warm one at {warm['loss']:.3f}")
    return found


def off(row: dict[str, Any]) -> float:
    """How far the learned concentrations are from the true ones, at worst, as a share."""
    return max(abs(ratio - 1) for ratio in row["ratios"])


def line(row: dict[str, Any]) -> str:
    named = [row.get(key) for key in ("part", "world", "start", "loss", "crop", "seed")]
    what = " ".join(str(each) for each in named if each is not None)
    if row["part"] == "collapsed":
        return f"{what:44} class {row['probe']:.3f}  augmentation R2 {row['augmentation_r2']:.3f}  {row['seconds']} s"
    ratios = f"  L/true {[round(each, 3) for each in row['ratios']]}" if "ratios" in row else ""
    figures = f"n {len(row['concentrations'])}  MCC {row['mcc']:.3f}  R2 {row['r2']:.3f}"
    return f"{what:44} {figures}{ratios}  {row['seconds']} s"


def main(arguments: list[str] | None = None) -> bool:
    parser = command_line(__doc__, "identity mixing of five latents alone")
    parser.add_argument("--seed", type=int, default=0, help="of processes, starts and draws")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    rows = on_all_cores(run, tasks(options.quick, options.seed), lambda row: print(line(row), flush=True))
    missed = failures(rows, options.quick)
    summary = {"seconds": round(time.perf_counter() - started), "missed": missed, "results": rows}
    write_results(options.out, "anisotropy", summary)
    if not options.quick:
        from anisotropy_digits import figure

        figure(rows, options.out / "anisotropy.png")
    return told(missed)


if __name__ == "__main__":
    sys.exit(ended(main))
