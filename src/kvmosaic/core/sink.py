"""The sink prefix, what a chunk is computed after, as tokens: one rule for both engines."""

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
"""A short prompt about nothing in particular, a separator at its end, which does no harm before a chunk that begins
with one and is needed before one that does not. A chunk that was computed after it has seen
what chunks in a request see: an instruction, other passages, and separators. It then needs no attention sink among
its own first tokens, and its keys are those of a passage among others, not of the beginning of a text."""

LEARNED = "learned:"
"""Beginning of the setting ``sink_prefix`` where the file of a learned sink follows."""
PARAGRAPH = "\n\n"
"""What stands between the passages of the neutral text where no separator is set."""


def sink_tokens(
    setting: str,
    separator: str | None,
    bos_token_id: int | None,
    encode: Callable[[str], Sequence[int]] | None,
) -> list[int]:
    """The tokens that ``sink_prefix=setting`` stands for.

    ``none``: nothing; ``bos``: the model's BOS token if it has one; ``document``: that, and a neutral text where
    there is a tokenizer; all else is a text of the user's own, which is exactly its own tokens. ``encode`` must not
    add special tokens; it is ``None`` where there is no tokenizer.
    """
    if setting == "none":
        return []
    bos = [] if bos_token_id is None else [bos_token_id]
    # ``document`` is the default, and engines without a tokenizer must start with the defaults.
    if setting == "bos" or (setting == "document" and encode is None):
        return bos
    if encode is None:
        raise ConfigError(f"sink_prefix={setting!r}: a text needs a tokenizer; use 'bos' or 'none'")
    if setting == "document":
        return [*bos, *encode((separator or PARAGRAPH).join(_DOCUMENT))]
    return list(encode(setting))
