"""Which vLLM releases and configurations the chunk cache works with.

This module does not import vLLM, so that it can tell a machine without vLLM what is needed. Every attribute that it
reads exists under the same name in the oldest and in the newest supported release.
"""

import os
import re
from importlib.util import find_spec
from typing import Any

from kvmosaic.blend import Policy, policy_named
from kvmosaic.core.errors import ConfigError

QUANTISED = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Supported dtypes of a quantised KV cache."""
SUPPORTED_VLLM = ((0, 23), (0, 33))
"""Tested releases: from the first, up to but not including the second, without those of the next line."""
UNTRIED_VLLM = ((0, 24), (0, 25))
"""Releases between them that were never tested."""
ASCEND_VLLM = "0.23."
"""Beginning of the releases of vLLM for which the use of vllm-ascend is prepared."""
ASCEND_UNTRIED = (
    "the chunk cache is prepared for vllm-ascend 0.23 and was never run on an NPU; in a clone of kvmosaic, run "
    "`python -m tests.ascend_report MODEL` and send its report"
)
"""Line for users of vllm-ascend."""
ASCEND_VARIABLES = {
    "enable_flashcomm1": "VLLM_ASCEND_ENABLE_FLASHCOMM1",
    "enable_flashcomm2_parallel_size": "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE",
}
"""Settings of vllm-ascend that spread a forward's tokens over ranks, and the variables that also set them."""


def has_ascend() -> bool:
    """Whether vllm-ascend, vLLM's plugin for Ascend NPUs, is installed."""
    return find_spec("vllm_ascend") is not None


def requirement() -> str:
    """The tested releases, as pip has them."""
    first, end = (".".join(map(str, bound)) for bound in SUPPORTED_VLLM)
    return ",".join([f"vllm>={first}", f"<{end}", *(f"!={major}.{minor}.*" for major, minor in UNTRIED_VLLM)])


def version_problem(version: str) -> str | None:
    """Why this vLLM release is not supported and what to do, in one line; ``None`` when it is."""
    if has_ascend():
        if version.startswith(ASCEND_VLLM):
            return ASCEND_UNTRIED
        return f"vLLM {version} with vllm-ascend is not prepared; pip install vllm-ascend==0.23.0.post1"
    wanted = f"pip install '{requirement()}'"
    number = re.match(r"(\d+)\.(\d+)", version)
    if number is None:
        return f"vLLM {version} does not say which release it is; {wanted}"
    release = int(number[1]), int(number[2])
    if release in UNTRIED_VLLM or not SUPPORTED_VLLM[0] <= release < SUPPORTED_VLLM[1]:
        return f"vLLM {version} was never tried with the chunk cache; {wanted}"
    return None


def unsupported(vllm_config: Any) -> list[str]:
    """Why the chunk cache cannot work with this ``VllmConfig``: one line per reason, with what to do about it."""
    model = vllm_config.model_config
    return [
        *_model_problems(model),
        *_parallel_problems(vllm_config.parallel_config),
        *_pipeline_problems(vllm_config),
        *_cache_problems(vllm_config),
        *_adapter_problems(vllm_config),
        *_policy_problems(vllm_config),
        *_ascend_problems(vllm_config),
    ]


def cache_dtype(vllm_config: Any) -> str:
    """Dtype of the KV cache by vLLM's name. If a checkpoint asks for it, vLLM may say so only once the model is
    loaded."""
    asked: str = vllm_config.cache_config.cache_dtype
    quantisation = getattr(vllm_config.model_config.hf_config, "quantization_config", None)
    if asked == "auto" and isinstance(quantisation, dict) and quantisation.get("kv_cache_scheme"):
        return "fp8"
    return asked


def _policy_problems(vllm_config: Any) -> list[str]:
    settings = vllm_config.kv_transfer_config and vllm_config.kv_transfer_config.kv_connector_extra_config
    if not settings or "policy" not in settings:
        return []
    try:
        policy_served(
            settings["policy"],
            vllm_config.model_config.hf_text_config.num_hidden_layers,
            vllm_config.parallel_config.pipeline_parallel_size,
        )
    except ConfigError as error:
        return [str(error)]
    return []


def _model_problems(model: Any) -> list[str]:
    problems = []
    if model.runner_type != "generate":
        problems.append(
            f"the {model.runner_type} runner generates no text, so there is no prompt to speed up; "
            "serve this model without the chunk cache"
        )
    if model.is_encoder_decoder:
        problems.append(
            "an encoder-decoder model attends to its prompt through an encoder, which chunks cannot be cut out of; "
            "use a decoder-only model"
        )
    if getattr(model, "is_diffusion", False):  # vLLM 0.23, which vllm-ascend needs, does not have it
        problems.append("a diffusion model's tokens see later ones, so a chunk has no fixed KV; use another model")
    if model.is_attention_free:
        problems.append("a model without attention has no KV to reuse; use a model with attention in every layer")
    elif model.is_hybrid:
        problems.append(
            "layers with a recurrent state (Mamba, linear attention) mix all earlier tokens into it, which cannot be "
            "cut into chunks; use a model with attention in every layer"
        )
    if hasattr(model.hf_text_config, "index_topk"):
        problems.append(
            "sparse latent attention (DeepSeek V3.2) keeps a second cache for its index, which chunks do not hold; "
            "use a model without it"
        )
    return problems


def _parallel_problems(parallel: Any) -> list[str]:
    reasons = {
        "decode_context_parallel_size": "a rank holds only some of a chunk's tokens",
        "prefill_context_parallel_size": "a rank computes only some of a chunk's tokens",
    }
    problems = [
        f"{name}={getattr(parallel, name)}: {reason}; set it to 1 and use tensor_parallel_size"
        for name, reason in reasons.items()
        if getattr(parallel, name) > 1
    ]
    # The same condition under which vLLM makes every forward a collective operation of all ranks; None counts as MoE
    # there.
    if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
        problems.append(
            f"data_parallel_size={parallel.data_parallel_size} with a mixture of experts: all ranks must take part "
            "in each forward, and chunks are computed by one rank alone; start separate servers instead"
        )
    return problems


def _pipeline_problems(vllm_config: Any) -> list[str]:
    """Options that were never tried with pipeline stages."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if parallel.pipeline_parallel_size == 1:
        return []
    untried = {
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "images and other inputs than text": vllm_config.model_config.is_multimodal_model,
        "external_launcher": parallel.distributed_executor_backend == "external_launcher",
        "a quantised KV cache": cache_dtype(vllm_config) in QUANTISED,
        "prefix_match_unit": getattr(cache, "prefix_match_unit", None) is not None,
    }
    return [
        f"pipeline_parallel_size={parallel.pipeline_parallel_size} was never tried with {what}; set it to 1 and use "
        "tensor_parallel_size"
        for what, is_on in untried.items()
        if is_on
    ]


def _cache_problems(vllm_config: Any) -> list[str]:
    problems = []
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    stored = cache_dtype(vllm_config)
    if stored in QUANTISED:
        problems += _quantisation_problems(vllm_config)
    elif stored not in ("auto", dtype):
        problems.append(
            f"kv_cache_dtype={stored}: besides the model's own dtype, only fp8, fp8_e4m3 and fp8_e5m2 were "
            f"tried; leave it at auto, or set it to {dtype} if the checkpoint asks for {stored}"
        )
    if vllm_config.cache_config.kv_offloading_size is not None:
        problems.append(
            "kv_offloading_size: vLLM would replace the chunk cache by its own offloading; leave it out, and set "
            "prefix_blocks=true to keep exact prefixes in the tiers of the chunk cache"
        )
    return problems


def _quantisation_problems(vllm_config: Any) -> list[str]:
    cache = vllm_config.cache_config
    asked = f"kv_cache_dtype={cache_dtype(vllm_config)}"
    problems = []
    if vllm_config.model_config.use_mla:
        problems.append(
            f"{asked} was never tried with multi-head latent attention; set it to the model's own dtype, or serve "
            "this model without the chunk cache"
        )
    if getattr(cache, "kv_cache_dtype_skip_layers", None):  # releases differ
        problems.append(
            f"{asked} with kv_cache_dtype_skip_layers: chunks need the same kind of cache in all layers; leave it out"
        )
    if getattr(cache, "calculate_kv_scales", False):
        problems.append(
            f"{asked} with calculate_kv_scales: scales would change while chunks computed with others are stored; "
            "leave it out, and use a checkpoint that has scales"
        )
    return problems


def _adapter_problems(vllm_config: Any) -> list[str]:
    adapters = vllm_config.lora_config
    problems = []
    if adapters is not None and getattr(adapters, "enable_tower_connector_lora", False):  # releases differ
        problems.append(
            "enable_tower_connector_lora: chunks are computed by the language model alone, and would undo the "
            "adapters of a step's images; leave it out"
        )
    return problems


def _ascend_problems(vllm_config: Any) -> list[str]:
    """Options that are not prepared on Ascend NPUs."""
    if vllm_config.device_config.device_type != "npu":
        return []
    parallel, more = vllm_config.parallel_config, vllm_config.additional_config or {}
    unprepared = {
        "multi-head latent attention": vllm_config.model_config.use_mla,
        "a mixture of experts": parallel.is_moe_model is not False,
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "a KV cache in 8 bits (C8)": getattr(vllm_config.quant_config, "enable_c8_quant", False),
        "enable_hamming_sparse": more.get("enable_hamming_sparse"),
        "xlite_graph_config": more.get("xlite_graph_config", {}).get("enabled"),
    }
    for setting, variable in ASCEND_VARIABLES.items():
        unprepared[setting] = more.get(setting, os.environ.get(variable, "0") not in ("", "0"))
    return [
        f"{what}: not prepared on Ascend NPUs; leave it out, or serve this model without the chunk cache"
        for what, is_on in unprepared.items()
        if is_on
    ]


READS_IMAGES = (
    "Idefics3ForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
"""Tested models. Their images are embeddings among those of tokens, seen by later tokens alone. In other models,
images may see later tokens of themselves, or enter at several layers."""


def images_problem(vllm_config: Any) -> str | None:
    """Why a multimodal model's images, and text behind them, cannot be reused, in one line; ``None`` if they can be.
    Text before images can be in any case."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    multimodal = getattr(model, "multimodal_config", None)
    untried = {
        "/".join(model.architectures): not set(model.architectures) & set(READS_IMAGES),
        "speculative decoding": vllm_config.speculative_config is not None,
        f"tensor_parallel_size={parallel.tensor_parallel_size}": parallel.tensor_parallel_size > 1,
        "an encoder in another process": getattr(vllm_config, "ec_transfer_config", None) is not None,
        "mm_processor_cache_type=shm": getattr(multimodal, "mm_processor_cache_type", None) == "shm",
        "Ascend NPUs": vllm_config.device_config.device_type == "npu",
    }
    found = next((what for what, is_on in untried.items() if is_on), None)
    if found is None:
        return None
    return f"reading images was never tried with {found}; only documents before images are reused"


def looks_inside(spec: str, ratio: float) -> bool:
    """Whether the policy recomputes tokens that attend to reused tokens of their own chunk."""
    return 0 < ratio < 1 and not policy_named(spec).picks_starts


def policy_served(spec: str, num_layers: int, stages: int = 1) -> Policy:
    """The policy that ``spec`` names. Raises :class:`ConfigError` if it cannot be used in vLLM with a model of
    ``num_layers`` in ``stages`` pipeline stages."""
    policy = policy_named(spec)
    policy.check(num_layers)
    if policy.narrows and stages > 1:
        raise ConfigError(
            f"policy {spec}: sets that shrink from layer to layer do not work with pipeline_parallel_size={stages}; "
            "give one layer"
        )
    return policy
