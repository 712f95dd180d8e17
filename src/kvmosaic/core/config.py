"""Settings of the chunk cache: keyword arguments, then KVMOSAIC_* variables, then a YAML file."""

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ByteSize, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from kvmosaic.core.errors import ConfigError

CONFIG_FILE_VARIABLE = "KVMOSAIC_CONFIG"


class ChunkCacheConfig(BaseSettings):
    """Every setting of the chunk cache, immutable once made.

    Precedence: keyword argument, then environment (``KVMOSAIC_CHUNK_SEPARATOR``), then the YAML file
    named by ``KVMOSAIC_CONFIG``, then the default. Make one with :func:`load_config`, which turns
    every validation failure into a one-line :class:`ConfigError`.
    """

    model_config = SettingsConfigDict(env_prefix="KVMOSAIC_", frozen=True, extra="forbid")

    enable_chunk_cache: bool = False
    chunk_separator: str = Field(" # # ", min_length=1)
    chunk_hash_algorithm: Literal["xxhash", "sha256"] = "xxhash"
    chunk_context: Literal["alone", "system"] = "alone"
    """What a chunk is computed after: the sink prefix alone, or the request's system prompt."""
    sink_prefix: str = "bos"
    """``bos``, ``none``, or a literal text whose KV is computed before a chunk and then dropped."""
    recompute_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Share of a request's chunk tokens that a blend recomputes, what choosing them costs included."""
    policy: str = "composite"
    """Which tokens those are: a policy's name, with options in brackets, like ``sink-link(k=8)``."""
    blend_min_tokens: int = Field(0, ge=0)
    """Requests with fewer chunk tokens than this are prefilled as if they had no chunks."""
    chunk_cache_gpu_memory_fraction: float = Field(0.15, ge=0.0, lt=1.0)
    """Share of a GPU's memory that the device tier takes (vLLM engine)."""
    host_memory: ByteSize = Field(ByteSize(2 * 1024**3), ge=0)
    """Byte budget of the host tier; accepts ``2GiB``."""
    disk_path: Path | None = None
    """Directory of the disk tier; no disk tier when unset."""
    disk_space: ByteSize = Field(ByteSize(20 * 1024**3), ge=0)
    """Byte budget of the disk tier."""
    tenant: str = Field("default", min_length=1)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = os.environ.get(CONFIG_FILE_VARIABLE)
        if path is None:
            return init_settings, env_settings
        if not Path(path).is_file():
            raise ConfigError(f"{CONFIG_FILE_VARIABLE}={path}: no such file; point it at a YAML file or unset it")
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, yaml_file=path)


def load_config(**settings: Any) -> ChunkCacheConfig:
    """Build the configuration, or raise a :class:`ConfigError` that names each wrong setting in one line."""
    try:
        return ChunkCacheConfig(**settings)
    except ConfigError:
        raise
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, item['loc']))}={item.get('input')!r}: {item['msg']}" for item in error.errors()
        )
        raise ConfigError(f"invalid chunk cache settings: {reasons}") from None
    except (yaml.YAMLError, TypeError, ValueError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{CONFIG_FILE_VARIABLE}: not a YAML mapping of settings ({line})") from None
