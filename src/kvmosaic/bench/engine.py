"""The vLLM engine that benchmarks run: a model of Llama-3-8B's shape, or of a part of it, with random weights.

No weights have to be downloaded.
"""

import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from kvmosaic import __version__
from kvmosaic.core.errors import KvmosaicError
from kvmosaic.engines.precision import WHY_FLOAT32, cpu_runs_bfloat16

if TYPE_CHECKING:
    from kvmosaic.vllm import LLM

HEAD_DIM = 128
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": HEAD_DIM,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@dataclass(frozen=True)
class Model:
    """Size of the model, as a part of the 8B shape, and whether it runs without compilation and CUDA graphs."""

    layers: int = 32
    heads: int = 32
    """Number of attention heads of 128 columns. There are a quarter as many KV heads; other widths follow."""
    eager: bool = False

    @property
    def kv_heads(self) -> int:
        return max(1, self.heads // 4)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV."""
        return self.layers * 2 * self.kv_heads * HEAD_DIM * (4 if _in_float32() else 2)

    def config(self) -> dict[str, Any]:
        """The model's ``config.json``."""
        widths = {name: SHAPE[name] * self.heads // 32 for name in ("hidden_size", "intermediate_size")}
        counts = {
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
        }
        return {**SHAPE, **widths, **counts}


def start(model: Model, **settings: Any) -> "LLM":
    """An engine in this process; ``settings`` are vLLM's and the chunk cache's."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from kvmosaic.vllm import LLM  # after the variable that tells vLLM how to run
    except ImportError as error:
        raise KvmosaicError(str(error)) from None
    from kvmosaic.bench.weights import LOAD_FORMAT

    # One folder name per shape, so that the next engine finds the code that vLLM compiled for it.
    folder = Path(platformdirs.user_cache_dir("kvmosaic"), "bench", f"{model.layers}-layers-{model.heads}-heads")
    folder.mkdir(parents=True, exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(model.config()))
    ours: dict[str, Any] = {
        "load_format": LOAD_FORMAT,
        "skip_tokenizer_init": True,
        "enforce_eager": model.eager,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.7,
        "client_parameters": "all",
    }
    return LLM(str(folder), **ours | settings)


def _in_float32() -> bool:
    """Whether this machine cannot run the model in bfloat16."""
    from kvmosaic.core.accelerator import accelerator_there

    return accelerator_there() is None and not cpu_runs_bfloat16()


def machine() -> dict[str, str]:
    """Device and software versions, on which times depend."""
    import torch
    import vllm

    from kvmosaic.core.accelerator import accelerator_there

    accelerator = accelerator_there()
    device = f"{os.cpu_count()} CPUs" if accelerator is None else accelerator.get_device_name()
    if _in_float32():
        device += f", in float32 ({WHY_FLOAT32})"
    versions = {"kvmosaic": __version__, "vllm": vllm.__version__, "torch": torch.__version__}
    return {"device": device, "python": platform.python_version(), **versions}
