"""Metadata of a pass for backends on Ascend NPUs. Prepared from vllm-ascend's source; never run on an NPU."""

from contextlib import AbstractContextManager
from typing import Any

from kvmosaic.engines.vllm.compat.ascend import forward_context, metadata_builders, sequences_metadata
from kvmosaic.engines.vllm.forward.metadata import MetadataBuilder, block_table, extents
from kvmosaic.engines.vllm.forward.runs import Pass


class AscendMetadataBuilder(MetadataBuilder):
    """The sibling of :class:`VllmMetadataBuilder` for vllm-ascend. There, slots are part of the metadata, and graphs
    are never used."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, runner: Any) -> None:
        self._config = vllm_config
        self._model = runner.model
        self._builders = metadata_builders(vllm_config, kv_cache_config, runner.device)
        self.max_runs: int = vllm_config.scheduler_config.max_num_seqs

    def build(self, work: Pass) -> dict[str, Any]:
        offsets, ends = extents(work)
        described = sequences_metadata(offsets, ends, block_table(work, 0), work.slots[0], work.positions)
        built: dict[str, Any] = {}
        for builder, names in self._builders:
            built |= dict.fromkeys(names, builder.build(0, described))
        return built

    def context(
        self, work: Pass, metadata: dict[str, Any] | None, *, padding: int, graph: int | None, skip_compiled: bool
    ) -> AbstractContextManager[None]:
        assert metadata is not None, "our own attention kernel is off on NPUs"
        assert graph is None, "so are graphs"
        return forward_context(metadata, self._config, self._model, work.num_tokens)
