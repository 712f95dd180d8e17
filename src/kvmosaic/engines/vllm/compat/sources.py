"""Contracts of packages that are read and not imported: those of a plugin for NPUs can be checked on any machine."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvmosaic.engines.vllm.compat.ascend import PLUGIN, RELIES_ON


def broken_plugin() -> list[str]:
    """The broken contracts of the installed vllm-ascend and of the vLLM beside it: one line each; none without it."""
    specs = [find_spec(name) for name in ("vllm", PLUGIN)]
    folders = [Path(spec.submodule_search_locations[0]) for spec in specs if spec and spec.submodule_search_locations]
    return broken_sources(*folders) if len(folders) == len(specs) else []


def broken_sources(*packages: Path) -> list[str]:
    """The broken contracts of vllm-ascend and vLLM, whose folders are ``packages``: one line each."""
    return [line for file, wanted in RELIES_ON.items() for line in _broken(file, wanted, packages)]


def _broken(file: str, wanted: dict[str, tuple[str, ...]], packages: tuple[Path, ...]) -> Iterator[str]:
    package, _, rest = file.partition("/")
    [path] = (folder / rest for folder in packages if folder.name == package)
    if not path.is_file():
        yield f"{file} is missing"
        return
    tree = ast.parse(path.read_text())
    for name, members in wanted.items():
        found = _members(tree, name)
        if found is None:
            yield f"{file} has no {name}"
        else:
            yield from (f"{name} has no {member}" for member in members if member not in found)


def _members(tree: ast.Module, name: str) -> set[str] | None:
    """Parameters of a function, or fields and methods of a class; ``None`` if there is none of that name."""
    scope: ast.Module | ast.ClassDef | ast.FunctionDef = tree
    for part in name.split("."):
        definitions = (each for each in scope.body if isinstance(each, ast.ClassDef | ast.FunctionDef))
        inner = next((each for each in definitions if each.name == part), None)
        if inner is None:
            return None
        scope = inner
    if isinstance(scope, ast.FunctionDef):
        return {each.arg for each in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)}
    targets = [target for each in scope.body if isinstance(each, ast.Assign) for target in each.targets]
    targets += [each.target for each in scope.body if isinstance(each, ast.AnnAssign)]
    methods = {each.name for each in scope.body if isinstance(each, ast.FunctionDef)}
    return methods | {target.id for target in targets if isinstance(target, ast.Name)}
