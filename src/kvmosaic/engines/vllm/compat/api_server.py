"""vLLM's API server, seen from a middleware of it."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.v1.metrics.prometheus import get_prometheus_registry


@dataclass(frozen=True)
class ServedEngine:
    """The engine behind an API server."""

    client: Any
    model_config: Any
    """vLLM's ``ModelConfig``."""
    chat_template: str | None
    """Chat template that the server was started with, if any: a file or the template itself."""
    connector: str | None
    """Name of the class of its KV connector, if it has one."""
    settings: Mapping[str, Any]
    """The connector's settings."""
    num_workers: int
    """Number of worker processes of all data-parallel engines."""


def served_engine(app: Any) -> ServedEngine | None:
    """The engine behind ``app``; ``None`` before there is one."""
    state = getattr(app, "state", None)
    config, client = getattr(state, "vllm_config", None), getattr(state, "engine_client", None)
    if config is None or client is None:
        return None
    transfer = config.kv_transfer_config
    return ServedEngine(
        client,
        config.model_config,
        getattr(getattr(state, "args", None), "chat_template", None),
        transfer and transfer.kv_connector,
        (transfer and transfer.kv_connector_extra_config) or {},
        _num_workers(getattr(config, "parallel_config", None)),
    )


def _num_workers(parallel: Any) -> int:
    return 1 if parallel is None else parallel.world_size * parallel.data_parallel_size


async def run_request(client: Any, tokens: list[int], answer: int, params: Mapping[str, Any] | None = None) -> None:
    """Have the engine answer a prompt of ``tokens`` with ``answer`` tokens, and discard the answer. ``params`` are
    the request's ``kv_transfer_params``."""
    extra = {"kv_transfer_params": dict(params)} if params else None
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True, detokenize=False, extra_args=extra)
    prompt = {"type": "token", "prompt_token_ids": tokens}  # as vLLM's own renderer makes it
    async for _ in client.generate(prompt, sampling, request_id=f"kvmosaic-{uuid.uuid4().hex}"):
        pass


@dataclass(frozen=True)
class Answered:
    """A request that is answered, with what the connector says about it."""

    request_id: str
    params: Any
    """The connector's ``kv_transfer_params``."""
    prompt: Sequence[int]
    """Its tokens."""
    cached_tokens: int | None
    """Number of tokens that were not computed."""
    first_token_s: float | None
    """Seconds from its arrival to its first token; ``None`` where vLLM collects no statistics."""


def watch_transfer_params(client: Any, watcher: Callable[[], Callable[[Answered], Any] | None]) -> None:
    """Pass the connector's answer to each request on to a callback, because streams leave it out. ``watcher`` is
    called when a request begins, in the context of its HTTP request, and returns that callback, if any. The
    callback's result replaces the connector's answer."""
    generate = client.generate

    def watched(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        outputs = generate(*args, **kwargs)
        show = watcher()
        return outputs if show is None else _shown(outputs, show)

    client.generate = watched


async def _shown(outputs: Any, show: Callable[[Answered], Any]) -> AsyncIterator[Any]:
    async with aclosing(outputs):  # a client that stops listening aborts the request at once
        async for output in outputs:
            if output.kv_transfer_params is not None:
                output.kv_transfer_params = show(_answered(output))
            yield output


def _answered(output: Any) -> Answered:
    latency = getattr(output.metrics, "first_token_latency", 0.0)  # 0 before there is a token
    return Answered(
        output.request_id,
        output.kv_transfer_params,
        output.prompt_token_ids or (),
        output.num_cached_tokens,
        latency or None,
    )


def metric_samples() -> Iterator[tuple[str, Mapping[str, str], float]]:
    """All samples of ``/metrics``, of all API servers of this engine: name, labels and value. Reads files if there
    are several servers."""
    for metric in get_prometheus_registry().collect():
        for sample in metric.samples:
            yield sample.name, sample.labels, sample.value
