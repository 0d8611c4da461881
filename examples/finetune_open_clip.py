"""Fine-tune open_clip towers on one's own pairs, then classify zero-shot.

It runs offline on a tiny random CLIP that it writes itself. With the real one, take the two lines marked "real".

    python examples/finetune_open_clip.py
"""

import json
import tempfile
from pathlib import Path

import datasets
import numpy as np
import open_clip
import torch
from PIL import Image
from safetensors.torch import save_file

from mmcl import MultimodalModel, SumOfPairs, ZeroShotClassifier, fit
from mmcl.encoders import open_clip_image, open_clip_text

COLOURS = {"red": (220, 30, 30), "green": (40, 180, 60), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
TINY = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "patch_size": 8, "head_width": 32},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
}


def tiny_clip(folder: Path) -> str:
    """A random CLIP as open_clip stores it."""
    torch.manual_seed(0)
    save_file(open_clip.CLIP(**TINY).state_dict(), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": TINY, "preprocess_cfg": {"size": 32}}))
    return str(folder)


def squares(count: int, seed: int) -> datasets.Dataset:
    """Pictures of one noisy colour, and what they show."""
    rng = np.random.default_rng(seed)
    names = rng.choice(list(COLOURS), count)
    pictures = [np.clip(np.array(COLOURS[n]) + rng.normal(0, 30, (32, 32, 3)), 0, 255).astype(np.uint8) for n in names]
    captions = [f"a photo of a {name} square" for name in names]
    return datasets.Dataset.from_dict(
        {"image": [Image.fromarray(picture) for picture in pictures], "caption": captions, "colour": names.tolist()}
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = tiny_clip(Path(folder))
        image, text = open_clip_image(source), open_clip_text(source)
        # real: image = open_clip_image("ViT-B-32", pretrained="laion2b_s34b_b79k")
        # real: text = open_clip_text("ViT-B-32", pretrained="laion2b_s34b_b79k", frozen=True)
        model = MultimodalModel({"image": image, "text": text}, SumOfPairs(("image", "text"), dim=image.dim))
        fit(
            model,
            squares(1024, seed=0),
            columns={"text": "caption"},
            groups={"text": "equal"},  # pictures of one caption are one answer, not negatives
            epochs=4,
            batch_size=64,
            lr=1e-3,  # real: 1e-5
        )
    test = squares(256, seed=1)
    classifier = ZeroShotClassifier(model, list(COLOURS), ["a photo of a {} square", "a {} square"])
    right = np.mean(np.array(classifier.predict({"image": test["image"][:]})) == np.array(test["colour"][:]))
    print(f"zero-shot accuracy on new pictures: {right:.2f} (chance {1 / len(COLOURS):.2f})")


if __name__ == "__main__":
    main()
