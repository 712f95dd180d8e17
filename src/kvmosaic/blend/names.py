"""Policies by name: ``composite``, ``sink-link(k=8)``, ``kv-deviation(part=v, layers=1+8+16)``."""

import re
from dataclasses import fields
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from kvmosaic.blend.base import Policy
from kvmosaic.blend.composite import Composite
from kvmosaic.blend.fixed import RecomputeAll, RecomputeNone
from kvmosaic.blend.kv_deviation import KVDeviation
from kvmosaic.blend.query_attention import QueryAttention
from kvmosaic.blend.random import RandomTokens
from kvmosaic.blend.sink_link import SinkLink
from kvmosaic.core.errors import ConfigError

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (RecomputeNone, RecomputeAll, RandomTokens, SinkLink, KVDeviation, QueryAttention, Composite)
}

_SPEC = re.compile(r"\s*([a-z-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


@lru_cache(maxsize=256)
def policy_named(spec: str) -> Policy:
    """The policy a text like ``name`` or ``name(option=value, …)`` stands for; lists are written ``1+8+16``."""
    if not isinstance(spec, str):
        raise ConfigError(f"policy {spec!r}: must be a text like composite or sink-link(k=8)")
    match = _SPEC.fullmatch(spec)
    if match is None and spec.split("(")[0].strip(" )") in POLICIES:
        raise ConfigError(f"policy {spec!r}: cannot be read; options go in brackets, like sink-link(k=8)")
    if match is None or match[1] not in POLICIES:
        raise ConfigError(f"unknown policy {spec!r}; choose one of {', '.join(POLICIES)}")
    kind = POLICIES[match[1]]
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # all of them are dataclasses
    options: dict[str, Any] = {}
    for item in filter(str.strip, (match[2] or "").split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name in options:
            raise ConfigError(f"policy {kind.name}: {name} is given twice")
        if not equals or name not in names:
            known = f"options are {', '.join(names)}" if names else "it has no options"
            raise ConfigError(f"policy {kind.name}: cannot read {item.strip()!r}; {known}, as name=value")
        options[name] = value.split("+") if isinstance(getattr(kind, name, None), tuple) else value
    try:
        return kind(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if not where:  # a rule about several options, which says it all
            raise ConfigError(str(first["msg"]).removeprefix("Value error, ")) from None
        raise ConfigError(f"policy {kind.name}: {where}={first['input']!r}: {first['msg']}") from None
