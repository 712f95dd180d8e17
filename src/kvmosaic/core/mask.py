"""The visibility rules between tokens as a dense mask. Tests and small references use it. Engines implement the same
visibility without building a mask."""

from collections.abc import Iterable
from typing import Literal

import torch

from kvmosaic.core.prompt import ChunkedPrompt

SYSTEM_ID = -1
QUESTION_ID = -2


class ChunkAwareMaskBuilder:
    """Builds the attention mask of an assembled prompt.

    ======================  ==================================================================
    token                   sees (besides itself)
    ======================  ==================================================================
    system                  earlier system tokens
    chunk                   earlier tokens of the same chunk; also the system prompt when
                            ``chunk_context="system"``
    chunk, blended          everything before it
    question, skipped parts everything before it
    ======================  ==================================================================
    """

    def __init__(self, chunk_context: Literal["alone", "system"] = "alone") -> None:
        self.chunk_context = chunk_context

    def part_ids(self, prompt: ChunkedPrompt) -> torch.Tensor:
        """``[tokens]``: the chunk's index, :data:`SYSTEM_ID` or :data:`QUESTION_ID`."""
        ids = torch.full((len(prompt.token_ids),), QUESTION_ID)
        ids[: prompt.system.end] = SYSTEM_ID
        for index, span in enumerate(prompt.chunks):
            ids[span.start : span.end] = index
        return ids

    def build(self, prompt: ChunkedPrompt, blended: Iterable[int] = ()) -> torch.Tensor:
        """``[tokens, tokens]`` bool; ``mask[i, j]`` is true where token ``i`` sees token ``j``."""
        ids = self.part_ids(prompt)
        sees_all = ids < 0
        sees_all[list(blended)] = True
        visible = sees_all[:, None] | (ids[:, None] == ids[None, :])
        if self.chunk_context == "system":
            visible |= (ids == SYSTEM_ID)[None, :]
        return visible.tril()
