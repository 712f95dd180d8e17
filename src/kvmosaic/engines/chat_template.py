"""Finds out which documents of chat requests a model's chat template brings into the prompt, by rendering some."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvmosaic.core.parser import ChunkTokenParser

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
"""Renders messages and other template variables into a prompt."""

SAMPLES = (
    "The harbour of Kelmoor was built by hand in the long winter of 1840.",
    "The lighthouse at Tarn Point has a lamp with nine wicks and two keepers.",
)
QUESTION = "What was built by hand?"
SOURCES = {
    "documents": 'the field "documents"',
    "parts": "content parts",
    "tools": "tool results",
}
"""Places of documents in a chat request: their names in settings, and in messages to users."""


@dataclass(frozen=True)
class TemplateSources:
    """The places whose documents a chat template brings into the prompt."""

    working: tuple[str, ...]
    has_template: bool = True

    def __str__(self) -> str:
        if not self.has_template:
            return "there is no chat template, so only prompts of /v1/completions have documents"
        ignored = [words for source, words in SOURCES.items() if source not in self.working]
        found = ", ".join(SOURCES[source] for source in self.working) or "nowhere"
        beside = f"; documents in {', '.join(ignored)} never reach the prompt" if ignored else ""
        return f"the chat template takes documents from {found}{beside}"


def working_sources(tokenizer: Any, chat_template: str | None = None) -> TemplateSources:
    """Try two documents in each of the places. ``chat_template`` is used instead of the tokenizer's own."""
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        return TemplateSources((), has_template=False)

    def render(messages: Sequence[Message], beside: Mapping[str, Any]) -> str:
        prompt = tokenizer.apply_chat_template(
            list(messages), chat_template=chat_template, tokenize=False, add_generation_prompt=True, **beside
        )
        return str(prompt)

    parser = ChunkTokenParser(tokenizer, None)
    tries = {"documents": _documents, "parts": _parts, "tools": _tools}
    return TemplateSources(tuple(name for name, make in tries.items() if _brings(parser, render, make)))


def _brings(parser: ChunkTokenParser, render: Render, make: Callable[[Render], str]) -> bool:
    """Whether the prompt has both samples, found in the same way as documents of requests."""
    try:
        prompt = make(render)
    except Exception:  # templates raise anything for a role or a list that they do not support
        return False
    return not parser.parse_named(prompt, SAMPLES).absent


def _documents(render: Render) -> str:
    # Templates differ in which of these fields they write.
    documents = [{"title": f"Document {number}", "text": text} for number, text in enumerate(SAMPLES)]
    return render([{"role": "user", "content": QUESTION}], {"documents": documents})


def _parts(render: Render) -> str:
    """Rendered as in vLLM: if a template does not iterate over a list of parts, it gets their texts joined by
    newlines."""
    texts = [*SAMPLES, QUESTION]
    message: Message = {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}
    try:
        prompt = render([message], {})
    except Exception:  # for example, because it adds a text to the list
        prompt = repr(message)
    if "'type'" not in prompt:  # otherwise the list was written as it is
        return prompt
    return render([{"role": "user", "content": "\n".join(texts)}], {})


def _tools(render: Render) -> str:
    ids = ["call00001", "call00002"]  # nine letters or digits, which some templates require
    calls = [
        {"id": name, "type": "function", "function": {"name": "search", "arguments": {"query": QUESTION}}}
        for name in ids
    ]
    messages: list[Message] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    messages += [
        {"role": "tool", "tool_call_id": name, "name": "search", "content": text}
        for name, text in zip(ids, SAMPLES, strict=True)
    ]
    return render(messages, {})
