import torch
from PIL import Image

from mmcl import MultimodalModel, SumOfPairs
from mmcl.encoders import open_clip_image, transformers_text


def test_pretrained_towers_survive_save_and_load_without_their_source(tmp_path, open_clip_folder, clip_folder):
    encoders = {"image": open_clip_image(str(open_clip_folder)), "text": transformers_text(str(clip_folder))}
    model = MultimodalModel(encoders, SumOfPairs(("image", "text"), 16)).eval()
    model.save_pretrained(tmp_path / "model")
    again = MultimodalModel.from_pretrained(tmp_path / "model")
    assert again.fingerprint() == model.fingerprint()
    values = {
        "image": [Image.new("RGB", (9, 9), (shade, 0, 80)) for shade in (0, 200)],
        "text": ["a photo of a cat", "two dog"],
    }
    for name, rows in model.encode(values).items():
        assert torch.equal(rows, again.encode(values)[name])
