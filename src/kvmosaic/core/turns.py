"""Finds the ends of a conversation's turns: the tokens that chat templates put between messages."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


def turn_markers(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens between messages: the special tokens of a tokenizer, and its other added tokens that the chat
    template contains, because some models do not mark their role markers as special. The token for unknown text is
    not a marker, because any document may contain it, unless it is also the BOS or EOS token."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    template = str(getattr(tokenizer, "chat_template", None) or "")
    unknown = getattr(tokenizer, "unk_token_id", None)
    ends = (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None))
    markers = {token_id for token_id in ends if token_id is not None}
    for token_id, token in added.items():
        text = str(token)
        if token_id != unknown and (token.special or (text.strip() and text in template)):
            markers.add(int(token_id))
    return frozenset(markers)


def turn_ends(tokens: Sequence[int], markers: frozenset[int], positions: Sequence[int]) -> list[int]:
    """For each of ``positions``, the end of its turn: the position of the first marker at or after it, or
    ``len(tokens)`` if there is none."""
    ends = [index for index, token in enumerate(tokens) if token in markers] if markers else []
    ends.append(len(tokens))
    return [ends[bisect_left(ends, position)] for position in positions]
