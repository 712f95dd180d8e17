"""Policies by name: ``composite``, ``sink-link(k=8)``, ``kv-deviation(part=v, layers=1+8+16)``."""

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
from kvmosaic.core.limits import MAX_POLICY_LENGTH, shown

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (RecomputeNone, RecomputeAll, RandomTokens, SinkLink, KVDeviation, QueryAttention, Composite)
}


def policy_named(spec: str) -> Policy:
    """The policy for a text like ``name`` or ``name(option=value, …)``. Lists are written ``1+8+16``."""
    if not isinstance(spec, str):
        raise ConfigError(f"policy {shown(spec)}: must be a text like composite or sink-link(k=8)")
    if len(spec) > MAX_POLICY_LENGTH:  # clients also send them
        raise ConfigError(f"policy {shown(spec)}: longer than {MAX_POLICY_LENGTH} characters")
    return _read(spec)


@lru_cache(maxsize=256)
def _read(spec: str) -> Policy:
    name, bracket, given = (part.strip() for part in spec.partition("("))
    is_closed = given.endswith(")") if bracket else True
    if name.rstrip(" )") in POLICIES and not (is_closed and name in POLICIES):
        raise ConfigError(f"policy {shown(spec)}: cannot be read; options go in brackets, like sink-link(k=8)")
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {shown(spec)}; choose one of {', '.join(POLICIES)}")
    kind = POLICIES[name]
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # all policies are dataclasses
    options: dict[str, Any] = {}
    for item in filter(str.strip, given.removesuffix(")").split(",")):
        option, equals, value = (part.strip() for part in item.partition("="))
        if option in options:
            raise ConfigError(f"policy {kind.name}: {option} is given twice")
        if not equals or option not in names:
            known = f"options are {', '.join(names)}" if names else "it has no options"
            raise ConfigError(f"policy {kind.name}: cannot read {shown(item.strip())}; {known}, as name=value")
        options[option] = value.split("+") if isinstance(getattr(kind, option, None), tuple) else value
    try:
        return kind(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        if not where:  # raised by a policy itself, with a complete message
            raise ConfigError(str(first["msg"]).removeprefix("Value error, ")) from None
        raise ConfigError(f"policy {kind.name}: {where}={shown(first['input'])}: {first['msg']}") from None
