"""Finds the chunks of a prompt as ``chunk_sources: auto`` does, after two earlier prompts with the same documents."""

import random
from collections.abc import Sequence
from dataclasses import replace

from kvmosaic.core.discovery import MIN_RUN, Discovery
from kvmosaic.core.prompt import ChunkedPrompt
from kvmosaic.core.turns import turn_markers
from kvmosaic.engines.hf.chat import ChatPrompt, chat_prompt, messages_about
from kvmosaic.engines.hf.llm import LLM
from kvmosaic.eval.base import Example

EARLIER = 2
"""Number of earlier prompts with the same documents. The first introduces them, the second makes them runs."""
CACHED_TOKENS = 10**6
"""Size of the engine's prefix cache that discovery assumes, in tokens: more than these prompts have."""


def asked_about(llm: LLM, example: Example, chunks: Sequence[str]) -> ChatPrompt:
    """The prompt of the example with these chunks, up to where the model continues."""
    messages = messages_about(example.system, chunks, example.question)
    return chat_prompt(llm.tokenizer, messages, chunks, lead=example.lead)


def found_in(llm: LLM, index: int, examples: Sequence[Example]) -> ChunkedPrompt:
    """The prompt of an example with its runs as chunks. The earlier prompts have its documents in random orders
    after a document of one of the next examples, and the question of that example."""
    example, rng = examples[index], random.Random(index)
    discovery = Discovery(turn_markers(llm.tokenizer), CACHED_TOKENS, max(MIN_RUN, llm.config.min_chunk_tokens))
    for step in range(1, EARLIER + 1):
        other = examples[(index + step) % len(examples)]
        # With the same first document, the prompts would have the same beginning, which has no runs.
        first = [text for text in other.chunks if text not in example.chunks][:1]
        order = [*first, *rng.sample(example.chunks, len(example.chunks))]
        discovery.find(asked_about(llm, replace(example, question=other.question), order).token_ids)
    tokens = tuple(asked_about(llm, example, example.chunks).token_ids)
    return ChunkedPrompt(tokens, discovery.find(tokens).chunks)
