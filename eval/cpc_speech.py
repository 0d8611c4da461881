"""Contrastive predictive coding on spoken digits: what comes next, and whether its contexts tell the digit.

    python eval/cpc_speech.py            # minutes on two cores
    python eval/cpc_speech.py --quick    # fewer epochs, and no verdict on figures

The clips are those of the demo (fifteen synthetic voices, three of them held out). A CPC encoder of waves trains
without labels on the other voices; a linear probe on the mean of its contexts then tells digits of the voices
held out. Beside it: the same network as it was drawn, and log-mel frames averaged over a clip. What is predicted is
measured as the bound on mutual information log N - loss, at most log N, for each number of steps ahead.

Writes results/cpc_speech.json; the exit code says whether what is expected came out. Source: van den Oord et al. 2018.
"""

import sys
import time
from typing import Any

import numpy as np
import torch
from protocols import command_line, ended, write_results
from torch import Tensor

from mmcl.decode import decode_audio
from mmcl.encoders.audio_features import log_mel
from mmcl.losses import info_nce
from mmcl.methods import CPC, TensorSource, pretrain
from mmcl.methods.encoders import WaveEncoder
from mmcl.metrics import linear_probe, mutual_information_bound
from mmcl.synthetic.digits import digit_world
from mmcl.synthetic.speech import RATE

SECONDS, WIDTH, CONTEXT, AHEAD = 0.6, 64, 128, 4


def clips(seed: int) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Waves of one length in [-1, 1], the digits that they say, and which are of voices held out."""
    world, samples = digit_world(seed), round(SECONDS * RATE)
    heard = [decode_audio(bytes(clip), RATE)[:samples] for clip in world.clips]
    waves = np.stack([np.pad(wave, (0, samples - len(wave))) for wave in heard])
    return torch.from_numpy(waves), world.clip_digits, world.clip_is_test


def louder_or_softer(waves: Tensor) -> Tensor:
    """Another gain, and a little noise: silence would be the easiest thing to predict."""
    gain = torch.exp(0.5 * torch.randn(len(waves), 1))
    return gain * (waves + 0.003 * torch.randn_like(waves))


@torch.no_grad()
def mean_context(method: CPC, waves: Tensor) -> Tensor:
    """(n, context), the mean over the steps of each clip."""
    return torch.cat([method.contexts(part)[1].mean(1) for part in waves.split(128)])


@torch.no_grad()
def bounds(method: CPC, waves: Tensor) -> dict[str, float]:
    """{steps ahead: nats} on clips that training never met, among all positions of 32 clips."""
    latents, contexts = method.contexts(louder_or_softer(waves[:32]))
    found = {}
    for ahead, predict in enumerate(method.predict, start=1):
        guessed, true = predict(contexts[:, :-ahead]).flatten(0, 1), latents[:, ahead:].flatten(0, 1)
        found[str(ahead)] = mutual_information_bound(float(info_nce(guessed, true)), len(true))
    return found


def main(arguments: list[str] | None = None) -> bool:
    parser = command_line(__doc__, "5 epochs")
    parser.add_argument("--seed", type=int, default=0, help="of voices, start and draws")
    options = parser.parse_args(arguments)
    waves, digits, held_out = clips(options.seed)
    train, test = waves[~held_out], waves[held_out]
    torch.manual_seed(options.seed)
    method = CPC(WaveEncoder(WIDTH), WIDTH, context=CONTEXT, ahead=AHEAD)

    def probed(features: Any) -> float:
        known, judged = (features(part) for part in (train, test))
        return linear_probe(known, digits[~held_out], judged, digits[held_out], cs=(0.01, 0.1, 1.0))

    method.eval()
    rows = [
        {
            "features": "log-mel frames, mean over the clip",
            "probe": probed(lambda part: log_mel(part, RATE, 40).mean(1)),
        },
        {"features": "mean context, as drawn", "probe": probed(lambda part: mean_context(method, part))},
    ]
    started = time.perf_counter()
    source = TensorSource(train, louder_or_softer, count=1)
    settings: dict[str, Any] = {"epochs": 5 if options.quick else 40, "batch_size": 32, "lr": 2e-3}
    result = pretrain(method, source, progress=False, seed=options.seed, **settings)
    trained = probed(lambda part: mean_context(method, part))
    row = {"features": "mean context, trained", "probe": trained, "bounds": bounds(method, test), **settings}
    rows.append({**row, "loss": result.history[-1]["loss"], "seconds": round(time.perf_counter() - started, 1)})
    for each in rows:
        print(f"{each['features']:36} probe {each['probe']:.3f}")
    ahead = rows[-1]["bounds"]
    print("information about the step ahead, at least:", {key: round(value, 2) for key, value in ahead.items()}, "nats")
    better = trained > max(rows[0]["probe"], rows[1]["probe"]) and all(value > 0 for value in ahead.values())
    about = {"clips": [len(train), len(test)], "chance": 0.1, "expected": "better than both, bounds above 0"}
    write_results(options.out, "cpc_speech", {**about, "came_out": better, "results": rows})
    return better or options.quick


if __name__ == "__main__":
    sys.exit(ended(main))
