"""A measurement for tests, run in a separate process."""

import os
import threading
import time

from kvmosaic.bench.process import tell
from kvmosaic.core.errors import ConfigError


def measure(way, engine=None):
    """Ends in some way."""
    tell(f"going to {way}")
    print("vLLM says something", flush=True)
    if way == "fail":
        raise ConfigError("this\ncannot work")
    if way == "die":
        os._exit(3)
    if way == "linger":
        threading.Thread(target=time.sleep, args=(300,)).start()
    return {"pid": os.getpid(), "engine": engine}
