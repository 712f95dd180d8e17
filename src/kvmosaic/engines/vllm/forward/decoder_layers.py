"""The decoder layers of a model, and the inputs of them that have a row for each token, as measured."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_not
from typing import Any

import torch

Path = tuple[Any, ...]
"""Place of a tensor among a layer's arguments: an index or a name, and those inside tuples, lists and dicts."""
Enter = Callable[[int, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]] | None]
"""Called before each layer with its number and its arguments. Returns other arguments, or ``None`` to keep them."""
Compute = Callable[[int, Callable[[int], None]], None]
"""Computes a number of tokens. The function that it takes is called with the number of each attention layer when that
layer computes attention."""


class DecoderLayers:
    """A model's decoder layers, first to last. Each has one of the attention layers that cache K and V."""

    def __init__(self, modules: Sequence[torch.nn.Module], axes: Sequence[dict[Path, int]]) -> None:
        """``axes``: for each layer, the axis of the tokens in each of its tensors that has one, counted from the
        tensor's end: positions may get an axis more, before that of the tokens."""
        self._modules = modules
        self._axes = axes

    @contextmanager
    def entering(self, enter: Enter) -> Iterator[None]:
        """Call ``enter`` before each layer of the forward inside the block."""
        with _entering(self._modules, enter):
            yield

    def changed(
        self,
        layer: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        change: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A layer's arguments, in which ``change`` replaced the tensors that have an axis of tokens. It gets each of
        them and that axis."""
        axes = self._axes[layer]
        given = _mapped((args, kwargs), lambda path, tensor: change(tensor, axes[path]) if path in axes else tensor)
        return given[0], given[1]


def measure_layers(model: torch.nn.Module, count: int, compute: Compute) -> DecoderLayers | None:
    """The decoder layers of a model with ``count`` attention layers; ``None`` unless some list of modules runs in
    turns with them. The tokens are on the axis that is longer in a pass with more tokens."""
    lists = [
        list(module) for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    first, second = (_shapes(lists, tokens, compute) for tokens in _COUNTS)
    for modules, few, many in zip(lists, first, second, strict=True):
        if few is None or many is None:
            continue
        axes = [_token_axes(few[layer], many[layer]) for layer in range(count)]
        if all(axes):
            return DecoderLayers(modules, [each for each in axes if each])
    return None


_COUNTS = 1, 3
"""Numbers of tokens of the two passes that are compared."""
_Shapes = list[dict[Path, torch.Size]]


def _shapes(lists: Sequence[Sequence[torch.nn.Module]], tokens: int, compute: Compute) -> list[_Shapes | None]:
    """For each list of modules, the shapes of all tensors that each module gets in a pass; ``None`` if they do not
    run in turns with the attention layers."""
    events: list[list[tuple[str, int]]] = [[] for _ in lists]
    shapes: list[_Shapes] = [[] for _ in lists]

    def enter_of(which: int) -> Enter:
        def enter(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found: dict[Path, torch.Size] = {}

            def note(path: Path, tensor: torch.Tensor) -> torch.Tensor:
                found[path] = tensor.shape
                return tensor

            _mapped((args, kwargs), note)
            events[which].append(("enter", layer))
            shapes[which].append(found)

        return enter

    def attended(layer: int) -> None:
        for each in events:
            each.append(("attend", layer))

    with ExitStack() as hooks:
        for which, modules in enumerate(lists):
            hooks.enter_context(_entering(modules, enter_of(which)))
        compute(tokens, attended)
    results: list[_Shapes | None] = []
    for modules, happened, seen in zip(lists, events, shapes, strict=True):
        turns = [(what, layer) for layer in range(len(modules)) for what in ("enter", "attend")]
        results.append(seen if happened == turns else None)
    return results


def _token_axes(few: dict[Path, torch.Size], many: dict[Path, torch.Size]) -> dict[Path, int] | None:
    """The axis of the tokens in each tensor that has one; ``None`` if tokens are not the rows of an axis."""
    if few.keys() != many.keys():
        return None
    axes: dict[Path, int] = {}
    for path, shape in few.items():
        other = many[path]
        if shape == other:
            continue
        if len(shape) != len(other):
            return None
        longer = [axis for axis in range(-len(shape), 0) if shape[axis] != other[axis]]
        if len(longer) != 1 or (shape[longer[0]], other[longer[0]]) != _COUNTS:
            return None
        axes[path] = longer[0]
    return axes


@contextmanager
def _entering(modules: Sequence[torch.nn.Module], enter: Enter) -> Iterator[None]:
    def hook(layer: int) -> Any:
        return lambda module, args, kwargs: enter(layer, args, kwargs)

    handles = [
        module.register_forward_pre_hook(hook(layer), with_kwargs=True) for layer, module in enumerate(modules)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mapped(value: Any, change: Callable[[Path, torch.Tensor], torch.Tensor], path: Path = ()) -> Any:
    """A value in which ``change`` replaced each tensor, which it gets with the tensor's place."""
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if type(value) is dict:
        named = {name: _mapped(each, change, (*path, name)) for name, each in value.items()}
        return named if any(named[name] is not each for name, each in value.items()) else value
    if type(value) in (tuple, list):
        items = [_mapped(each, change, (*path, index)) for index, each in enumerate(value)]
        return type(value)(items) if any(map(is_not, items, value)) else value
    return value
