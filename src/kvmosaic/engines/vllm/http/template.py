"""Log line about the chat template, written when the HTTP server starts."""

import logging
from pathlib import Path
from typing import Any

from kvmosaic.engines.chat_template import working_sources
from kvmosaic.engines.vllm.setup import load_tokenizer

logger = logging.getLogger(f"vllm.{__name__}")
"""A child of vLLM's logger, so that it inherits prefix, level and handlers."""


def say_which_sources_work(model_config: Any, chat_template: str | None) -> None:
    """Log, in one line, which documents of chat requests reach the prompt. ``model_config`` is vLLM's.
    ``chat_template`` is the file or template that the server was started with, if any. Loads the tokenizer, so call
    it from a thread of its own."""
    try:
        tokenizer = load_tokenizer(model_config)
        if tokenizer is not None:
            logger.info("%s", working_sources(tokenizer, _template(chat_template)))
    except Exception:  # nothing depends on it
        logger.exception("cannot tell which documents the chat template takes")


def _template(given: str | None) -> str | None:
    """The text of a template, as vLLM reads it: the content of the file ``given``, if there is such a file."""
    if given is None:
        return None
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return given
