"""Identities of LoRA adapters: KV that was computed with an adapter depends on its weights."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from kvmosaic.core.limits import shown_id
from kvmosaic.models.digest import weights_digest

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
"""File with an adapter's settings, which its effect also depends on."""


class AdapterDigests:
    """Digests of the adapters that requests name, by content, so that engines share chunks of the same adapter
    whatever it is called. The files are read when an adapter is first seen, and again if vLLM loads it again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], bytes | None] = {}

    def digest(self, adapter: Any) -> bytes | None:
        """Digest of a ``LoRARequest``'s adapter; ``None`` if its files cannot be found."""
        name = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        if name not in self._known or adapter.load_inplace:
            self._known[name] = _digest(adapter.lora_path)
            if self._known[name] is None:
                logger.warning(
                    "adapter %s: its files cannot be found, so its requests are prefilled", shown_id(name[0])
                )
        return self._known[name]


def _digest(path: str) -> bytes | None:
    try:
        weights = weights_digest(path)
        settings = (Path(path) / CONFIG).read_bytes() if Path(path).is_dir() else b""
    except OSError:
        return None
    return None if weights is None else hashlib.sha256(json.dumps(weights).encode() + settings).digest()
