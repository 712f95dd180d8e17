"""What the HTTP server's log says about its chat template when it starts."""

import logging
from pathlib import Path
from typing import Any

from kvmosaic.engines.chat_template import working_sources
from kvmosaic.engines.vllm.setup import load_tokenizer

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""


def say_which_sources_work(model_config: Any, chat_template: str | None) -> None:
    """Log, in one line, which documents of chat requests reach the prompt. ``model_config`` is vLLM's,
    ``chat_template`` what the server was started with: a file or a template, if anything. Loads the tokenizer, so it
    is to be called from a thread of its own."""
    try:
        tokenizer = load_tokenizer(model_config)
        if tokenizer is not None:
            logger.info("%s", working_sources(tokenizer, _template(chat_template)))
    except Exception:  # nothing depends on it
        logger.exception("cannot tell which documents the chat template takes")


def _template(given: str | None) -> str | None:
    """The text of a template, as vLLM reads it: that of a file, if there is such a file."""
    if given is None:
        return None
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return given
