"""Rules that both engines share about what KV depends on: the model's name, its configuration, a chunk's context."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvmosaic.core.config import ChunkCacheConfig
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.learned_sink import LearnedSink
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.core.sink import DOCUMENT, LEARNED, sink_tokens
from kvmosaic.models.sink_file import load_sink

_WHERE_AND_WHO = ("_name_or_path", "transformers_version")
"""Entries of a model's configuration that depend on its location and on the library that reads it."""


def model_name(name_or_path: str) -> str:
    """A model's name in keys: the last part of a folder's path, which does not depend on the folder's location, or a
    hub name with its owner."""
    return Path(name_or_path).resolve().name if Path(name_or_path).exists() else name_or_path


def config_identity(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a model's configuration that its KV depends on."""
    return {name: value for name, value in config.items() if name not in _WHERE_AND_WHO}


def learned_sink(config: ChunkCacheConfig) -> LearnedSink | None:
    """The learned sink of a configuration, if it has one."""
    setting = config.sink_prefix
    if config.chunk_context == "system" or not setting.startswith(LEARNED):
        return None
    try:
        return load_sink(setting.removeprefix(LEARNED))
    except ConfigError as error:
        raise config.blame(error, "sink_prefix") from None


def sink_of(
    config: ChunkCacheConfig, learned: LearnedSink | None, bos_token_id: int | None, tokenizer: Any
) -> tuple[int, ...]:
    """The sink prefix of a configuration as tokens, or stand-ins for a ``learned`` sink. ``tokenizer`` is
    ``None`` if there is none."""
    if config.sink_prefix.startswith(LEARNED):
        return () if learned is None else learned.tokens
    return _encoded(config.sink_prefix, config, bos_token_id, tokenizer)


def text_sink(config: ChunkCacheConfig, bos_token_id: int | None, tokenizer: Any) -> tuple[int, ...]:
    """The sink prefix that a model would have without a learned one, as tokens."""
    return _encoded(DOCUMENT, config, bos_token_id, tokenizer)


def _encoded(setting: str, config: ChunkCacheConfig, bos_token_id: int | None, tokenizer: Any) -> tuple[int, ...]:
    encode = None if tokenizer is None else partial(tokenizer.encode, add_special_tokens=False)
    return tuple(sink_tokens(setting, config.chunk_separator, bos_token_id, encode))


def chunk_context(setting: str, prompt: ChunkedPrompt, sink: Sequence[int]) -> tuple[int, ...]:
    """The tokens that the chunks of a prompt are computed after, according to the setting ``chunk_context``."""
    return prompt.tokens_of(prompt.system) if setting == "system" else tuple(sink)
