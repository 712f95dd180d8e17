"""Decides whether entries hold the KV of a draft model."""

import logging
from typing import Any

from kvmosaic.core.errors import UnsupportedModelError
from kvmosaic.engines.identity import config_identity
from kvmosaic.engines.loaded_weights import sampled_digest
from kvmosaic.engines.vllm.compat.drafts import Drafter, draft_files, draft_heads, drafter_of
from kvmosaic.engines.vllm.compat.layers import KVLayer
from kvmosaic.engines.vllm.compat.weights import loaded_tensors, weight_files
from kvmosaic.engines.vllm.forward.kv_layers import KVLayers
from kvmosaic.engines.vllm.forward.metadata import MetadataBuilder
from kvmosaic.engines.vllm.forward.ranks import RankLostError, Ranks
from kvmosaic.engines.vllm.forward.rotary import measure_rotary
from kvmosaic.engines.vllm.forward.sparse import SparseForward
from kvmosaic.models.digest import weights_digest

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""

LEFT_OUT = (
    "the KV of the draft model %s is not stored with documents, because %s; answers are the same, but fewer drafts "
    "are accepted after reuse"
)
SAMPLE_BYTES = 64 * 1024
"""Maximum number of bytes that are sampled of each weight of a draft model whose files are not known."""


def keep_drafts(vllm_config: Any, runner: Any, kv: KVLayers, metadata: MetadataBuilder) -> Drafter | None:
    """The draft model whose layers entries hold as well; ``None`` if there is none or it does not fit, which is then
    logged. ``runner`` is vLLM's model runner. To be called before any block is in use."""
    if not kv.of_draft_model:
        return None
    ranks, drafter = Ranks(vllm_config.model_config, len(kv)), drafter_of(runner)
    problem = drafter if isinstance(drafter, str) else _misfit(vllm_config, kv)
    if problem is None and isinstance(drafter, Drafter):
        kv.keep_drafts(kv.of_draft_model)
        problem = _trial(vllm_config, runner, kv, metadata, ranks, drafter)
    told = ranks.gather(problem)
    problem = next((found for found in told if found is not None), None)
    if problem is None and isinstance(drafter, Drafter):
        return drafter
    kv.keep_drafts([])
    if ranks.rank == 0:
        logger.warning(LEFT_OUT, draft_files(vllm_config)[0].model, problem)
    return None


def draft_identity(vllm_config: Any, drafter: Drafter, ranks: Ranks) -> dict[str, object]:
    """Everything that the KV of a draft model depends on, the same on all ranks."""
    model, load = draft_files(vllm_config)
    weights: object = None
    if ranks.rank == 0:
        try:
            where = weight_files(model, load)
            weights = where and weights_digest(*where)
        except OSError:
            logger.exception("could not read the weight files of the draft model")
    weights = ranks.first(weights)
    return {
        "method": drafter.method,
        "weights": weights or ranks.gather(sampled_digest(loaded_tensors(drafter.model), SAMPLE_BYTES)),
        "quantization": model.quantization,
        "config": config_identity(model.hf_text_config.to_dict()),
    }


def _misfit(vllm_config: Any, kv: KVLayers) -> str | None:
    """Why layers of the draft model cannot be further layers of entries."""
    model = vllm_config.model_config
    heads = draft_heads(vllm_config), model.get_total_num_kv_heads()
    if not model.use_mla and heads[0] != heads[1]:
        return f"it has {heads[0]} KV heads, and the served model {heads[1]}"
    wanted = _shape(kv.layers[0])
    if any(_shape(layer) != wanted for layer in kv.of_draft_model):
        return "its KV has another shape or type than the served model's"
    return None


def _shape(layer: KVLayer) -> tuple[object, ...]:
    """Everything that all layers of an entry have in common."""
    cache, quantised = layer.cache, layer.quantised
    return (
        type(layer),
        *(layer.kv_heads, layer.k_dim, layer.v_dim, layer.is_plain),
        *(cache.shape, cache.stride(), cache.dtype, quantised and quantised.name),
    )


def _trial(
    vllm_config: Any, runner: Any, kv: KVLayers, metadata: MetadataBuilder, ranks: Ranks, drafter: Drafter
) -> str | None:
    """Compute a few tokens with the draft model. Returns the reason why its KV cannot be moved, if so."""
    forward = SparseForward(
        vllm_config, runner, kv, metadata, ranks=ranks, arrivals=None, tiles=None, drafter=drafter
    )
    try:
        rotary = measure_rotary(forward, [runner.model, drafter.model], first_layer=0)
    except UnsupportedModelError:
        return "its keys do not turn with position like rotary ones"
    except (Exception, RankLostError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    theirs = {layer.columns for layer in rotary[: len(kv)] if layer}
    if any(layer is not None and layer.columns not in theirs for layer in rotary[len(kv) :]):
        return "its keys turn in other columns than the served model's"
    return None
