"""Settings of the chunk cache: keyword arguments, KVMOSAIC_* variables, a YAML file, the model's profile."""

import logging
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ByteSize, Field, PrivateAttr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    YamlConfigSettingsSource,
)

from kvmosaic.core.admin_key import ADMIN_KEY_VARIABLE, AdminKey
from kvmosaic.core.errors import ConfigError
from kvmosaic.core.profile import PROFILE_SETTINGS, broken, load_profile, profile_path
from kvmosaic.core.remote_url import PASSWORD_VARIABLE, RemoteUrl, without_passwords
from kvmosaic.core.store_key import STORE_KEY_VARIABLE, StoreKey

logger = logging.getLogger(__name__)

PREFIX = "KVMOSAIC_"
"""Of the variables that settings are read from."""
CONFIG_FILE_VARIABLE = "KVMOSAIC_CONFIG"
CLIENT_PARAMETERS = ("chunk_cache", "recompute_ratio", "policy", "boundaries", "documents", "question", "report")
"""What a request to the vLLM engine may ask for."""
CHUNK_SOURCES = ("documents", "parts", "tools", "auto")
"""What a server takes for documents besides those that a request names."""
SECRETS = (PASSWORD_VARIABLE, STORE_KEY_VARIABLE, ADMIN_KEY_VARIABLE)
"""Variables that are no settings: those are logged."""
LIKENESS = 0.85
"""Of the names of a variable and of a setting, from which on one was meant to be the other."""


class ChunkCacheConfig(BaseSettings):
    """Every setting of the chunk cache, immutable once made.

    Precedence: keyword argument, then environment (``KVMOSAIC_CHUNK_SEPARATOR``), then the YAML file
    named by ``KVMOSAIC_CONFIG``, then the model's profile, then the default. Make one with :func:`load_config`,
    which turns every validation failure into a one-line :class:`ConfigError`.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    enable_chunk_cache: bool = False
    chunk_separator: str | None = None
    """What splits prompts into chunks besides the documents that requests name. ``None`` or nothing: no text does."""
    min_chunk_tokens: int = Field(16, ge=1)
    """Tokens of the shortest chunk that is stored; shorter ones are ordinary text of their prompts."""
    chunk_hash_algorithm: Literal["xxhash", "sha256"] = "xxhash"
    chunk_context: Literal["alone", "system"] = "alone"
    """What a chunk is computed after: the sink prefix alone, or the request's system prompt."""
    sink_prefix: str = "document"
    """What a chunk is computed after: ``bos``, ``none``, ``document`` (BOS and a neutral text), ``learned:FILE``
    (a sink that ``kvmosaic tune`` made), or a literal text. Its own KV is dropped."""
    recompute_ratio: float = Field(0.0, ge=0.0, le=1.0)
    """Share of a request's chunk tokens that a blend recomputes, what choosing them costs included."""
    policy: str = "composite"
    """Which tokens those are: a policy's name, with options in brackets, like ``sink-link(k=8)``."""
    miss_policy: Literal["background", "fill-first", "never"] = "background"
    """What becomes of chunks that are not in the store: ordinary text of the request, filled afterwards in the
    background; filled first and then used; or ordinary text and never stored."""
    prefix_blocks: bool = False
    """Whether the vLLM engine also stores the KV of ordinary prompts and answers, exactly as computed, and serves it
    to prompts that begin with the same tokens: after vLLM's own prefix cache forgot it, or in another engine."""
    chunk_sources: str = "documents,parts,tools"
    """What the vLLM server takes for documents besides those that a request names: ``none``, or some of ``documents``
    (the field of that name, and document blocks), ``parts`` (text parts of messages, but for the last one of the last
    user message), ``tools`` (results of tools), ``auto`` (whatever text comes back behind other beginnings)."""
    client_parameters: str = "chunk_cache,recompute_ratio,policy,boundaries,documents,question"
    """Which parameters requests to the vLLM engine may have: ``all``, ``none``, or some of their names."""
    admin_shows_text: bool = False
    """Whether those who have the key of ``/kvmosaic/`` may also see how stored documents begin."""
    window_tails: bool = True
    """Whether the vLLM engine stores of layers with a sliding window only what tokens behind a chunk can see. It does
    not with a recompute_ratio and policy that recompute tokens inside chunks, which see more."""
    self_test: bool = True
    """Whether engines compare reuse with what it has to equal when they start, and do without it if it differs."""
    chunk_cache_gpu_memory_fraction: float = Field(0.15, ge=0.0, lt=1.0)
    """Share of a GPU's memory that the device tier takes (vLLM engine)."""
    host_memory: ByteSize = Field(ByteSize(2 * 1024**3), ge=0)
    """Byte budget of the host tier; accepts ``2GiB``."""
    disk_path: Path | None = None
    """Directory of the disk tier; no disk tier when unset."""
    disk_space: ByteSize = Field(ByteSize(20 * 1024**3), ge=0)
    """Byte budget of the disk tier."""
    tenant_quota: ByteSize | None = Field(None, ge=0)
    """Most bytes of the disk tier that this tenant's entries may take. When it is set, only they are counted and only
    they are evicted; else everybody's are, by ``disk_space``."""
    remote: str | None = None
    """URL of the remote tier, like ``valkey://host:6379/0`` or ``mooncake://host:50051``; none when unset."""
    remote_deadline_ms: int = Field(500, ge=1)
    """How long a call of the remote tier may take, in milliseconds, besides the time to move its data. After one that
    took longer the tier is left alone until it answers again."""
    per_head_storage: bool = False
    """Whether the remote tier stores every KV head by itself, so that engines of all tensor-parallel sizes share."""
    tenant: str = Field("default", min_length=1)
    _profile: Path | None = PrivateAttr(None)
    _from_profile: frozenset[str] = PrivateAttr(frozenset())

    @property
    def disk_budget(self) -> int:
        """Bytes that an engine keeps its disk tier within."""
        return self.disk_space if self.tenant_quota is None else min(self.disk_space, self.tenant_quota)

    @property
    def allowed_parameters(self) -> frozenset[str]:
        """Names of the parameters that requests may have. Those that the server adds itself are among them."""
        return _names(self.client_parameters, CLIENT_PARAMETERS) | (
            {"documents", "question"} if self.sources - {"auto"} else set()
        )

    @property
    def sources(self) -> frozenset[str]:
        """What is taken for documents besides those that a request names."""
        return _names(self.chunk_sources, CHUNK_SOURCES)

    def blame(self, error: ConfigError, setting: str = "policy") -> ConfigError:
        """``error``, about one of these settings, with the profile's path if that is where the setting is from: what
        the user never typed cannot be corrected without it."""
        if self._profile is None or setting not in self._from_profile:
            return error
        return broken(self._profile, str(error))

    @field_validator("chunk_separator")
    @classmethod
    def _is_off_if_empty(cls, text: str | None) -> str | None:
        return text or None

    @field_validator("client_parameters", "chunk_sources", mode="before")
    @classmethod
    def _are_names(cls, given: Any, info: ValidationInfo) -> str:
        known = CLIENT_PARAMETERS if info.field_name == "client_parameters" else CHUNK_SOURCES
        names = list(given or ()) if isinstance(given, (list, tuple, type(None))) else str(given).split(",")
        names = [name.strip() for name in map(str, names) if name.strip()] or ["none"]
        if names in (["all"], ["none"]):
            return names[0]
        if not set(names) <= set(known):
            raise ValueError(f"must be all, none, or some of {', '.join(known)}")
        return ",".join(names)

    @field_validator("remote")
    @classmethod
    def _is_remote_url(cls, text: str | None) -> str | None:
        if text is not None:
            RemoteUrl.parse(text)
        return text

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


def _names(text: str, known: Sequence[str]) -> frozenset[str]:
    """The names in a setting that may also say ``all`` or ``none``."""
    everything = {"all": known, "none": ()}
    return frozenset(everything.get(text, text.split(",")))


def load_config(model: str | None = None, **settings: Any) -> ChunkCacheConfig:
    """Build the configuration, or raise a :class:`ConfigError` that names each wrong setting in one line.

    ``model``, a path or a name, is whose profile is asked for what nothing else sets. It is not even read when the
    chunk cache is off, or when ``settings`` leave nothing for it to say.
    """
    config = _make(settings)
    if model is None or not config.enable_chunk_cache or settings.keys() >= set(PROFILE_SETTINGS):
        return config
    # The fields set are those that any source gave a value for.
    added = {name: value for name, value in load_profile(model).items() if name not in config.model_fields_set}
    if not added:
        return config
    logger.info("from the profile %s: %s", profile_path(model), added)
    merged = _make(settings | added)
    merged._profile = profile_path(model)
    merged._from_profile = frozenset(added)
    return merged


def _make(settings: dict[str, Any]) -> ChunkCacheConfig:
    _refuse_misspelt_variables()
    StoreKey.from_environment()  # so that a bad one is known now
    AdminKey.from_environment()
    try:
        return ChunkCacheConfig(**settings)
    except ConfigError:
        raise
    except ValidationError as error:
        reasons = "; ".join(_reason(".".join(map(str, item["loc"])), item) for item in error.errors())
        raise ConfigError(f"invalid chunk cache settings: {without_passwords(reasons)}") from None
    except (yaml.YAMLError, TypeError, ValueError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"{CONFIG_FILE_VARIABLE}: not a YAML mapping of settings ({line})") from None


def _reason(name: str, item: Any) -> str:
    """What is wrong with a setting, without the secrets that were meant for the environment."""
    variable = f"{PREFIX}{name.upper()}"
    if variable in SECRETS:
        return f"{name}: set {variable} instead, where it is not logged"
    return f"{name}={item.get('input')!r}: {item['msg'].removeprefix('Value error, ')}"


def _refuse_misspelt_variables() -> None:
    """Else a tenant or a quota would silently not count. Others' variables may begin like ours."""
    settings = [name.upper() for name in ChunkCacheConfig.model_fields]
    settings += [secret.removeprefix(PREFIX) for secret in SECRETS]
    for variable in os.environ:
        name = variable.removeprefix(PREFIX)
        if name == variable or name in settings:
            continue
        for meant in get_close_matches(name, settings, 1, LIKENESS):
            raise ConfigError(f"{variable}: there is no such setting; did you mean {PREFIX}{meant}?")
