"""What we use of vLLM that is no official contract, in one place. Checked with 0.26 to 0.32.

Everything else is the connector interface, ``worker_cls``, and ``torch.nn.Module``.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as event_hash
from vllm.v1.core.kv_cache_utils import resolve_block_hashes, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpecKind, get_kv_cache_spec_kind
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer, init_attn_backend

__all__ = [
    "Attend",
    "BlockSalts",
    "asks_for_layers",
    "attention_by",
    "build_attn_metadata",
    "build_slot_mappings_by_layer",
    "count_cached_tokens",
    "do_before_forward",
    "event_hash",
    "graph_context",
    "graph_inputs",
    "graph_size",
    "hash_block_size",
    "init_attn_backend",
    "is_plain_attention",
    "no_adapters",
    "paged_cache",
    "resolve_block_hashes",
    "sliding_window",
    "spec_kind",
    "unsupported_cache",
    "windowed_kind",
    "with_sequences",
    "write_rows",
]


SIZED_BY_BUILDERS = {"CPU_ATTN", "FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"}
"""Backends that were looked at: nothing but their metadata builders depends on how many sequences there may be."""


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per hash in ``request.block_hashes``."""
    return resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1]


def unsupported_cache(kv_cache_config: Any) -> list[str]:
    """Why the KV cache that vLLM is going to make cannot hold chunks."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        return []
    kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
    return [f"this model keeps its KV in {len(groups)} group(s) of {kinds}, not of all tokens; use another model"]


def sliding_window(kv_cache_config: Any) -> int | None:
    """Tokens that each token sees, itself among them, in those layers that do not see all. There is one such size, or
    vLLM refuses to keep all layers in one group."""
    window: int | None = kv_cache_config.kv_cache_groups[0].kv_cache_spec.sliding_window
    return window


def spec_kind(kv_cache_config: Any) -> str:
    """What vLLM's events call the layers of the one group."""
    kind: str = get_kv_cache_spec_kind(kv_cache_config.kv_cache_groups[0].kv_cache_spec).value
    return kind


def windowed_kind() -> str:
    """What they call layers with a sliding window that have a group of their own."""
    kind: str = KVCacheSpecKind.SLIDING_WINDOW.value
    return kind


class BlockSalts:
    """Gives a request hashes of its own for some of its blocks.

    KV that is not what vLLM would have computed must never be found by a request that it was not made for; the same
    request asked again may find it. A plain hash covers all tokens up to its block, so salting each is enough and
    costs no second hashing."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self._original: Callable[[Any], list[Any]] | None = request._block_hasher
        self.plain = list(request.block_hashes)
        """The hashes without salts."""
        self._salts: list[tuple[int, int | None, NDArray[np.uint8]]] = []
        """First block, end, and what is mixed into the hashes between them."""
        if self._original is not None:  # else nothing is ever hashed
            request._block_hasher = self._hash

    def add(self, salt: bytes, first: int, end: int | None = None) -> None:
        """Salt the hashes of blocks ``first .. end-1``, or of all from ``first`` on, also those not full yet.
        Never the same salt twice: that would undo it."""
        self._salts.append((first, end, np.frombuffer(hashlib.sha256(salt).digest(), np.uint8)))
        hashes = self._request.block_hashes
        hashes[first:end] = self._salted(self.plain[: len(hashes)][first:end], first)

    def _hash(self, request: Any) -> list[Any]:
        mine = request.block_hashes
        del self.plain[len(mine) :]
        request.block_hashes = self.plain  # what the original chains its hashes to
        assert self._original is not None
        new = self._original(request)
        request.block_hashes = mine
        self.plain.extend(new)
        return self._salted(new, len(mine))

    def _salted(self, hashes: list[Any], block: int) -> list[Any]:
        """What stands in for ``hashes``, which are of the blocks from ``block`` on: as hard to meet by chance."""
        if not hashes:
            return []
        size = len(hashes[0])
        mixed = np.frombuffer(b"".join(hashes), np.uint8).reshape(len(hashes), size).copy()
        for first, end, salt in self._salts:
            mixed[max(0, first - block) : None if end is None else max(0, end - block)] ^= salt[-size:]
        joined = mixed.tobytes()  # a prompt may have thousands
        return [joined[at : at + size] for at in range(0, len(joined), size)]


def count_cached_tokens(request: Any, local: int, reused: int) -> None:
    """Have vLLM report ``local`` tokens from its prefix cache and ``reused`` ones from ours as cached. Of its own it
    would count everything the worker brings, also what was just computed."""
    stats = request.prefill_stats
    if stats is not None and request.num_preemptions == 0:
        stats.set(
            num_prompt_tokens=request.num_prompt_tokens,
            num_local_cached_tokens=local,
            num_external_cached_tokens=reused,
        )


def with_sequences(vllm_config: Any, kv_cache_config: Any, count: int) -> Any:
    """The configuration with which metadata builders take ``count`` sequences; as it is where it allows more, or
    where others than builders have buffers of that size, too."""
    layers = vllm_config.compilation_config.static_forward_context
    names = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    backends = {layers[name].get_attn_backend().get_name() for name in names}
    if vllm_config.scheduler_config.max_num_seqs >= count or not backends <= SIZED_BY_BUILDERS:
        return vllm_config
    config = copy.copy(vllm_config)
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.max_num_seqs = count
    return config


def paged_cache(layer: Any) -> torch.Tensor:
    """The paged KV cache of an attention layer; on most backends ``[blocks, heads, block_size, k_dim + v_dim]``."""
    return layer.kv_cache


def write_rows(layer: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Store K and V ``[tokens, heads, dim]`` of one layer; the backend packs them as it likes."""
    layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)


Attend = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Callable[[], object]], None]
"""Does a layer's attention: the layer, queries ``[tokens, heads, dim]``, K and V ``[tokens, kv_heads, dim]``, where
the result goes ``[tokens, heads, v_dim]``, and what the backend itself would do."""


class _Attention:
    """A backend's attention of one layer, asked of somebody else; everything else is the backend's."""

    def __init__(self, backend: Any, attend: Attend, before: Callable[[Any], None]) -> None:
        self._backend = backend
        self._attend = attend
        self._before = before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def do_kv_cache_update(self, layer: Any, *given: Any) -> None:
        self._before(layer)
        self._backend.do_kv_cache_update(layer, *given)

    def forward(
        self,
        layer: Any,
        q: torch.Tensor,
        k: Any,
        v: Any,
        cache: Any,
        metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> torch.Tensor:
        def theirs() -> object:
            return self._backend.forward(layer, q, k, v, cache, metadata, output=output, **scales)

        self._attend(layer, q, k, v, output, theirs)
        return output


@contextmanager
def attention_by(attend: Attend, before: Callable[[Any], None], layers: Sequence[Any]) -> Iterator[None]:
    """Have ``attend`` do the attention of some layers, and ``before`` be called with each before its K and V are
    written. Compiled code looks for them when it runs, not before."""
    backends = [layer.impl for layer in layers]
    # Set as the plain attribute it is: a module's own way to set one looks for parameters first, which takes longer.
    for layer, backend in zip(layers, backends, strict=True):
        object.__setattr__(layer, "impl", _Attention(backend, attend, before))
    try:
        yield
    finally:
        for layer, backend in zip(layers, backends, strict=True):
            object.__setattr__(layer, "impl", backend)


def is_plain_attention(layer: Any) -> bool:
    """Whether a layer's attention is a softmax of scaled products and nothing else, within a window perhaps, after K
    and V were written by somebody else."""
    impl = layer.impl
    return (
        type(layer) is Attention
        and not layer.attn_backend.forward_includes_kv_cache_update
        and getattr(impl, "alibi_slopes", None) is None
        and getattr(impl, "sinks", None) is None
        and not getattr(impl, "logits_soft_cap", None)
    )


def do_before_forward(step: Any) -> None:
    """Have the workers do what ``step``, a ``SchedulerOutput``, has for the connector before its forward. Newer
    releases do it afterwards where no request of the step waits for it."""
    if hasattr(step, "has_sync_kv_loads"):
        step.has_sync_kv_loads = True


def asks_for_layers(forward_context: Any) -> bool:
    """Whether a forward, if it is still to come, calls the connector's ``wait_for_layer_load`` for every layer."""
    mode = forward_context.cudagraph_runtime_mode
    return forward_context.attn_metadata is not None and mode != CUDAGraphMode.FULL


def graph_size(runner: Any, tokens: int) -> int | None:
    """Tokens of the smallest CUDA graph, in pieces between attention, that takes ``tokens``; ``None`` where vLLM has
    none (yet), or none that we know how to feed: the V2 runner's, without adapters, of models that take one position
    for each token. Writing K and V must be no part of it, or it would write where the step in progress does."""
    manager = getattr(runner, "cudagraph_manager", None)
    if (
        not getattr(manager, "_graphs_captured", False)
        or getattr(manager, "use_breakable_cg", False)
        or runner.lora_config is not None
        or getattr(runner.model_state, "rope_state", None) is not None
    ):
        return None
    assert manager is not None
    if "vllm::unified_kv_cache_update" not in (manager.compilation_config.splitting_ops or ()):
        return None
    graphs = manager._capture_descs.get(CUDAGraphMode.PIECEWISE, ())
    return min((graph.num_tokens for graph in graphs if graph.num_tokens >= tokens), default=None)


@contextmanager
def graph_inputs(
    runner: Any, tokens: torch.Tensor, positions: torch.Tensor, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The memory that CUDA graphs read their inputs from, holding these, of which the first ``count`` are no padding;
    the step in progress has its own back afterwards."""
    buffers = runner.input_buffers
    places = [part[: len(tokens)] for part in (buffers.input_ids, buffers.positions, buffers.is_padding)]
    before = [place.clone() for place in places]
    padding = torch.arange(len(tokens), device=tokens.device) >= count
    for place, values in zip(places, (tokens, positions, padding), strict=True):
        place.copy_(values)
    try:
        yield places[0], places[1]
    finally:
        for place, values in zip(places, before, strict=True):
            place.copy_(values)


def graph_context(size: int | None) -> dict[str, Any]:
    """What ``set_forward_context`` has to know for a graph of ``size`` tokens to be used."""
    if size is None:
        return {}
    return {"cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE, "batch_descriptor": BatchDescriptor(size)}


@contextmanager
def no_adapters(runner: Any, rows: int, tokens: int) -> Iterator[None]:
    """Run so many tokens in so many rows through the base model, then go back to the adapters of the step."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        yield
        return
    adapters = manager._adapter_manager
    before = adapters._last_mapping
    adapters.set_adapter_mapping(LoRAMapping((0,) * tokens, (0,) * rows, is_prefill=True))
    try:
        yield
    finally:
        if before is not None:
            adapters.set_adapter_mapping(before)
