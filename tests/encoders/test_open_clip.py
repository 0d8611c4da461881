import json
import shutil

import open_clip
import pytest
import torch
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file, save_file

from mmcl.encoders import open_clip_image, open_clip_text
from mmcl.encoders.open_clip_towers import full_name

TEXTS = ["a photo of a cat", "two dogs, running " * 20, "日本語"]


def pictures():
    return [Image.linear_gradient("L").resize((40, 30)), Image.new("RGB", (32, 32), (200, 10, 90))]


@pytest.fixture(scope="module")
def library(open_clip_folder):
    return open_clip.create_model(f"local-dir:{open_clip_folder}").eval()


def test_image_rows_equal_open_clips_own(open_clip_folder, library):
    encoder = open_clip_image(str(open_clip_folder)).eval()
    transform = image_transform_v2(PreprocessCfg(**library.visual.preprocess_cfg), is_train=False)
    pixels = torch.stack([transform(picture.convert("RGB")) for picture in pictures()])
    with torch.no_grad():
        ours = encoder(encoder.prepare(pictures()))
        torch.testing.assert_close(ours, library.encode_image(pixels, normalize=True), rtol=0, atol=1e-6)
    assert ours.shape == (2, 16)


def test_text_rows_equal_open_clips_own_also_cut_at_the_context_length(open_clip_folder, library):
    encoder = open_clip_text(str(open_clip_folder)).eval()
    tokens = open_clip.get_tokenizer(f"local-dir:{open_clip_folder}")(TEXTS)
    with torch.no_grad():
        ours = encoder(encoder.prepare(TEXTS))
        torch.testing.assert_close(ours, library.encode_text(tokens, normalize=True), rtol=0, atol=1e-6)
    assert tokens.shape == (3, 20)


def test_a_head_projects_to_another_width_and_learns_alone_when_frozen(open_clip_folder):
    encoder = open_clip_image(str(open_clip_folder), dim=8, frozen=True)
    assert encoder(encoder.prepare(pictures())).shape == (2, 8)
    assert [name for name, p in encoder.named_parameters() if p.requires_grad] == ["head.weight"]
    assert not encoder.train().backbone.training


def test_an_architecture_name_starts_at_random_and_a_checkpoint_file_fills_it(open_clip_folder, tmp_path, monkeypatch):
    config = json.loads((open_clip_folder / "open_clip_config.json").read_text())["model_cfg"]
    (tmp_path / "tiny-clip.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "tiny-clip.json")
    file = open_clip_folder / "open_clip_model.safetensors"
    filled = open_clip_image("tiny-clip", pretrained=str(file)).state_dict()
    again = open_clip_image(str(open_clip_folder)).state_dict()
    assert all(torch.equal(filled[name], value) for name, value in again.items())
    random = open_clip_image("tiny-clip").state_dict()
    assert not torch.equal(random["backbone.conv1.weight"], filled["backbone.conv1.weight"])


def test_weights_of_another_architecture_name_the_first_key(open_clip_folder):
    with pytest.raises(ValueError, match=r"another architecture.*'positional_embedding'"):
        open_clip_text("ViT-B-32", pretrained=str(open_clip_folder / "open_clip_model.safetensors"))


def test_a_folder_with_a_missing_key_is_refused_by_that_key(open_clip_folder, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(open_clip_folder, folder)
    weights = load_file(folder / "open_clip_model.safetensors")
    del weights["visual.conv1.weight"]
    save_file(weights, folder / "open_clip_model.safetensors")
    with pytest.raises(ValueError, match=r"'visual\.conv1\.weight' is missing"):
        open_clip_image(str(folder))


def test_a_folder_without_weights_is_no_silent_random_start(open_clip_folder, tmp_path):
    shutil.copy(open_clip_folder / "open_clip_config.json", tmp_path)
    with pytest.raises(ValueError, match="could not load"):
        open_clip_image(str(tmp_path))


def test_folders_hub_ids_and_architectures_are_told_apart(open_clip_folder):
    assert full_name(str(open_clip_folder)) == f"local-dir:{open_clip_folder}"
    assert full_name("laion/CLIP-ViT-B-32-laion2B-s34B-b79K") == "hf-hub:laion/CLIP-ViT-B-32-laion2B-s34B-b79K"
    assert full_name("ViT-B/32") == "ViT-B/32"
    assert full_name("ViT-B-32") == "ViT-B-32"


def test_unknown_names_and_tags_are_errors():
    with pytest.raises(ValueError, match="ViT-Z-1"):
        open_clip_image("ViT-Z-1")
    with pytest.raises(ValueError, match="no-such-tag"):
        open_clip_image("ViT-B-32", pretrained="no-such-tag")
