"""vLLM's attention layers, as our code uses them: their caches, their writers, and how to replace their attention."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from kvmosaic.blend.base import KVPart
from kvmosaic.engines.vllm.compat.ascend import is_ascend
from kvmosaic.engines.vllm.compat.cpu_cache import write_on_cpu
from kvmosaic.engines.vllm.compat.quantised import Quantised


class Backend(Protocol):
    """Runs the backend's own attention."""

    def __call__(self, rows: slice = ..., told: Any = None) -> object:
        """Attention of all tokens, or of ``rows`` of them, if it is ``told`` the metadata of these alone."""
        ...


Attend = Callable[["KVLayer", torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Backend], None]
"""Computes a layer's attention. Its arguments are the layer, queries ``[tokens, heads, dim]``, K and V as they are
cached, ``[tokens, kv_heads, …]``, the output, and the backend's own attention."""
_ALL = slice(None)


class KVLayer(ABC):
    """One attention layer with a cache. Sizes are those of this rank."""

    prefers_short_first = False
    """Whether the backend reads the cache faster for short runs if these come before all longer ones."""
    keeps_first_runs_apart = False
    """Whether runs that begin a sequence need a pass of their own."""
    score_parts: tuple[KVPart, ...] = ("k",)
    """Parts of the cache whose columns, one part after the other, are the keys."""

    def __init__(self, module: Any, kv_heads: int, k_dim: int, v_dim: int) -> None:
        self.module = module
        self.name: str = module.layer_name
        self.heads: int = module.num_heads
        """Number of query heads."""
        self.kv_heads = kv_heads
        self.k_dim = k_dim
        self.v_dim = v_dim

    @property
    @abstractmethod
    def cache(self) -> torch.Tensor:
        """The paged cache; on most backends ``[blocks, kv_heads, block_size, k_dim + v_dim]``."""

    @abstractmethod
    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Store K ``[tokens, kv_heads, k_dim]`` and V at ``slots`` ``[tokens]``. The backend chooses the memory
        order."""

    @abstractmethod
    def score_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries ``[tokens, heads, dim]`` in the form whose products with the ``score_parts`` are the scores."""

    @abstractmethod
    def replace_attention(self, attend: Attend, before: Callable[["KVLayer"], None]) -> Callable[[], None]:
        """Have ``attend`` compute this layer's attention, and ``before`` called before its K and V are written.
        Returns a function that undoes it. Compiled code also uses them, because it looks them up when it runs."""

    @property
    def quantised(self) -> Quantised | None:
        """How the cache is quantised, if it is. The writer quantises, so K and V are never quantised elsewhere."""
        return Quantised.of(self.module)

    @property
    def scale(self) -> float:
        """Scaling factor of the attention scores."""
        return float(self.module.impl.scale)

    @property
    def window(self) -> int | None:
        """Number of tokens that each token sees, including itself; ``None``: all before it."""
        return getattr(self.module, "sliding_window", None)

    @property
    def is_plain(self) -> bool:
        """Whether attention is only a softmax of scaled products, possibly within a window, and K and V are written
        by a separate call before it."""
        return False


class HeadsLayer(KVLayer):
    """Attention with K and V of each KV head."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.num_kv_heads, module.head_size, module.head_size_v)
        self._can_write = hasattr(module.impl, "do_kv_cache_update")

    @property
    def cache(self) -> torch.Tensor:
        cache: torch.Tensor = self.module.kv_cache
        return cache

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        if self._can_write:
            self.module.impl.do_kv_cache_update(self.module, k, v, self.module.kv_cache, slots)
        else:
            write_on_cpu(self.module, k, v, slots)

    def score_queries(self, q: torch.Tensor) -> torch.Tensor:
        """Some backends get quantised queries for a quantised cache."""
        quantised = self.quantised
        return q.float() * quantised.q_scale if quantised is not None and q.dtype.itemsize == 1 else q

    def replace_attention(self, attend: Attend, before: Callable[[KVLayer], None]) -> Callable[[], None]:
        backend = self.module.impl
        _set(self.module, "impl", _HeadsAttention(self, backend, attend, before))
        return lambda: _set(self.module, "impl", backend)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: Any, out: torch.Tensor) -> None:
        """Attention of ``q`` ``[tokens, heads, k_dim]`` over the cache by the backend, into ``out``."""
        self.module.impl.forward(self.module, q, k, v, self.module.kv_cache, metadata, output=out)

    @property
    def is_plain(self) -> bool:
        impl = self.module.impl
        return (
            type(self.module) is Attention
            and not self.module.attn_backend.forward_includes_kv_cache_update
            and getattr(impl, "alibi_slopes", None) is None
            and getattr(impl, "sinks", None) is None
            and not getattr(impl, "logits_soft_cap", None)
        )


class PairLayer(HeadsLayer):
    """Attention on an Ascend NPU: K and V are cached in two tensors, and the backend writes them when it computes
    attention. Prepared from vllm-ascend's source; never run on an NPU."""

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The caches of K and V, ``[blocks, block_size, kv_heads, dim]`` each."""
        k, v = self.module.kv_cache
        return k, v

    @property
    def cache(self) -> torch.Tensor:
        raise TypeError("K and V have a tensor each")

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        # The NPU's kernel takes no other type of slots.
        self.module.impl.do_kv_cache_update(self.module, k, v, self.module.kv_cache, slots.to(torch.int32))


class LatentLayer(KVLayer):
    """Multi-head latent attention (MLA): all heads share one latent, which is cached as K, and a few rotated columns,
    which are cached as V. Every rank has all of both."""

    prefers_short_first = True  # a long run projects its context to all heads; short runs read the latent itself
    # vLLM 0.26 expects runs without a context behind all others, and otherwise forgets the context of the last runs.
    keeps_first_runs_apart = True
    score_parts = ("k", "v")

    def __init__(self, module: Any) -> None:
        super().__init__(module, 1, module.kv_lora_rank, module.qk_rope_head_dim)

    @property
    def cache(self) -> torch.Tensor:
        cache: torch.Tensor = self.module.kv_cache
        return cache.unsqueeze(1)

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        layer = self.module
        layer.impl.do_kv_cache_update(
            k[:, 0].contiguous(), v.contiguous(), layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale
        )

    def score_queries(self, q: torch.Tensor) -> torch.Tensor:
        """The part of a query that is not rotated is projected to the latent, with the weights that otherwise project
        the latent to the heads. They may be quantised, so they are read off the projection of unit vectors."""
        layer = self.module
        units = torch.eye(self.k_dim, dtype=q.dtype, device=q.device)
        projection = getattr(layer.kv_b_proj, "base_layer", layer.kv_b_proj)  # without adapters
        to_heads = projection(units)[0].view(self.k_dim, self.heads, -1)[..., : layer.qk_nope_head_dim]
        still, rotated = q.split([layer.qk_nope_head_dim, self.v_dim], dim=-1)
        return torch.cat([torch.einsum("thd,lhd->thl", still, to_heads), rotated], dim=-1)

    def replace_attention(self, attend: Attend, before: Callable[[KVLayer], None]) -> Callable[[], None]:
        layer, backend, forward = self.module, self.module.impl, self.module.forward_impl

        def forward_impl(
            q: torch.Tensor,
            latent: torch.Tensor,
            rotated: torch.Tensor,
            cache: torch.Tensor,
            metadata: Any,
            output: torch.Tensor,
            **more: Any,
        ) -> torch.Tensor:
            def theirs(rows: slice = _ALL, told: Any = None) -> object:
                if told is None:
                    return forward(q, latent, rotated, cache, metadata, output=output, **more)
                return forward(q[rows], latent[rows], rotated[rows], cache, told, output=output[rows], **more)

            attend(self, q, latent[:, None], rotated.view(len(latent), 1, -1), output, theirs)
            return output

        def undo() -> None:
            _set(layer, "impl", backend)
            del layer.__dict__["forward_impl"]

        _set(layer, "impl", _Announced(self, backend, before))
        _set(layer, "forward_impl", forward_impl)
        return undo


def _set(module: Any, name: str, value: Any) -> None:
    """Set a plain attribute: a module's own ``__setattr__`` looks for parameters first, which is slower."""
    object.__setattr__(module, name, value)


class _Announced:
    """Stands in for a layer's backend, and announces writes before the backend makes them."""

    def __init__(self, layer: KVLayer, backend: Any, before: Callable[[KVLayer], None]) -> None:
        self.__dict__.update(_layer=layer, _backend=backend, _before=before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._backend, name, value)  # vLLM's MLA layers set some in their first forward

    def do_kv_cache_update(self, *given: Any) -> None:
        self._before(self._layer)
        self._backend.do_kv_cache_update(*given)


class _HeadsAttention(_Announced):
    """Stands in for the backend of a layer with K and V of each head; ``attend`` computes its attention."""

    def __init__(self, layer: KVLayer, backend: Any, attend: Attend, before: Callable[[KVLayer], None]) -> None:
        super().__init__(layer, backend, before)
        self.__dict__["_attend"] = attend

    def forward(
        self,
        module: Any,
        q: torch.Tensor,
        k: Any,
        v: Any,
        cache: Any,
        metadata: Any,
        output: torch.Tensor,
        **scales: Any,
    ) -> torch.Tensor:
        def theirs(rows: slice = _ALL, told: Any = None) -> object:
            if told is None:
                return self._backend.forward(module, q, k, v, cache, metadata, output=output, **scales)
            return self._backend.forward(
                module, q[rows], k[rows], v[rows], cache, told, output=output[rows], **scales
            )

        self._attend(self._layer, q, k, v, output, theirs)
        return output


def attention_layers(vllm_config: Any, kv_cache_config: Any) -> list[KVLayer]:
    """The attention layers that have a cache, first to last, including those of a draft model."""
    context = vllm_config.compilation_config.static_forward_context
    names = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    modules = [context[name] for name in sorted(names, key=layer_index)]
    return [_kind(each)(each) for each in modules]


def _kind(module: Any) -> type[HeadsLayer] | type[LatentLayer]:
    if isinstance(module, MLAAttention):
        return LatentLayer
    return PairLayer if is_ascend(module.get_attn_backend()) else HeadsLayer


def layer_index(name: str) -> tuple[int, str]:
    """A sort key for vLLM's names of layers: the layer's number, and the name."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return (numbers[0] if numbers else 0, name)


def has_shared_caches(vllm_config: Any) -> bool:
    """Whether some layers read another layer's cache and have none of their own."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return any(getattr(layer, "kv_sharing_target_layer_name", None) is not None for layer in layers)


@contextmanager
def attention_by(attend: Attend, before: Callable[[KVLayer], None], layers: Sequence[KVLayer]) -> Iterator[None]:
    """Have ``attend`` compute the attention of ``layers``, and call ``before`` with each layer before its K and V are
    written."""
    undo = [layer.replace_attention(attend, before) for layer in layers]
    try:
        yield
    finally:
        for each in undo:
            each()
