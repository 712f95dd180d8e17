"""`make soak`: SOAK_MINUTES (30) of random traffic and faults, from KVMOSAIC_TEST_SEED."""

import os
import tempfile

from tests import seeds

MINUTES = 30.0


def prepare() -> None:
    """Prepare the process as tests of vLLM's engine do, before anything imports vLLM."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # It keeps compiled code for each number of tokens, up to 1,024 of them, which would look like a leak.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    os.environ.setdefault("KVMOSAIC_PROFILES_DIR", tempfile.mkdtemp(prefix="kvmosaic-no-profiles-"))


def main() -> None:
    prepare()
    from tests.soak.run import soak

    minutes = float(os.environ.get("SOAK_MINUTES", MINUTES))
    print(f"{minutes:g} minutes, {seeds.VARIABLE}={seeds.SESSION}", flush=True)
    totals = soak(minutes, seeds.SESSION)
    print(f"\n{totals.table()}\n\n{totals.details()}")
    raise SystemExit(0 if totals.is_right else 1)


if __name__ == "__main__":
    main()
