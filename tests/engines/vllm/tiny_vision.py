"""Tiny vision-language models with random weights, as folders that vLLM can load."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
SPECIAL = (
    *("<unk>", "<s>", "</s>", "<vision_start>", "<vision_end>", "<vision_pad>", "<image>", "<video>"),
    *("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *TILES),
)
"""Special tokens; their ids are their indices."""
VISION_START, VISION_END, IMAGE, VIDEO = 3, 4, 6, 7
VOCABULARY = 512
LANGUAGE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
}
QWEN_ENCODER = {
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "tie_word_embeddings": False,
}
PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 1}
QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 28 * 28 * 4,
    "max_pixels": 28 * 28 * 64,
    **PATCHES,
    "temporal_patch_size": 2,
}


def write_tiny_idefics(folder: Path) -> str:
    """Images in tiles of 4 tokens, with tokens of text between tiles."""
    config = Idefics3Config(
        vision_config={**ENCODER, "image_size": 56},
        text_config=LlamaConfig(**LANGUAGE),
        scale_factor=2,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    images = {
        "image_processor_type": "Idefics3ImageProcessor",
        "size": {"longest_edge": 112},
        "max_image_size": {"longest_edge": 56},
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": 4}
    return _write(folder, Idefics3ForConditionalGeneration(config), images, processor)


def write_tiny_paddle(folder: Path) -> str:
    """Images of any number of tokens, with positions on three axes (M-RoPE)."""
    config = PaddleOCRVLConfig(
        text_config={**LANGUAGE, "head_dim": 32, "rope_parameters": ROPE},
        vision_config={**ENCODER, "image_size": 112, "spatial_merge_size": 2},
        vision_end_token_id=VISION_END,
        **IDS,
    )
    images = {
        "image_processor_type": "PaddleOCRVLImageProcessor",
        "size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 64},
        **PATCHES,
    }
    return _write(
        folder, PaddleOCRVLForConditionalGeneration(config), images, {"processor_class": "PaddleOCRVLProcessor"}
    )


def write_tiny_qwen2(folder: Path) -> str:
    """Images like those of the tiny PaddleOCR-VL."""
    config = Qwen2VLConfig(
        text_config={**LANGUAGE, "rope_parameters": ROPE},
        vision_config={**QWEN_ENCODER, "depth": 1, "embed_dim": 32, "hidden_size": 128, "mlp_ratio": 2},
        vision_end_token_id=VISION_END,
        **IDS,
    )
    processor = {"processor_class": "Qwen2VLProcessor"}
    return _write(folder, Qwen2VLForConditionalGeneration(config), QWEN_IMAGES, processor)


def write_tiny_qwen25(folder: Path) -> str:
    """Images like those of the tiny Qwen2-VL, with an encoder whose attention has windows."""
    vision = {
        **QWEN_ENCODER,
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 128,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config={**LANGUAGE, "rope_parameters": ROPE},
        vision_config=vision,
        vision_end_token_id=VISION_END,
        **IDS,
    )
    processor = {"processor_class": "Qwen2_5_VLProcessor"}
    return _write(folder, Qwen2_5_VLForConditionalGeneration(config), QWEN_IMAGES, processor)


def _write(folder: Path, model: torch.nn.Module, images: dict, processor: dict) -> str:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.08)
    model.save_pretrained(folder)
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    inner = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.add_special_tokens(list(SPECIAL))
    named = {"image_token": "<image>", "video_token": "<video>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=named,
    )
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(images | processor))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return str(folder)
