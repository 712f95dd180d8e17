"""Settings as options of a command, made from the settings class so that none is missing."""

from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmosaic.core.setting import Setting, all_settings

PARSED_HERE = (bool, int, float, str, Path)
"""Types that the command line parses itself. The settings class parses the others from their text."""


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with an option for every setting. Options come in its keyword arguments, and are ``None`` if they
    were not given."""
    own = signature(command)
    named = [parameter for parameter in own.parameters.values() if parameter.kind is not Parameter.VAR_KEYWORD]
    options = [_option(setting) for setting in all_settings()]
    command.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return command


def _option(setting: Setting) -> Parameter:
    kind = setting.kind if setting.kind in PARSED_HERE or setting.choices else str
    option = typer.Option(
        setting.flag,
        help=setting.meaning.replace("``", "`"),
        metavar=None if kind is setting.kind else f"<{setting.type_name}>",
        show_default=setting.default or False,
    )
    annotation: Any = Annotated[kind | None, option]
    return Parameter(setting.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
