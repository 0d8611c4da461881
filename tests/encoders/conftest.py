"""Tiny models, saved to disk by their own libraries: nothing is downloaded."""

import json
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file

OPEN_CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16},
    "text_cfg": {"context_length": 20, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}


@pytest.fixture(scope="session")
def open_clip_folder(tmp_path_factory) -> Path:
    """A random open_clip CLIP, as open_clip's local-dir schema reads it."""
    folder = tmp_path_factory.mktemp("open clip ü")
    torch.manual_seed(0)
    save_file(open_clip.CLIP(**OPEN_CLIP).state_dict(), folder / "open_clip_model.safetensors")
    description = {"model_cfg": OPEN_CLIP, "preprocess_cfg": {"size": 32, "mean": [0.5, 0.4, 0.3]}}
    (folder / "open_clip_config.json").write_text(json.dumps(description))
    return folder


@pytest.fixture(scope="session")
def word_tokenizer():
    """A tokenizer of whole words, made in memory."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[EOS]", "a", "photo", "of", "cat", "dog", "two"]
    inner = Tokenizer(WordLevel({word: row for row, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", model_max_length=16
    )


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory, word_tokenizer) -> Path:
    """A random transformers CLIP with its processors."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    folder = tmp_path_factory.mktemp("clip")
    text = {"vocab_size": 9, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    word_tokenizer.save_pretrained(folder)
    size = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vit_folder(tmp_path_factory) -> Path:
    """A random ViT with its image processor."""
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    folder = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
    )
    ViTModel(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wav2vec2_folder(tmp_path_factory) -> Path:
    """A random wav2vec2 with its feature extractor."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    folder = tmp_path_factory.mktemp("wav2vec2")
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(10, 8),
        conv_kernel=(20, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    Wav2Vec2Model(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(sampling_rate=8000).save_pretrained(folder)
    return folder
