"""Settings as people read them: a flag, a variable, a type, a default and a meaning, all taken from the class."""

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from kvmosaic.core.config import PREFIX, ChunkCacheConfig


@dataclass(frozen=True)
class Setting:
    """One field of :class:`ChunkCacheConfig`."""

    name: str
    kind: Any
    """Type of its values, without ``None``."""
    default: str
    """Default as users write it, or empty if the setting is unset by default."""
    meaning: str
    """Docstring of the field, on one line."""

    @property
    def flag(self) -> str:
        """Option of ``kvmosaic serve``. A switch has a second one that turns it off."""
        name = self.name.replace("_", "-")
        return f"--{name}/--no-{name}" if self.kind is bool else f"--{name}"

    @property
    def variable(self) -> str:
        """Environment variable."""
        return f"{PREFIX}{self.name.upper()}"

    @property
    def choices(self) -> tuple[str, ...]:
        """All values that are allowed, if they can be listed."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def type_name(self) -> str:
        """Type as users know it."""
        names = {bool: "true or false", int: "integer", float: "number", ByteSize: "size", Path: "path", str: "text"}
        return " or ".join(self.choices) or names[self.kind]


def all_settings() -> tuple[Setting, ...]:
    """All settings, in the order of the class."""
    return tuple(_setting(name, field) for name, field in ChunkCacheConfig.model_fields.items())


def _setting(name: str, field: FieldInfo) -> Setting:
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    is_optional = NoneType in get_args(field.annotation)
    kind = kinds[0] if is_optional else field.annotation
    return Setting(name, kind, _written(field.default), " ".join((field.description or "").split()))


def _written(default: object) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    return str(default)
