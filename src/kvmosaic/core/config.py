"""Settings of the chunk cache, from keyword arguments, KVMOSAIC_* variables, a YAML file and the model's profile."""

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
from kvmosaic.core.profile import PROFILE_SETTINGS, broken, find_profile, load_profile
from kvmosaic.core.remote_url import PASSWORD_VARIABLE, RemoteUrl, without_passwords
from kvmosaic.core.store_key import STORE_KEY_VARIABLE, StoreKey

logger = logging.getLogger(__name__)

PREFIX = "KVMOSAIC_"
"""Prefix of the environment variables that settings are read from."""
CONFIG_FILE_VARIABLE = "KVMOSAIC_CONFIG"
CLIENT_PARAMETERS = (
    "chunk_cache",
    "recompute_ratio",
    "policy",
    "boundaries",
    "documents",
    "question",
    "seams",
    "report",
)
"""Parameters that a request to the vLLM engine may have."""
CHUNK_SOURCES = ("documents", "parts", "tools", "images", "auto")
"""Sources of documents for a server, besides the documents that a request names."""
SECRETS = (PASSWORD_VARIABLE, STORE_KEY_VARIABLE, ADMIN_KEY_VARIABLE)
"""Environment variables with secrets. Secrets are not settings, because settings are logged."""
LIKENESS = 0.85
"""Minimum similarity, from 0 to 1, at which a variable's name counts as a misspelt setting."""


class ChunkCacheConfig(BaseSettings):
    """All settings of the chunk cache. Immutable.

    Precedence: keyword argument, then environment (``KVMOSAIC_CHUNK_SEPARATOR``), then the YAML file named by
    ``KVMOSAIC_CONFIG``, then the model's profile, then the default. Use :func:`load_config` to create one: it turns
    every validation failure into a one-line :class:`ConfigError`.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", use_attribute_docstrings=True)

    enable_chunk_cache: bool = False
    """Whether the chunk cache is on: the KV cache of documents is then reused, at any position in a prompt."""
    chunk_separator: str | None = None
    """Text that splits prompts into chunks, in addition to named documents. ``None`` or empty: no splitting.
    ``kvmosaic separator`` prints a separator that nobody can guess."""
    min_chunk_tokens: int = Field(16, ge=1)
    """Minimum length of a stored chunk, in tokens. Shorter chunks are ordinary text of their prompts."""
    chunk_hash_algorithm: Literal["xxhash", "sha256"] = "xxhash"
    """Hash function for the content of chunks."""
    chunk_context: Literal["alone", "system"] = "alone"
    """Context that a chunk (a document's reusable part) is computed after. ``alone``: the sink prefix. ``system``:
    the system prompt of the request that brings the chunk."""
    sink_prefix: str = "document"
    """Sink prefix that a chunk is computed after: ``bos``, ``none``, ``document`` (BOS and a neutral text),
    ``learned:FILE`` (a sink made by ``kvmosaic tune``), or a literal text. The KV of the prefix itself is dropped."""
    recompute_ratio: float = Field(0.15, ge=0.0, le=1.0)
    """Share of a request's reused document tokens to recompute, including the cost of choosing them: 0 for none, 1
    for all, which gives the answers of a full prefill."""
    policy: str = "composite"
    """Policy that chooses which reused tokens to recompute: a name, with options in brackets, like ``composite`` or
    ``sink-link(k=8)``."""
    miss_policy: Literal["background", "fill-first", "never"] = "background"
    """Treatment of documents that are not stored yet. ``background``: the request computes them as ordinary text, and
    they are computed alone and stored afterwards. ``fill-first``: they are computed alone and stored first, then
    reused. ``never``: the request computes them as ordinary text, and only warming stores documents."""
    prefix_blocks: bool = False
    """Whether the vLLM engine also stores the KV of ordinary prompts and answers, exactly as computed.
    Prompts that begin with the same tokens reuse this KV, even after vLLM's own prefix cache has evicted it, or in
    another engine."""
    chunk_sources: str = "documents,parts,tools"
    """Sources of documents for the vLLM server, besides the documents that a request names: ``all``, ``none``, or
    some of ``documents`` (the field of that name, and document blocks), ``parts`` (text parts of messages, except for
    questions), ``tools`` (results of tools), ``images``, ``auto`` (text that recurs after different beginnings)."""
    client_parameters: str = "chunk_cache,recompute_ratio,policy,boundaries,documents,question"
    """Parameters that requests to the vLLM engine may have in their ``kv_transfer_params``: ``all``, ``none``, or
    some of ``chunk_cache``, ``recompute_ratio``, ``policy``, ``boundaries``, ``documents``, ``question``, ``seams``,
    ``report``."""
    admin_shows_text: bool = False
    """Whether clients with the admin key of ``/kvmosaic/`` may also see the beginning of documents."""
    chunk_page: bool = False
    """Whether the vLLM server shows a page about its latest requests at ``/kvmosaic/``, to clients with the admin
    key."""
    window_tails: bool = True
    """Whether the vLLM engine stores, for layers with a sliding window, only the KV that tokens after a chunk can
    see. The setting has no effect if policy and ratio recompute tokens inside chunks, as the defaults do; all KV is
    stored in that case."""
    self_test: bool = True
    """Whether engines compare reuse with exact references at start, and disable reuse if the results differ."""
    entry_dtype: Literal["auto", "int8"] = "auto"
    """Number format of stored documents. ``auto``: the model's own. ``int8``: 8 bits and scales, in about half
    the memory, disk space and network traffic; engines with the other setting do not find such documents. Exact
    prefixes are always stored as computed."""
    chunk_cache_gpu_memory_fraction: float = Field(0.15, ge=0.0, lt=1.0)
    """Share of GPU memory in which the vLLM engine keeps reusable KV (the device tier)."""
    host_memory: ByteSize = Field(ByteSize(2 * 1024**3), ge=0)
    """Host memory in which each worker process keeps reusable KV (the host tier), in bytes, like ``8GiB``."""
    disk_path: Path | None = None
    """Directory in which reusable KV is stored (the disk tier). Unset: nothing is stored on disk."""
    disk_space: ByteSize = Field(ByteSize(20 * 1024**3), ge=0)
    """Maximum size of the disk tier, in bytes, for each process that writes to it, like ``100GiB``."""
    tenant_quota: ByteSize | None = Field(None, ge=0)
    """Maximum size of this tenant's entries in the disk tier, in bytes. If it is set, only this tenant's entries are
    counted and evicted. Unset: the entries of all tenants are counted and evicted, within ``disk_space``."""
    remote: str | None = None
    """URL of a store on other machines that engines share (the remote tier), like ``valkey://host:6379/0`` or
    ``mooncake://host:50051``. Unset: no remote tier."""
    remote_deadline_ms: int = Field(500, ge=1)
    """Timeout of a call to the remote tier, in milliseconds, in addition to the time for moving its data. After a
    timeout the tier is not used until it answers again."""
    per_head_storage: bool = False
    """Whether the remote tier stores each KV head separately, for engines of all tensor-parallel sizes to share.
    Engines with pipeline stages always store heads separately."""
    remote_layers: int | None = Field(None, ge=1)
    """Number of layers that the remote tier stores together, with ``per_head_storage``. Unset: all layers of a
    pipeline stage. Engines of different pipeline-parallel sizes share entries if each of their stages begins at a
    multiple of this number."""
    tenant: str = Field("default", min_length=1)
    """Name of the tenant that owns the stored entries. Entries of different tenants are never shared."""
    _profile: Path | None = PrivateAttr(None)
    _from_profile: frozenset[str] = PrivateAttr(frozenset())

    @property
    def disk_budget(self) -> int:
        """Byte budget that an engine applies to its disk tier."""
        return self.disk_space if self.tenant_quota is None else min(self.disk_space, self.tenant_quota)

    @property
    def allowed_parameters(self) -> frozenset[str]:
        """Names of the parameters that requests may have, including those that the server adds itself."""
        added = {"documents", "question", "seams"} if self.sources - {"images", "auto"} else set()
        added |= {"question"} if self.chunk_separator else set()
        return _names(self.client_parameters, CLIENT_PARAMETERS) | added

    @property
    def clients_get_reports(self) -> bool:
        """Whether clients may have reports. The page has them in any case."""
        return "report" in _names(self.client_parameters, CLIENT_PARAMETERS)

    @property
    def sources(self) -> frozenset[str]:
        """Sources of documents, besides the documents that a request names."""
        return _names(self.chunk_sources, CHUNK_SOURCES)

    def blame(self, error: ConfigError, setting: str = "policy") -> ConfigError:
        """``error`` about one of these settings, with the path of the profile if the profile set it. Users cannot
        correct a value that they never typed without knowing where it comes from."""
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

    @field_validator("remote_layers")
    @classmethod
    def _needs_heads(cls, layers: int | None, info: ValidationInfo) -> int | None:
        if layers is not None and not info.data.get("per_head_storage"):
            raise ValueError("needs per_head_storage=true")
        return layers

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
    """The names in a setting that may also be ``all`` or ``none``."""
    everything = {"all": known, "none": ()}
    return frozenset(everything.get(text, text.split(",")))


def load_config(model: str | None = None, **settings: Any) -> ChunkCacheConfig:
    """Build the configuration, or raise a :class:`ConfigError` that names each wrong setting in one line.

    The profile of ``model``, a path or a name, supplies the settings that no other source sets. The profile is not
    read if the chunk cache is off, or if ``settings`` contain all settings of a profile.
    """
    config = _make(settings)
    if model is None or not config.enable_chunk_cache or settings.keys() >= set(PROFILE_SETTINGS):
        return config
    # ``model_fields_set`` has the fields that any source set.
    profile = find_profile(model)
    added = {name: value for name, value in load_profile(profile).items() if name not in config.model_fields_set}
    if not added:
        return config
    logger.info("settings from the profile %s: %s", profile, added)
    merged = _make(settings | added)
    merged._profile = profile
    merged._from_profile = frozenset(added)
    return merged


def _make(settings: dict[str, Any]) -> ChunkCacheConfig:
    _refuse_misspelt_variables()
    StoreKey.from_environment()  # to report an invalid key at start
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
    """The problem with a setting, without the values of secrets that belong in the environment."""
    variable = f"{PREFIX}{name.upper()}"
    if variable in SECRETS:
        return f"{name}: must be set by the environment variable {variable}, because settings are logged"
    return f"{name}={item.get('input')!r}: {item['msg'].removeprefix('Value error, ')}"


def _refuse_misspelt_variables() -> None:
    """Raise for variables that look like misspelt settings: a tenant or a quota would be ignored silently. Other
    variables with our prefix are allowed, because other programs may define them."""
    settings = [name.upper() for name in ChunkCacheConfig.model_fields]
    settings += [secret.removeprefix(PREFIX) for secret in SECRETS]
    for variable in os.environ:
        name = variable.removeprefix(PREFIX)
        if name == variable or name in settings:
            continue
        for meant in get_close_matches(name, settings, 1, LIKENESS):
            raise ConfigError(f"{variable}: there is no such setting; did you mean {PREFIX}{meant}?")
