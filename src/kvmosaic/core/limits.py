"""How much clients may send, and how much of it is ever shown."""

MAX_CHUNKS = 1024
"""Maximum chunks of a prompt; what would be further ones is ordinary text."""
MAX_BOUNDARIES = MAX_CHUNKS + 2
"""Maximum parts that a request may name: chunks, system and question."""
MAX_DOCUMENTS = MAX_CHUNKS
"""Maximum documents that a request may name."""
MAX_POLICY_LENGTH = 200
"""Maximum characters of a policy's name and options."""
MAX_SHOWN = 80
"""Maximum characters of a client's value in a message."""


def shown(value: object) -> str:
    """A client's value as messages show it: in one line, however long it is."""
    if isinstance(value, str):
        text = repr(value[:MAX_SHOWN])
        return text if len(value) <= MAX_SHOWN and len(text) <= 2 * MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**64):
        return repr(value)
    return f"a value of type {type(value).__name__}"  # to write it out may take any time


def shown_id(request_id: str) -> str:
    """A request's id, which clients may choose, as messages show it."""
    return shown(request_id)[1:].removesuffix("'")
