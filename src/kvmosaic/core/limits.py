"""Limits on what clients may send, and on how much of it messages show."""

MAX_CHUNKS = 1024
"""Maximum number of chunks in a prompt; further ones are treated as ordinary text."""
MAX_BOUNDARIES = MAX_CHUNKS + 2
"""Maximum number of parts that a request may name: chunks, system and question."""
MAX_DOCUMENTS = MAX_CHUNKS
"""Maximum number of documents that a request may name."""
MAX_POLICY_LENGTH = 200
"""Maximum length of a policy's name and options, in characters."""
MAX_SHOWN = 80
"""Maximum length of a client's value in a message, in characters."""


def shown(value: object) -> str:
    """A client's value as messages show it: on one line, truncated if it is long."""
    if isinstance(value, str):
        text = repr(value[:MAX_SHOWN])
        return text if len(value) <= MAX_SHOWN and len(text) <= 2 * MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**64):
        return repr(value)
    return f"a value of type {type(value).__name__}"  # formatting the value itself could take arbitrarily long


def shown_id(request_id: str) -> str:
    """A request's id, which clients may choose, as messages show it."""
    text = shown(request_id)
    return text[1:].removesuffix(text[0])
