"""Number formats that a CPU can compute with.

Most checkpoints are in bfloat16. On x86, vLLM has kernels for CPUs with and without bfloat16 instructions. On ARM its
builds use these instructions unconditionally: on a CPU without them the process ends (SIGILL). There, torch
multiplies number by number, about a hundred times slower than in float32. float16 is as slow on such a CPU.
"""

import platform
from pathlib import Path

WHY_FLOAT32 = "this CPU has no bfloat16 instructions"

_CPUINFO = Path("/proc/cpuinfo")


def cpu_runs_bfloat16() -> bool:
    """Whether the engines can compute in bfloat16 on this machine's CPU."""
    if platform.machine() != "aarch64":  # macOS reports arm64; vLLM checks it itself
        return True
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return True
    # One line for each core: a process may run on any of them.
    features = [line.partition(":")[2].split() for line in lines if line.startswith("Features")]
    return all("bf16" in names for names in features)


def needs_float32(dtype: str, is_quantized: bool) -> bool:
    """Whether a CPU without bfloat16 instructions should compute a checkpoint of ``dtype`` in float32.

    Quantized weights have kernels of their own, which may need float16.
    """
    return dtype == "bfloat16" or (dtype == "float16" and not is_quantized)
