"""Which of vLLM's internals, on which the chunk cache relies, an untested release has changed."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from typing import Any

from kvmosaic.engines.vllm.compat.sources import broken_plugin

PACKAGE = __name__.rpartition(".")[0]
CONNECTOR = "kvmosaic.engines.vllm.connector", "ChunkConnector"
WORKER = "kvmosaic.engines.vllm.worker", "ChunkWorker"
STEP_FIELDS = {
    "SchedulerOutput": {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"},
    "NewRequestData": {"req_id", "block_ids", "num_computed_tokens"},
    "CachedRequestData": {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"},
}
"""Fields of the classes that describe a step, in ``vllm.v1.core.sched.output``."""
POOL_METHODS = ("get_new_blocks", "free_blocks", "get_num_free_blocks", "get_cached_block", "reset_prefix_cache")
"""Methods of vLLM's pool of blocks."""
METADATA_ARGUMENTS = {
    *("attn_groups", "num_reqs", "num_tokens", "query_start_loc_gpu", "query_start_loc_cpu", "max_query_len"),
    *("seq_lens", "max_seq_len", "block_tables", "slot_mappings", "kv_cache_config", "seq_lens_cpu_upper_bound"),
    "positions",
}
"""Arguments that vLLM's function for attention metadata is called with in every release."""


def broken_contracts() -> list[str]:
    """The broken contracts of the installed vLLM: one line each. Numbers that are wrong are found by the self-test
    when an engine starts, not here."""
    found = [*_broken_imports(), *_broken_fields(), *_broken_arguments(), *broken_plugin()]
    return found or [*_broken_methods(*CONNECTOR), *_broken_methods(*WORKER)]


def _broken_imports() -> Iterator[str]:
    """Names that releases moved or removed. All uses of internals are in the modules of this package."""
    modules = pkgutil.iter_modules(import_module(PACKAGE).__path__)
    yield from filter(None, (_import_error(module.name) for module in modules))


def _import_error(name: str) -> str | None:
    try:
        import_module(f"{PACKAGE}.{name}")
    except ImportError as error:
        return f"{name}: {error.msg}"
    return None


def _broken_fields() -> Iterator[str]:
    output = import_module("vllm.v1.core.sched.output")
    for name, wanted in STEP_FIELDS.items():
        described = getattr(output, name, None)
        has = {field.name for field in fields(described)} if described is not None else set()
        for field in sorted(wanted - has - set(dir(described))):
            yield f"{name} has no {field}"
    pool = import_module("vllm.v1.core.block_pool").BlockPool
    yield from (f"BlockPool has no {name}" for name in POOL_METHODS if not hasattr(pool, name))


def _broken_arguments() -> Iterator[str]:
    build = getattr(import_module("vllm.v1.worker.gpu.attn_utils"), "build_attn_metadata", None)
    if build is not None:  # otherwise, its import is broken
        taken = inspect.signature(build).parameters.keys()
        yield from (f"build_attn_metadata takes no {name}" for name in sorted(METADATA_ARGUMENTS - taken))


def _broken_methods(module: str, name: str) -> Iterator[str]:
    """Methods of vLLM's base class that ours does not have, that vLLM no longer has, or that vLLM calls with other
    arguments."""
    ours = getattr(import_module(module), name)
    base = ours.__mro__[1]
    lacking = getattr(ours, "__abstractmethods__", ())
    yield from (f"{base.__name__}.{method} is new and abstract" for method in sorted(lacking))
    for method, function in vars(ours).items():
        if method.startswith(("_", "chunk_cache_")) or not inspect.isfunction(function):
            continue
        theirs = getattr(base, method, None)
        if theirs is None:
            yield f"{base.__name__} has no {method}"
        elif not _accepts(function, theirs):
            yield f"{base.__name__}.{method} is called with other arguments"


def _accepts(function: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether a function can be called with all arguments of another."""
    mine, wanted = inspect.signature(function).parameters, inspect.signature(theirs).parameters
    is_open = any(each.kind is each.VAR_KEYWORD for each in mine.values())
    return is_open or all(name in mine for name, each in wanted.items() if each.kind is not each.VAR_KEYWORD)
