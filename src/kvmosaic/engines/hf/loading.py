"""Loads a model and its tokenizer, in a number format that this machine can compute with."""

import logging

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.precision import WHY_FLOAT32, cpu_runs_bfloat16, needs_float32
from kvmosaic.models import resolve

logger = logging.getLogger(__name__)


def load(model: str, dtype: str | torch.dtype, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a catalog name, folder or hub name; by default on the GPU if there is one."""
    folder = resolve(model)
    try:
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"cannot load model {model!r}: {' '.join(str(error).split())[:300]}") from None
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype == "auto" and place == "cpu" and not cpu_runs_bfloat16():
        network = _in_float32(network)
    return network.to(place).eval(), tokenizer


def _in_float32(network: PreTrainedModel) -> PreTrainedModel:
    own = str(network.dtype).removeprefix("torch.")
    if not needs_float32(own, is_quantized=getattr(network.config, "quantization_config", None) is not None):
        return network
    logger.warning("computing in float32 instead of %s: %s", own, WHY_FLOAT32)
    return network.float()
