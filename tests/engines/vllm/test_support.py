"""Configurations that the chunk cache refuses. vLLM itself makes them, and no weights are loaded."""

import json

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from kvmosaic.core.config import load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.engines.vllm.arguments import engine_arguments, served_dtype
from kvmosaic.engines.vllm.support import images_problem, unsupported, version_problem
from tests.engines.vllm.tiny import FP8_CACHE
from tests.half_precision import pretend_cpu

pytestmark = pytest.mark.timeout(300)

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}
DEEPER = {**LLAMA, "num_hidden_layers": 4}
SHRINKING = engine_arguments(load_config(enable_chunk_cache=True, policy="kv-deviation(layers=1+2)"))
BERT = {"model_type": "bert", "architectures": ["BertModel"], **SIZES}
MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2, **SIZES}
MAMBA = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
}
HYBRID = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "head_dim": 16,
    "num_experts": 2,
    "layer_types": ["linear_attention", "full_attention"],
    **SIZES,
}
LATENT = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
IDEFICS = {
    "model_type": "idefics3",
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 6,
    "scale_factor": 2,
    "text_config": {"model_type": "llama", **SIZES},
    "vision_config": {
        "model_type": "idefics3_vision",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    },
}
WHISPER = {
    "model_type": "whisper",
    "architectures": ["WhisperForConditionalGeneration"],
    "is_encoder_decoder": True,
    "vocab_size": 300,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


@pytest.fixture
def build(tmp_path):
    """Make vLLM's configuration for a model that is only a ``config.json``."""

    def build(config, **arguments):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return EngineArgs(model=str(tmp_path), **arguments).create_engine_config()

    return build


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        engine_arguments(load_config(enable_chunk_cache=True)),
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"enable_lora": True},
        {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
    ],
    ids=[
        "plain",
        "ours",
        "tensor-parallel",
        "pipeline",
        "both",
        "lora",
        "same-dtype",
        "fp8",
        "e5m2",
        "ngram",
    ],
)
def test_supported(build, arguments):
    assert unsupported(build(LLAMA, **arguments)) == []


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (MIXTRAL, {}),
        (LATENT, {}),
        (LATENT, {"enable_lora": True}),
        (LATENT, {"pipeline_parallel_size": 2}),
        (DEEPER, SHRINKING),
    ],
    ids=["mixture of experts", "mla", "mla-lora", "mla-pipeline", "sets that shrink"],
)
def test_other_models_that_are_supported(build, model, arguments):
    assert unsupported(build(model, **arguments)) == []


@pytest.mark.parametrize(
    ("model", "arguments", "named"),
    [
        (
            LLAMA,
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
            "pipeline_parallel_size=2 was never tried with external_launcher",
        ),
        (
            LLAMA,
            {"pipeline_parallel_size": 2, "enable_lora": True},
            "pipeline_parallel_size=2 was never tried with LoRA",
        ),
        (
            LLAMA,
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "decode_context_parallel_size=2",
        ),
        (MIXTRAL, {"data_parallel_size": 2}, "data_parallel_size=2"),
        (LLAMA, {"kv_cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype=fp8_per_token_head"),
        (LLAMA, {"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype=fp8_ds_mla"),
        (LLAMA, {"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype=nvfp4"),
        ({**LATENT, "quantization_config": FP8_CACHE}, {}, "kv_cache_dtype=fp8 was never tried with multi-head"),
        (LATENT, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 was never tried with multi-head latent"),
        (LLAMA, {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}, "kv_cache_dtype_skip_layers"),
        (
            LLAMA,
            {"pipeline_parallel_size": 2, "kv_cache_dtype": "fp8"},
            "pipeline_parallel_size=2 was never tried with a quantised KV cache",
        ),
        (
            DEEPER,
            {**SHRINKING, "pipeline_parallel_size": 2},
            "sets that shrink from layer to layer do not work with pipeline_parallel_size=2",
        ),
        (LLAMA, {"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "kv_cache_dtype=bfloat16"),
        (LLAMA, {"kv_offloading_size": 1.0}, "kv_offloading_size"),
        (LLAMA, {"enable_lora": True, "enable_tower_connector_lora": True}, "enable_tower_connector_lora"),
        (LLAMA, {"runner": "pooling"}, "pooling"),
        (BERT, {}, "pooling"),
        (WHISPER, {}, "encoder-decoder"),
        (MAMBA, {}, "without attention"),
        (HYBRID, {}, "recurrent state"),
        ({**LATENT, "index_topk": 4}, {}, "index"),
    ],
    ids=[
        "pipeline-launcher",
        "pipeline-lora",
        "decode-context",
        "data-parallel-moe",
        "per-token-head",
        "ds-mla",
        "nvfp4",
        "checkpoint-fp8-mla",
        "fp8-mla",
        "fp8-skip",
        "fp8-pipeline",
        "shrinking-pipeline",
        "other-dtype",
        "offloading",
        "lora-tower",
        "pooling-runner",
        "pooling-model",
        "encoder-decoder",
        "mamba",
        "hybrid",
        "sparse-mla",
    ],
)
def test_refused(build, model, arguments, named):
    [reason] = unsupported(build(model, **arguments))
    assert named in reason
    assert ";" in reason, "what to do is missing"
    assert "\n" not in reason


def test_a_draft_model_is_supported(build, tmp_path):
    draft = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    assert unsupported(build(LLAMA, speculative_config=draft)) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, None),
        ({"enable_lora": True}, None),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"mm_processor_cache_type": "shm"}, "mm_processor_cache_type=shm"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculat",
        ),
    ],
    ids=["plain", "lora", "ranks", "fp8", "shared-memory", "drafts"],
)
def test_where_images_are_read(build, arguments, named):
    config = build(IDEFICS, **arguments)
    assert unsupported(config) == []
    problem = images_problem(config)
    assert problem is None if named is None else named in problem


def test_images_of_models_that_were_never_tried_are_not_read(build, monkeypatch):
    monkeypatch.setattr("kvmosaic.engines.vllm.support.READS_IMAGES", ("AnotherModel",))
    assert "Idefics3ForConditionalGeneration" in images_problem(build(IDEFICS))


def test_prefill_context_parallel_is_refused(build):
    config = build(LLAMA)
    # Set afterwards: on a CPU vLLM cannot build it (its model runner there has no prefill context parallelism).
    config.parallel_config.prefill_context_parallel_size = 2
    [reason] = unsupported(config)
    assert "prefill_context_parallel_size=2" in reason


def test_data_parallel_without_experts_is_supported(build):
    config = build(LLAMA)
    # Set afterwards: vLLM builds it only for its server, which then runs the ranks as separate engines.
    config.parallel_config.data_parallel_size = 2
    assert unsupported(config) == []


def test_diffusion_models_are_refused(build):
    config = build(LLAMA)
    # Set afterwards, where vLLM looks for it: on a CPU it cannot build one (the model runner there has none).
    config.model_config.hf_config.canvas_length = 32
    vars(config.model_config).pop("is_diffusion", None)  # remembered from building
    [reason] = unsupported(config)
    assert "diffusion" in reason


@pytest.mark.parametrize(
    ("model", "arguments", "named"),
    [
        (LLAMA, {}, []),
        (LLAMA, {"tensor_parallel_size": 2, "additional_config": {"enable_flashcomm1": False}}, []),
        (LLAMA, {"pipeline_parallel_size": 2, "enable_lora": True}, ["pipeline_parallel_size", "LoRA"]),
        (LLAMA, {"additional_config": {"enable_flashcomm1": True}}, ["enable_flashcomm1"]),
        (LLAMA, {"additional_config": {"enable_flashcomm2_parallel_size": 2}}, ["enable_flashcomm2_parallel_size"]),
        (LLAMA, {"additional_config": {"xlite_graph_config": {"enabled": True}}}, ["xlite_graph_config"]),
        (MIXTRAL, {}, ["a mixture of experts"]),
        (LATENT, {}, ["multi-head latent attention", "a mixture of experts"]),
    ],
    ids=["plain", "tensor-parallel", "two", "flashcomm1", "flashcomm2", "xlite", "mixture", "mla"],
)
def test_what_is_not_prepared_on_npus(build, model, arguments, named):
    config = build(model, **arguments)
    config.device_config.device_type = "npu"  # set afterwards: vLLM builds it only where vllm-ascend runs
    reasons = [reason for reason in unsupported(config) if "Ascend" in reason]
    assert [reason.partition(":")[0].partition(" >")[0] for reason in reasons] == named
    assert all(";" in reason for reason in reasons), "what to do is missing"


def test_every_reason_is_given(build):
    reasons = unsupported(build({**LATENT, "index_topk": 4}, pipeline_parallel_size=2, kv_cache_dtype="fp8"))
    assert len(reasons) == 3


@pytest.mark.parametrize("version", ["0.23.0", "0.26.0", "0.26.0rc1", "0.30.1.dev4+gabc", "0.32.0+cpu"])
def test_versions_that_work(version):
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["0.9.2", "0.22.1", "0.24.0", "0.25.1", "0.33.0", "0.33.0rc1", "1.0.0", "dev"])
def test_versions_that_do_not(version):
    problem = version_problem(version)
    assert problem is not None
    assert version in problem
    assert "vllm>=0.23,<0.33,!=0.24.*,!=0.25.*" in problem


def test_the_installed_version_works():
    import vllm

    assert version_problem(vllm.__version__) is None


def arguments_for(tmp_path, **changes):
    """vLLM's arguments for a bfloat16 checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "dtype": "bfloat16"}))
    return EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, **changes)


def said(caplog):
    """Lines that we logged, without vLLM's."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("kvmosaic")]


on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM runs on the GPU, which has bfloat16")


@on_a_cpu
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16, "float32", "float16"])
def test_a_cpu_with_bfloat16_serves_what_was_asked_for(dtype, tmp_path, monkeypatch, caplog):
    pretend_cpu(monkeypatch, tmp_path, "asimd asimdhp bf16")
    assert served_dtype(arguments_for(tmp_path, dtype=dtype)) == dtype
    assert said(caplog) == []


@on_a_cpu
def test_a_cpu_without_bfloat16_serves_in_float32_and_says_so(tmp_path, monkeypatch, caplog):
    pretend_cpu(monkeypatch, tmp_path, "asimd asimdhp")
    assert served_dtype(arguments_for(tmp_path)) == "float32"
    line = "serving in float32 instead of bfloat16: this CPU has no bfloat16 instructions"
    assert said(caplog) == [line]
    for other in ("float32", "float16"):
        assert served_dtype(arguments_for(tmp_path, dtype=other)) == other
    assert said(caplog) == [line]


@on_a_cpu
@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_a_cpu_without_bfloat16_refuses_it(dtype, tmp_path, monkeypatch):
    pretend_cpu(monkeypatch, tmp_path, "asimd asimdhp")
    with pytest.raises(ConfigError, match=r"^dtype=bfloat16: this CPU has no .* use float32 or leave dtype at auto$"):
        served_dtype(arguments_for(tmp_path, dtype=dtype))
