"""Prompts of random tokens, and an engine that stores the runs that are found in them."""

import random

from kvmosaic.core.discovery import Discovery

MARKER, PLENTY = 3, 10**9


def text(length, rng=random):
    return [rng.randrange(10, 60_000) for _ in range(length)]


def joined(parts):
    return [token for part in parts for token in part]


def contents(tokens, spans):
    return [tuple(tokens[span.start : span.end]) for span in spans]


class Engine:
    """Sends prompts, and stores all runs of a prompt before the next one."""

    def __init__(self, **arguments):
        self.discovery = Discovery([MARKER], **{"prefix_tokens": PLENTY} | arguments)
        self.stored = set()

    def find(self, tokens, covered=(), salt=None):
        """The runs of a prompt, without storing them."""

        def is_stored(span, _first):
            return tuple(tokens[span.start : span.end]) in self.stored

        return self.discovery.find(tokens, covered, salt, is_stored)

    def reused(self, tokens, spans):
        """Tokens of a prompt that are in stored runs."""
        return sum(len(each) for each in contents(tokens, spans) if each in self.stored)

    def send(self, tokens, covered=(), salt=None):
        """The runs, and the share of the prompt that is reused."""
        found = self.find(tokens, covered, salt)
        share = self.reused(tokens, found.chunks) / len(tokens)
        self.stored.update(contents(tokens, (*found.chunks, *found.to_fill)))
        return list(found.chunks), share
