"""The trial of large CUDA graphs. A CPU has none, so passes with and without graphs are the same here, or are made to
differ. On a GPU, ``test_graphs.py`` uses them."""

import logging

import pytest
import torch

from kvmosaic.engines.vllm.forward import graph_trial
from kvmosaic.engines.vllm.forward.graph_trial import try_larger_graphs
from tests.engines.vllm.helpers import start, worker_side

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def llm(tiny_llama):
    return start(tiny_llama, skip_tokenizer_init=True)


@pytest.fixture
def tried(llm, monkeypatch):
    """Try graphs of these sizes. Returns the sizes that were compared, and whether the graphs were dropped."""

    def trial(sizes, output=None):
        forward = worker_side().forward
        compared, dropped, plain = [], [], forward.output

        def noted(run, *, graphs):
            compared.append(len(run.tokens))
            return (output or plain)(run, graphs=graphs)

        monkeypatch.setattr(forward, "output", noted)
        monkeypatch.setattr(graph_trial, "larger_graphs", lambda runner: sizes)
        monkeypatch.setattr(graph_trial, "drop_larger_graphs", dropped.append)
        try_larger_graphs(forward, forward._runner, worker_side().ranks)
        monkeypatch.setattr(forward, "output", plain)
        return sorted({*compared}), bool(dropped)

    return trial


def test_graphs_that_give_the_same_results_are_kept(tried):
    assert tried([640, 768, 896]) == ([637, 893], False)
    assert tried([]) == ([], False)


@pytest.mark.parametrize("error", [0.01, 0.3])
def test_graphs_whose_results_differ_are_dropped(tried, llm, error, caplog):
    forward = worker_side().forward
    plain = forward.output

    def different(run, *, graphs):
        hidden = plain(run, graphs=False)
        return hidden + graphs * error * torch.randn_like(hidden) * hidden.std()

    caplog.set_level(logging.WARNING)
    _, is_dropped = tried([640], different)
    assert is_dropped is (error > 0.1)
    assert ("do without CUDA graphs" in caplog.text) is is_dropped


def test_graphs_of_which_some_tokens_are_wrong_are_dropped(tried, llm):
    plain = worker_side().forward.output

    def partly(run, *, graphs):
        hidden = plain(run, graphs=False)
        if graphs:
            hidden[: len(hidden) // 5] = hidden[: len(hidden) // 5].flip(0)
        return hidden

    assert tried([640], partly)[1]


def test_a_failure_or_too_few_blocks_drop_them_and_the_engine_goes_on(tried, llm):
    def broken(run, *, graphs):
        raise RuntimeError("no graph")

    assert tried([640], broken)[1]
    assert tried([640, 10**6])[1]
