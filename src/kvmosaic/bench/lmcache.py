"""LMCache's CacheBlend inside vLLM, as a peer in benchmarks: it recomputes a share of the tokens of known documents.

It has to be installed beside vLLM (``pip install lmcache==0.5.3 vllm==0.26.0``). ``lmcache_worker`` says why it does
not run as shipped. Entries are in pinned host memory. vLLM runs eagerly, without its own prefix cache.
"""

import json
import logging
import os
import random
import statistics
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from kvmosaic.bench.engine import Model, machine
from kvmosaic.bench.process import tell
from kvmosaic.bench.traffic import SYSTEM_TOKENS, Prompt, assemble, random_tokens
from kvmosaic.core.errors import ConfigError

if TYPE_CHECKING:
    from vllm import LLM

TESTED = "0.5.3"
MARK = "#"
SEPARATOR = [2]
"""Token ids of the text between documents, by which LMCache finds them."""
SETTINGS = {
    "LMCACHE_CHUNK_SIZE": "256",
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_ENABLE_BLENDING": "True",
    "LMCACHE_USE_LAYERWISE": "True",
    "LMCACHE_BLEND_SPECIAL_STR": f" {MARK} {MARK} ",
    "LMCACHE_BLEND_CHECK_LAYERS": "1",
    "LMCACHE_BLEND_MIN_TOKENS": "256",
    "LMCACHE_TRACK_USAGE": "false",
}


def measure(model: dict[str, Any], context: int, ratio: float, repeats: int) -> dict[str, Any]:
    """Median milliseconds to the first token of prompts of ``context`` tokens in known documents of 512 tokens, in
    new orders: as LMCache is (``as_shipped_ms``), and tuned by us (``tuned_ms``). ``full_ms``: a full prefill in the
    same engine."""
    tell("starting vLLM with LMCache")
    length = context + 4096
    shape = Model(**model)
    room = 4 * context * shape.token_bytes
    llm = start(shape, ratio, room, max_model_len=length, max_num_batched_tokens=length)
    from vllm import SamplingParams

    from kvmosaic.bench.lmcache_worker import BLENDED

    rng = random.Random(0)
    documents = [random_tokens(rng, 512) for _ in range(context // 512)]
    system = random_tokens(rng, SYSTEM_TOKENS)

    def first_token_ms(texts: list[list[int]], **params: Any) -> float:
        ids = separated(assemble(system, rng.sample(texts, len(texts)), rng)).ids
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, extra_args=extra)
        start = time.perf_counter()
        llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        return (time.perf_counter() - start) * 1e3

    def median() -> float:
        """Of blended prompts, after one that warms up."""
        before = len(BLENDED)
        times = [first_token_ms(documents) for _ in range(repeats + 1)][1:]
        assert len(BLENDED) == before + repeats + 1, "LMCache did not blend every prompt"
        assert min(BLENDED[before:]) >= context, "LMCache did not find every document"
        return statistics.median(times)

    tell("full prefill")
    new = [[random_tokens(rng, 512) for _ in documents] for _ in range(repeats + 1)]
    full = [first_token_ms(texts, **{"lmcache.skip_save": True}) for texts in new][1:]
    first_token_ms(documents)  # stores them
    tell("as shipped")
    as_shipped = median()
    tell("tuned")
    tune()
    return {
        "machine": machine() | {"lmcache": version("lmcache")},
        "full_ms": statistics.median(full),
        "as_shipped_ms": as_shipped,
        "tuned_ms": median(),
    }


def check() -> None:
    """Raise if LMCache cannot be measured here: before minutes of measuring other engines."""
    try:
        found = version("lmcache")
    except PackageNotFoundError:
        raise ConfigError(f"LMCache is not installed; install it beside vLLM: lmcache=={TESTED}") from None
    if found != TESTED:
        raise ConfigError(f"LMCache {found} was never tried; install lmcache=={TESTED}")


def start(model: Model, ratio: float, host_bytes: int, **settings: Any) -> "LLM":
    """An engine in this process that reuses documents with LMCache and recomputes the share ``ratio`` of their
    tokens. ``host_bytes``: host memory for documents."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("PYTHONHASHSEED", "0")
    os.environ.update(
        SETTINGS,
        LMCACHE_BLEND_RECOMPUTE_RATIOS=str(ratio),
        LMCACHE_MAX_LOCAL_CPU_SIZE=str(-(-host_bytes // 2**30)),
    )
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from kvmosaic.bench.weights import LOAD_FORMAT

    return LLM(
        str(_folder(model)),
        load_format=LOAD_FORMAT,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.7,
        enforce_eager=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        worker_cls="kvmosaic.bench.lmcache_worker.BlendWorker",
        kv_transfer_config=KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both"),
        **settings,
    )


def tune() -> None:
    """Two favours that make LMCache faster: its rotary table moves to the GPU, and its log becomes silent."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    group: Any = get_kv_transfer_group()
    table = group._lmcache_engine.blender.layerwise_model.fused_rotary_emb
    table.cos_sin_cache = table.cos_sin_cache.cuda()
    for name in logging.root.manager.loggerDict:
        if name.startswith("lmcache"):
            logging.getLogger(name).setLevel(logging.ERROR)


def separated(prompt: Prompt) -> Prompt:
    """A prompt with LMCache's separator between system prompt, documents and question."""
    ids: list[int] = []
    for begin, end in prompt.boundaries:
        ids += SEPARATOR * bool(ids) + prompt.ids[begin:end]
    return Prompt(ids, [])


def _folder(model: Model) -> Path:
    """The model's folder, with a tokenizer that knows the separator."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = Path(platformdirs.user_cache_dir("kvmosaic"), "bench", f"lmcache-{model.layers}-{model.heads}")
    folder.mkdir(parents=True, exist_ok=True)
    Path(folder, "config.json").write_text(json.dumps(model.config()))
    # LMCache leaves out the first token of its separator, which it takes for one that begins texts.
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, MARK: SEPARATOR[0]}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(Path(folder, "tokenizer.json")))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>"}
    Path(folder, "tokenizer_config.json").write_text(json.dumps(told))
    return folder
