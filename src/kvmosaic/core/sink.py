"""The sink prefix: the tokens that a chunk is computed after. Both engines use this rule."""

from collections.abc import Callable, Sequence

from kvmosaic.core.errors import ConfigError

_DOCUMENT = (
    "Read the passages, then answer the question.",
    "The ferry between the two islands leaves every morning at seven, except in winter, when the sea is too rough. "
    "It carries about forty cars and two hundred passengers, most of whom work on the larger island. A bridge was "
    "planned in 1974, but the council could not agree on who should pay for it, and the plans were dropped six years "
    "later.",
    "In the valley behind the old mill, farmers grow barley and beans, and sell them at the market on Saturdays. The "
    "mill itself was built by the Hartmann family in the seventeenth century. It ground corn until 1931, was used as "
    "a school during the war, and is now a small museum with a collection of tools, scales and letters.",
    "",
)
"""A short prompt about an arbitrary subject, with a separator at its end. The separator is harmless before a chunk
that begins with one and needed before a chunk that does not. A chunk that is computed after this text has seen what
chunks in a request see: an instruction, other passages, and separators. Such a chunk needs no attention sink among
its own first tokens, and its keys are those of a passage among others, not those of the beginning of a text."""

LEARNED = "learned:"
"""Prefix of a ``sink_prefix`` setting that names the file of a learned sink."""
DOCUMENT = "document"
"""``sink_prefix`` setting of the neutral text."""
PARAGRAPH = "\n\n"
"""Separator between the passages of the neutral text if none is set."""


def sink_tokens(
    setting: str,
    separator: str | None,
    bos_token_id: int | None,
    encode: Callable[[str], Sequence[int]] | None,
) -> list[int]:
    """The tokens that ``sink_prefix=setting`` stands for.

    ``none``: no tokens. ``bos``: the model's BOS token, if it has one. ``document``: the BOS token, and a neutral
    text if there is a tokenizer. Any other setting is a literal text of the user and stands for exactly its own
    tokens. ``encode`` must not add special tokens. It is ``None`` if there is no tokenizer.
    """
    if setting == "none":
        return []
    bos = [] if bos_token_id is None else [bos_token_id]
    # ``document`` is the default, and engines without a tokenizer must start with the defaults.
    if setting == "bos" or (setting == DOCUMENT and encode is None):
        return bos
    if encode is None:
        raise ConfigError(f"sink_prefix={setting!r}: a text needs a tokenizer; use 'bos' or 'none'")
    if setting == DOCUMENT:
        return [*bos, *encode((separator or PARAGRAPH).join(_DOCUMENT))]
    return list(encode(setting))
