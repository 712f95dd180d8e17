"""Conversations as prompts of the embedded engine."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from kvmosaic.core.errors import PromptError
from kvmosaic.core.sources import find_seams, find_sources, texts_of

PARAGRAPH = "\n\n"
"""Separator between documents, and between messages if there is no chat format."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model reads it."""

    token_ids: Sequence[int]
    documents: Sequence[str]
    """Texts in it that are documents."""
    question: str | None
    """Separators from the first occurrence of this text on are ignored."""
    seams: Sequence[tuple[str, str]] = ()
    """Beginnings of questions, each with the end of the text before it. No document is found across one."""


def messages_about(system: str, documents: Sequence[str], question: str) -> list[dict[str, str]]:
    """A conversation of one question about documents, with a blank line after each document."""
    text = PARAGRAPH.join([*documents, question])
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def chat_prompt(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    documents: Sequence[str] = (),
    sources: Collection[str] = (),
    lead: str = "",
) -> ChatPrompt:
    """A conversation in the model's chat format, or as paragraphs if it has none, and ``lead``, the beginning of the
    answer. Its documents are ``documents`` and those that :func:`find_sources` finds."""
    if tokenizer is None:
        raise PromptError("this engine has no tokenizer; pass token ids instead of messages")
    if not all(isinstance(message, Mapping) for message in messages):
        raise PromptError("messages must be objects with a role and a content")
    body = {"messages": list(messages)}
    found = find_sources(body, sources)
    names = [*documents, *found.documents]
    # Parts are lines, as in vLLM: most templates only take a text.
    flat = [{**message, "content": "\n".join(texts_of(message.get("content")))} for message in messages]
    if tokenizer.chat_template is None:
        text = PARAGRAPH.join(message["content"] for message in flat)
        tokens = tokenizer.encode(f"{text}\n{lead}" if lead else text)
    else:
        try:
            text = tokenizer.apply_chat_template(flat, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise PromptError(f"the model's chat template refuses these messages: {reason}") from None
        tokens = tokenizer.encode(text + lead, add_special_tokens=False)  # the template has written these
    return ChatPrompt(tokens, names, found.question, find_seams(body, names))
