"""Checks of a model: its configuration and its chat template."""

from collections import Counter
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmosaic.cli.doctor.in_vllm import Served, dtype_name
from kvmosaic.cli.doctor.machine import device_pool
from kvmosaic.cli.doctor.row import Row, guard
from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.engines.precision import cpu_runs_bfloat16, needs_float32

if TYPE_CHECKING:  # importing it for real takes seconds, which `kvmosaic --help` should not
    import torch

MOVABLE_ROPE = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope", "proportional"})
"""Kinds of rotary tables whose keys can be rotated from one position to another."""
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
STATE_LAYERS = frozenset({"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"})
"""Kinds of layers, by transformers' names, that carry a state from token to token."""


def model_rows(source: str, settings: ChunkCacheConfig, served: Served) -> Iterator[Row]:
    """Rows about a model that :func:`find` found."""
    yield from guard("model", _describe(source, settings, served))
    yield _chat_template(source, settings)
    yield from served.rows


def find(name: str) -> str | Row:
    """The folder or hub name to load, as by :func:`kvmosaic.models.resolve`; a row if it is not on this machine."""
    from kvmosaic.models import CATALOG, installed

    if name in CATALOG:
        folder = installed().get(name)
        pull = f"kvmosaic models pull {name}, then run this again"
        return str(folder) if folder else Row("model", "warn", "not on this machine, not checked", pull)
    if Path(name).is_dir():
        return name
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return name
    except HFValidationError:
        return Row("model", "fail", "no such folder", f"{name} is neither a folder nor a hub name; correct it")
    similar = get_close_matches(name, CATALOG, n=1)
    meant = f"did you mean {similar[0]}? Otherwise " if similar else ""
    fetch = f"{name} is neither a folder nor in the hub's cache; {meant}hf download {name}, then run this again"
    return Row("model", "warn", "not on this machine, not checked", fetch)


def _describe(source: str, settings: ChunkCacheConfig, served: Served) -> Iterator[Row]:
    """Rows about the model's own configuration."""
    ranks, stages = served.ranks, served.stages
    from transformers import AutoConfig

    try:
        # Explicitly False: by default, transformers asks the user whether to trust a model that brings its own code.
        config = AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The first line of transformers' errors names the problem; the last one may be general advice.
        yield Row("model", "fail", "transformers cannot read its configuration", str(error).split("\n")[0])
        return
    text = config.get_text_config(decoder=True)
    architecture = (config.architectures or [config.model_type])[0]
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        advice = "there is no KV to reuse; use a model with attention in every layer"
        yield Row("model", "fail", f"{architecture}, no attention", advice)
        return
    latent = getattr(text, "kv_lora_rank", None)
    kv_heads = _kv_heads(text)
    k_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    v_dim = getattr(text, "v_head_dim", None) or k_dim
    if latent:
        kv_heads, k_dim, v_dim = 1, latent, text.qk_rope_head_dim
    shape = f"one latent of {k_dim} + {v_dim} (MLA)" if latent else f"{kv_heads} KV heads of {k_dim}"
    yield Row("model", "ok", f"{architecture}, {text.num_hidden_layers} layers, {shape}")
    if ranks > 1 and not latent:  # every rank has the whole latent
        yield _tensor_parallel(kv_heads, ranks)
    if stages > 1:
        yield _pipeline_parallel(text.num_hidden_layers, stages)
    yield _positions(config, text)
    yield from _layer_kinds(text)

    from kvmosaic.core.entry import KVFormat

    own_heads, own_layers = -(-kv_heads // ranks), -(-text.num_hidden_layers // stages)
    # Some models share KV between layers, or have heads of two sizes. Configurations say so in many ways, so the
    # size is only approximate.
    odd = ("num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads")
    about = "about " if any(getattr(text, name, None) for name in odd) else ""
    places = [("device pool", device_pool(settings)), ("host", int(settings.host_memory))]
    for dtype in _dtypes(config, text, served.config):
        sizes, is_int8 = (own_layers, own_heads, k_dim, v_dim), settings.entry_dtype == "int8"
        size = KVFormat(*sizes, dtype, is_int8=is_int8).bytes_per_token
        room = ", ".join(f"{place} {budget // size:,}" for place, budget in places if budget)
        share = " on each rank" if (own_heads, own_layers) != (kv_heads, text.num_hidden_layers) else ""
        yield Row(
            f"KV in {dtype_name(dtype)}{', documents in int8' if is_int8 else ''}",
            "ok",
            f"{about}{size / 1024:.1f} KiB a token{share}; tokens that fit: {room}",
        )


def _chat_template(source: str, settings: ChunkCacheConfig) -> Row:
    """Row about which documents of chat requests the chat template puts into the prompt."""
    from transformers import AutoTokenizer

    from kvmosaic.engines.chat_template import working_sources

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        sources = working_sources(tokenizer)
    except Exception as error:
        return Row("chat template", "warn", "its tokenizer cannot be read, not checked", str(error).split("\n")[0])
    if sources.has_template and not set(sources.working) & settings.sources:
        advice = "requests must name their documents, and a message must contain them; see docs/howto/documents.md"
        return Row("chat template", "warn", str(sources), advice)
    return Row("chat template", "ok", str(sources))


def _kv_heads(text: Any) -> int:
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1  # Falcon's configuration says so here, whatever its num_kv_heads is
    return (
        getattr(text, "num_key_value_heads", None) or getattr(text, "num_kv_heads", None) or text.num_attention_heads
    )


def _dtypes(config: Any, text: Any, vllm_config: Any) -> list["torch.dtype"]:
    """The dtypes of the embedded engine, mostly the checkpoint's, and of vLLM, which may choose another."""
    import torch

    from kvmosaic.core.accelerator import accelerator_there

    own = dtype_name(config.dtype or text.dtype or torch.float32)
    is_quantized = getattr(config, "quantization_config", None) is not None
    if accelerator_there() is None and not cpu_runs_bfloat16() and needs_float32(own, is_quantized):
        own = "float32"
    chosen = [getattr(torch, own)]
    if vllm_config is not None:
        chosen.append(vllm_config.model_config.dtype)
    return list(dict.fromkeys(chosen))


def _tensor_parallel(kv_heads: int, size: int) -> Row:
    if kv_heads % size == 0:
        return Row("tensor parallel", "ok", f"{size} ranks with {kv_heads // size} KV heads each")
    if size % kv_heads == 0:
        return Row("tensor parallel", "ok", f"{size} ranks, each KV head on {size // kv_heads} of them")
    fitting = ", ".join(str(count) for count in range(2, kv_heads + 1) if kv_heads % count == 0)
    advice = f"{kv_heads} KV heads do not split over {size} ranks; use {fitting}, or a multiple of {kv_heads}"
    return Row("tensor parallel", "fail", f"{kv_heads} KV heads, {size} ranks", advice)


def _pipeline_parallel(layers: int, stages: int) -> Row:
    if stages > layers:
        advice = f"{layers} layers do not split over {stages} stages; use {layers} at most"
        return Row("pipeline parallel", "fail", f"{layers} layers, {stages} stages", advice)
    fewest, more = divmod(layers, stages)
    each = f"{fewest} or {fewest + 1}" if more else str(fewest)
    return Row("pipeline parallel", "ok", f"{stages} stages with {each} layers each")


def _positions(config: Any, text: Any) -> Row:
    if any(getattr(part, "dual_chunk_attention_config", None) for part in (config, text)):
        kinds = {"dual-chunk"}
    else:
        kinds = _rope_kinds(text)
    if not kinds:
        advice = (
            "chunks can only be moved with rotary positions, not with learned, absolute or ALiBi ones; use another "
            "model"
        )
        return Row("positions", "fail", "no rotary positions", advice)
    found = f"rotary: {', '.join(sorted(kinds))}"
    if kinds <= MOVABLE_ROPE:
        return Row("positions", "ok", f"{found}; can move")
    if kinds & {"fope", "dual-chunk"}:
        return Row(
            "positions", "fail", found, "keys of this kind cannot be moved to another position; use another model"
        )
    advice = "never tested; the engine measures at start whether keys can be moved, and reports it if they cannot"
    return Row("positions", "warn", found, advice)


def _rope_kinds(text: Any) -> set[str]:
    """The kinds of rotary tables; a model may have one per kind of layer. Empty if it has none."""
    parameters = getattr(text, "rope_parameters", None)
    if not parameters:
        # The configurations of the oldest rotary models only name the number of rotated columns.
        return {"default"} if getattr(text, "rotary_dim", None) else set()
    tables = [table for table in parameters.values() if isinstance(table, dict)] or [parameters]
    return {
        "fope"
        if table.get("use_fope")
        else "mrope"
        if "mrope_section" in table
        else table.get("rope_type", "default")
        for table in tables
    }


def _layer_kinds(text: Any) -> Iterator[Row]:
    kinds = Counter(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if not kinds and window and getattr(text, "use_sliding_window", True):
        kinds["sliding_attention"] = text.num_hidden_layers
    if states := kinds.keys() & STATE_LAYERS:
        advice = "a recurrent state cannot be cut into chunks; use a model with attention in every layer"
        yield Row("layers", "fail", ", ".join(sorted(states)), advice)
    if sliding := kinds["sliding_attention"]:
        found = f"{sliding} of {text.num_hidden_layers} layers; works (window_tails stores less of them at ratio 0)"
        yield Row("sliding window", "ok", found)
    if others := kinds.keys() - ATTENTION_LAYERS - STATE_LAYERS:
        advice = "never tested; compare answers with those at recompute_ratio=1.0 before relying on it"
        yield Row("layers", "warn", ", ".join(sorted(others)), advice)
