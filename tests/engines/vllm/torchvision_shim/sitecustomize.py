"""Lets a build of torchvision for CUDA be imported beside a build of torch for CPUs. Python runs this at its start if
this folder is in ``PYTHONPATH``. torchvision then lacks its own operators, but not its transforms, which are in
Python."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

MODULE = "torchvision._meta_registrations"
"""The module that fails if torchvision could not load its operators."""
OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators that it describes."""
defined: list[object] = []
"""What defined them. They end with it."""


class _BeforeRegistration(MetaPathFinder):
    """Defines operators that are not there just before the module is imported. It finds nothing itself."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name != MODULE:
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator, arguments in OPERATORS.items():
            if not hasattr(torch.ops.torchvision, operator):
                library.define(operator + arguments)
        defined.append(library)


sys.meta_path.insert(0, _BeforeRegistration())
