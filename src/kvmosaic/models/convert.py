"""Converts a GGUF file to an ordinary Hugging Face folder."""

import functools
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

_patching = threading.Lock()


def convert(gguf_file: Path, folder: Path) -> None:
    """Save the model and tokenizer in `gguf_file` as float32 safetensors and tokenizer files."""
    # Imported here because they take seconds, and most callers find the model already converted.
    import gguf
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    class Reader(gguf.GGUFReader):
        """Keeps the mapped file as a plain array, because slicing a `memmap` is several times slower."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    # transformers parses the file separately for config, weights and tokenizer, and builds the same name table
    # once per layer. Caching both makes the conversion three times faster.
    open_once = functools.cache(Reader)
    map_once = functools.cache(gguf.get_tensor_name_map)
    with (
        _patching,
        patch.object(gguf, "GGUFReader", open_once),
        patch.object(gguf, "get_tensor_name_map", map_once),
    ):
        tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
        model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    _fix_tokenizer(tokenizer, open_once(str(gguf_file)))
    _unquantised(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unquantised(model: Any) -> Any:
    """The same weights in a model that is not marked as quantized GGUF: a marked model cannot be saved."""
    import torch

    del model.config.quantization_config
    with torch.device("meta"):  # allocates no memory: the given tensors are assigned
        plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.generation_config = model.generation_config
    return plain


def _fix_tokenizer(tokenizer: Any, reader: Any) -> None:
    """Add two features that the file requests and transformers ignores: the BOS token and splitting of digits."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from tokenizers.processors import TemplateProcessing

    def says(key: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    backend, bos = tokenizer.backend_tokenizer, tokenizer.bos_token
    if says("pre") == "smollm":
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    wants_bos = says("add_bos_token")
    if wants_bos is None:  # an old file: SentencePiece models, which GGUF calls "llama", start with BOS
        wants_bos = says("model") == "llama"
    if wants_bos:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, tokenizer.bos_token_id)],
        )
