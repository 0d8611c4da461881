"""Image + speech tuples in an index on disk, found by text: train, embed, build, save, load, search.

python examples/trimodal_search.py
"""

import tempfile
from pathlib import Path

from mmcl import Hadamard, MultimodalModel, TupleIndex, embed, fit
from mmcl.encoders import categories, small_audio, small_image
from mmcl.synthetic.digits import WORDS, digit_tuples, digit_world


def main() -> None:
    world = digit_world(seed=0)  # handwritten digits and spoken digits; text is the word of their sum
    model = MultimodalModel(
        {
            "image": small_image(64, size=8, channels=1, noise=0.3),
            "audio": small_audio(64, seconds=0.8, n_mels=32, hop=0.02, noise=0.3),
            "text": categories(WORDS, 64),
        },
        Hadamard(("image", "audio", "text"), dim=64),
    )
    train = digit_tuples(world, "train", 12_800)
    fit(model, train, epochs=4, lr=3e-3, groups={"text": "equal"}, cache_inputs=True)

    with tempfile.TemporaryDirectory() as folder:
        # 1. embed once: shards on disk, in clip-retrieval's layout, with the columns that say what a row is
        tuples = digit_tuples(world, "test", 1_000)
        embed(model, tuples, Path(folder) / "embeddings", modalities=["image", "audio"])
        # 2. fuse image and audio into one vector a row
        index = TupleIndex.build(model, Path(folder) / "embeddings")
        index.save(Path(folder) / "index")
        # 3. ask with the modality that is left: one inner product a row
        index = TupleIndex.load(Path(folder) / "index", model=model)
        for word, hits in zip(("two", "seven"), index.search({"text": ["two", "seven"]}, k=4), strict=True):
            print(f'"{word}"')
            for key, score, row in hits:
                spoken = WORDS[row["audio_digit"]]
                print(f'  row {key:>3}  {score:6.2f}  image {row["image_digit"]} + "{spoken}" = {row["text"]}')


if __name__ == "__main__":
    main()
