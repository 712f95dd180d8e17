"""The lives of the engine. Their settings are drawn from the seed."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.soak.session import STEP

ROUND_S = 10.0
"""Seconds of traffic between two complete checks."""


@dataclass(frozen=True)
class Life:
    """One engine, from its start to its end."""

    number: int
    seed: int
    end: float
    """Time at which it ends, as a share of the whole run."""
    ranks: int
    sink: str
    has_disk: bool
    has_remote: bool
    is_killed: bool
    """Whether it ends by SIGKILL."""
    choices: dict[str, Any]

    def settings(self, disk: Path, remote: str | None) -> dict[str, Any]:
        """vLLM's and ours: few blocks, so that requests are preempted, and little memory, so that entries are
        evicted."""
        settings: dict[str, Any] = {
            "max_model_len": 1024,
            "max_num_batched_tokens": STEP,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 40,
            "host_memory": "8MiB",
            "sink_prefix": self.sink,
            "recompute_ratio": 0.0,  # requests choose others
            **self.choices,
        }
        if self.has_disk:
            settings |= {"disk_path": str(disk), "disk_space": "24MiB"}
        if self.has_remote and remote is not None:
            settings |= {"remote": remote}
        return settings


def lives(minutes: float, seed: int) -> list[Life]:
    """Engines one after the other, over the same disk and the same remote store; about one in four of them with two
    tensor-parallel ranks."""
    drawn = random.Random(seed)
    count = max(3, min(10, round(minutes / 3)))
    planned = []
    for number in range(count):
        choices = {
            "miss_policy": drawn.choice(("background", "background", "fill-first")),
            "prefix_blocks": drawn.random() < 0.6,
            "client_parameters": drawn.choice(
                ("all", "all", "chunk_cache,recompute_ratio,policy,boundaries,documents")
            ),
        }
        planned.append(
            Life(
                number=number,
                seed=drawn.randrange(2**31),
                end=(number + 1) / count,
                ranks=2 if number % 4 == 2 else 1,
                sink=drawn.choice(("document", "bos")),
                has_disk=number % 4 != 3,
                has_remote=number % 2 == 1,
                is_killed=drawn.random() < 0.5,
                choices=choices,
            )
        )
    return planned
