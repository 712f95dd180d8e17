"""Real weights without a model hub: small language models from ordinary packages."""

from kvmosaic.core.folders import models_dir
from kvmosaic.models.catalog import CATALOG, ModelSource
from kvmosaic.models.local import installed, pull, resolve

__all__ = ["CATALOG", "ModelSource", "installed", "models_dir", "pull", "resolve"]
