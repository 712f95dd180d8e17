"""Engines in separate processes, which run next to this one or are killed by it.

Importing vLLM takes 10 to 20 s of a core; starting a tiny engine takes 3 s. So these processes are forked from one
that has only imported it, and ranks are forked from their engine. Each still has its own memory, files and
connections.
"""

import fcntl
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch

IMPORTED = [
    "kvmosaic.vllm",
    "kvmosaic.engines.vllm.connector",
    "kvmosaic.engines.vllm.worker",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
    "vllm.v1.executor.multiproc_executor",
    *([] if torch.cuda.is_available() else ["vllm.v1.worker.cpu_worker"]),
]
RANKS = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # tests send their ranks functions
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
}
WAIT_SECONDS = 400.0

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(IMPORTED)


def _take_cores() -> IO[str]:
    """Wait until no other engine of several ranks is running on this machine. Closing the file lets the next one run.
    Ranks wait for each other by spinning, so four of them on two cores need minutes where two need seconds."""
    lock = open(Path(tempfile.gettempdir()) / "kvmosaic-test-ranks.lock", "w")  # noqa: SIM115  # closed by the engine
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


class EngineApart:
    """An engine in a separate process, which calls functions with it, one after the other."""

    def __init__(self, model: str, ranks: int = 1, with_cache: bool = True, stages: int = 1, **settings: Any) -> None:
        """``ranks``: number of tensor-parallel ranks of each of the pipeline ``stages``. ``settings`` are vLLM's and
        the chunk cache's, in addition to those of ``SMALL``."""
        workers = ranks * stages
        self._cores = _take_cores() if workers > 1 else None
        descriptor, name = tempfile.mkstemp(prefix="kvmosaic-engine-", suffix=".log")
        os.close(descriptor)
        self._log = Path(name)
        self._ours, theirs = multiprocessing.Pipe()
        environment = dict(os.environ)
        if workers > 1:  # two ranks have a core each, or a GPU; four share them
            cores = "|".join(str(rank % 2) for rank in range(workers))
            environment |= {**RANKS, "VLLM_CPU_OMP_THREADS_BIND": cores}
        settings |= {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
        self.process = _forks.Process(target=_serve, args=(theirs, environment, name, model, with_cache, settings))
        self.process.start()
        theirs.close()
        try:
            assert self.receive() == "ready"
        except AssertionError:
            self._let_go()
            raise

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """The result of ``function(llm, …)``, a function of some module, in that process."""
        self.send(function, *arguments, **keywords)
        return self.receive()

    def send(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Call a function in that process, without waiting for its result."""
        self._ours.send((function, arguments, keywords))

    def receive(self) -> Any:
        """The result of the next function."""
        assert self._ours.poll(WAIT_SECONDS), f"no answer after {WAIT_SECONDS:g} s: {self.said()}"
        try:
            result, error = self._ours.recv()
        except EOFError:
            raise AssertionError(f"the engine's process is gone: {self.said()}") from None
        assert error is None, f"{error}{self.said()}"
        return result

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.process.kill()
        self.process.join(60)
        self._let_go()
        assert self.process.exitcode == -signal.SIGKILL
        self._log.unlink()

    def stop(self) -> None:
        """Stop the process as a user would."""
        self._ours.close()
        self.process.join(60)
        self._let_go()
        assert self.process.exitcode == 0, self.said()
        self._log.unlink()

    def __enter__(self) -> "EngineApart":
        return self

    def __exit__(self, *failure: object) -> None:
        """Make sure that nothing is left running."""
        if self.process.is_alive() and failure[0] is None:
            self.stop()
        elif self.process.is_alive():
            os.killpg(self.pid, signal.SIGKILL)  # with its ranks, because one may wait for the other forever
        self._let_go()

    def _let_go(self) -> None:
        if self._cores is not None:
            self._cores.close()
            self._cores = None

    def said(self) -> str:
        """The end of its log."""
        return f"\n{self._log.read_text(errors='replace')[-4000:]}"


def _serve(
    pipe: Connection, environment: dict[str, str], log: str, model: str, with_cache: bool, settings: dict[str, Any]
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        llm = _start(model, with_cache, settings)
        pipe.send(("ready", None))
        while True:
            function, arguments, keywords = pipe.recv()
            pipe.send((function(llm, *arguments, **keywords), None))
    except EOFError:
        llm.llm_engine.engine_core.shutdown()
    except Exception:
        pipe.send((None, traceback.format_exc()))
        raise


def _rest() -> None:
    """Let other threads run, instead of calling ``sched_yield`` millions of times a second. With more processes than
    cores, Linux 6.18 then lets the caller and others that share its core wait for up to a minute."""
    time.sleep(1e-4)


def _start(model: str, with_cache: bool, settings: dict[str, Any]) -> Any:
    import vllm
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.model_executor.models import registry
    from vllm.v1.executor import multiproc_executor

    from kvmosaic.engines.vllm.scheduler_side import patience
    from kvmosaic.vllm import LLM
    from tests.engines.vllm.helpers import OURS, SMALL, learn_nothing

    if not torch.cuda.is_available():  # with GPUs vLLM forks by itself
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        registry._run_in_subprocess = lambda look: look()  # as conftest.py does it
        shm_broadcast.sched_yield = utils.sched_yield = _rest
    if not with_cache:
        return vllm.LLM(model, **SMALL | settings)
    patience.LEAST_SECONDS = patience.MOST_SECONDS  # as conftest.py does it
    llm = LLM(model, enable_chunk_cache=True, **SMALL | OURS | settings)
    llm.collective_rpc(learn_nothing)
    return llm
