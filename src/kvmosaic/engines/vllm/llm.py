"""``vllm.LLM`` with a chunk cache."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields
from typing import Any

import vllm
from vllm.engine.arg_utils import EngineArgs

from kvmosaic.core.config import ChunkCacheConfig, load_config
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.limits import MAX_DOCUMENTS
from kvmosaic.core.messages import conversations, names_for_each
from kvmosaic.core.sources import find_seams, find_sources
from kvmosaic.engines.vllm.arguments import (
    can_be_used,
    engine_arguments,
    refuse_replaced,
    refuse_unsupported,
    served_dtype,
)
from kvmosaic.models import resolve

Documents = Sequence[str] | Sequence[Sequence[str]] | None
"""Documents of prompts: one list for all prompts, or a list for each."""


class LLM(vllm.LLM):  # type: ignore[misc]
    """``vllm.LLM`` with the keywords of :class:`ChunkCacheConfig` and with documents that requests name. Everything
    else is vLLM's."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        settings = {name: kwargs.pop(name) for name in ChunkCacheConfig.model_fields if name in kwargs}
        config = load_config(model, **settings)
        if config.enable_chunk_cache and not can_be_used():
            config = config.model_copy(update={"enable_chunk_cache": False})
        self.chunk_cache_config = config
        model = resolve(model)
        known = {field.name for field in fields(EngineArgs)}
        arguments = EngineArgs(model=model, **{name: kwargs[name] for name in kwargs.keys() & known})
        if config.enable_chunk_cache:
            refuse_replaced(arguments)
        arguments.dtype = kwargs["dtype"] = served_dtype(arguments)
        if config.enable_chunk_cache:
            refuse_unsupported(arguments)
            kwargs |= engine_arguments(config)
        super().__init__(model=model, **kwargs)

    def generate(
        self, prompts: Any, sampling_params: Any = None, *more: Any, documents: Documents = None, **options: Any
    ) -> list[vllm.RequestOutput]:
        """As ``vllm.LLM.generate``. ``documents`` are texts that are chunks wherever they occur in a prompt: one list
        for all prompts, or a list for each."""
        if documents is not None:
            names = names_for_each(documents, 1 if _is_one_prompt(prompts) else len(prompts))
            sampling_params = self._naming(sampling_params, [{"documents": list(each)} for each in names])
        return super().generate(prompts, sampling_params, *more, **options)

    def chat(
        self, messages: Any, sampling_params: Any = None, *more: Any, documents: Documents = None, **options: Any
    ) -> list[vllm.RequestOutput]:
        """As ``vllm.LLM.chat``. Besides ``documents``, text parts of messages, except the last part of each user
        message, and results of tools are chunks, if ``chunk_sources`` includes them."""
        config = self.chunk_cache_config
        talks = conversations(messages)
        params = []
        for talk, names in zip(talks, names_for_each(documents, len(talks)), strict=True):
            body = {"messages": list(talk)}
            found = find_sources(body, config.sources, config.min_chunk_tokens)
            documents = [*names, *found.documents][:MAX_DOCUMENTS]
            named = {"documents": documents, "seams": find_seams(body, documents)}
            params.append(named if config.chunk_separator is None else named | {"question": found.question})
        return super().chat(messages, self._naming(sampling_params, params), *more, **options)

    def get_stats(self) -> dict[str, Any]:
        """Statistics of the first worker's chunk cache: ``hit_rate, total_chunks, current_memory_mb, …``."""
        if not self.chunk_cache_config.enable_chunk_cache:
            raise ConfigError("the chunk cache is off; pass enable_chunk_cache=True")
        return self.collective_rpc("chunk_cache_stats")[0]

    def _naming(self, sampling: Any, params: Sequence[Mapping[str, Any]]) -> Any:
        """Sampling parameters for each prompt, with those of the chunk cache added. The caller's objects are not
        changed."""
        if not self.chunk_cache_config.enable_chunk_cache or not any(any(each.values()) for each in params):
            return sampling
        given = self.get_default_sampling_params() if sampling is None else sampling
        each = list(given) if isinstance(given, Sequence) else [given] * len(params)
        if len(each) != len(params):
            return sampling  # vLLM reports the mismatch
        return [_with(one, names) for one, names in zip(each, params, strict=True)]


def _with(sampling: vllm.SamplingParams, params: Mapping[str, Any]) -> vllm.SamplingParams:
    """A copy with these request parameters. Parameters that the caller set take precedence."""
    extra = sampling.extra_args or {}
    ours = {name: value for name, value in params.items() if value}
    theirs = extra.get("kv_transfer_params") or {}
    named = copy(sampling)
    named.extra_args = {**extra, "kv_transfer_params": {**ours, **theirs}}
    return named


def _is_one_prompt(prompts: Any) -> bool:
    """Whether ``prompts`` is a single prompt: a text, a dictionary, or token ids."""
    return isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int))
