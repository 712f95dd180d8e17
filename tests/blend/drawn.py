"""Random prompts for policies, and the policies that are tested on them."""

import torch
from hypothesis import strategies as st

from kvmosaic.blend import AssembledPrompt
from kvmosaic.core.prompt import ChunkedPrompt, Span

SPECS = [
    *("none", "all", "random", "sink-link", "sink-link(k=3)", "query-attention", "query-attention(span=1)"),
    *("composite", "composite(asking=1)", "composite(first=0, asking=1)"),
    "composite(first=9, runs=3, reach=0.5)",
    *("kv-deviation", "kv-deviation(unit=document)", "kv-deviation(threshold=1.5)"),
    "kv-deviation(part=v, layers=0+3+7)",
]
"""Every policy, with several options."""


class Drawn(AssembledPrompt):
    """A prompt whose tokens are random, and whose probes give random numbers."""

    def __init__(self, lengths, system, question, layers, full, seed, vocabulary=1000):
        """``vocabulary``: number of different tokens. With few of them, tokens repeat."""
        spans, at = [], system
        for length in lengths:
            spans.append(Span(at, at + length))
            at += length
        self.lot = torch.Generator().manual_seed(seed)
        tokens = torch.randint(vocabulary, (at + question,), generator=self.lot)
        prompt = ChunkedPrompt(tuple(tokens.tolist()), tuple(spans))
        super().__init__(prompt, prompt.question, layers, full)

    def question_attention(self, layers):
        assert list(layers) == sorted(set(layers))
        assert set(layers) <= set(self.full_layers)
        self.charged += len(self.asked) * (layers[-1] + 1)
        weights = torch.rand(self.chunk_tokens, generator=self.lot)
        return weights / weights.sum()

    def deviation(self, layer, part):
        self.charged += self.chunk_tokens * (layer + 1)
        return torch.rand(self.chunk_tokens, generator=self.lot)


@st.composite
def places(draw):
    """Everything of a prompt but its content: the arguments of :class:`Drawn` without question, seed and
    vocabulary."""
    layers = draw(st.integers(10, 40))
    full = [layer for layer in range(layers) if draw(st.booleans())]
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    return {"lengths": lengths, "system": draw(st.integers(0, 20)), "layers": layers, "full": full}


def contents():
    """Arguments of :class:`Drawn` that decide about the content of a prompt."""
    counts = {"question": st.integers(1, 300), "seed": st.integers(0, 2**31), "vocabulary": st.integers(1, 1000)}
    return st.fixed_dictionaries(counts)


def prompts():
    """Any prompts."""
    return st.builds(lambda place, content: Drawn(**place, **content), places(), contents())
