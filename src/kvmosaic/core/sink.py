"""The sink prefix, what a chunk is computed after, as tokens: one rule for both engines."""

from collections.abc import Callable, Sequence

from kvmosaic.core.errors import ConfigError

_DOCUMENT = (
    "Read the passages, then answer the question.",
    "The ferry between the two islands leaves every morning at seven, except in winter, when the sea is too rough.",
    "In the valley behind the old mill, farmers grow barley and beans, and sell them at the market on Saturdays.",
)
"""A short prompt about nothing in particular. A chunk that was computed after it has seen what chunks in a request
see: an instruction, other passages, and separators. It then needs no attention sink among its own first tokens."""


def sink_tokens(
    setting: str,
    separator: str,
    bos_token_id: int | None,
    encode: Callable[[str], Sequence[int]] | None,
) -> list[int]:
    """The tokens that ``sink_prefix=setting`` stands for.

    ``none``: nothing; ``bos``: the model's BOS token if it has one; ``document``: that, and a neutral text; all else
    is a text of the user's own, which is exactly its own tokens. ``encode`` must not add special tokens; it is
    ``None`` where there is no tokenizer.
    """
    if setting == "none":
        return []
    bos = [] if bos_token_id is None else [bos_token_id]
    if setting == "bos":
        return bos
    if encode is None:
        raise ConfigError(f"sink_prefix={setting!r}: a text needs a tokenizer; use 'bos' or 'none'")
    if setting == "document":
        return [*bos, *encode(separator.join(_DOCUMENT))]
    return list(encode(setting))
