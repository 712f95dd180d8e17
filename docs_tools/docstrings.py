"""Docstrings below attributes, which Python itself does not keep."""

import ast
import inspect
import textwrap


def attribute_docstrings(documented: type) -> dict[str, str]:
    """The docstring of each attribute of a class that has one."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(documented))).body
    assert isinstance(definition, ast.ClassDef)
    docstrings = {}
    for attribute, below in zip(definition.body, definition.body[1:], strict=False):
        match attribute, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docstrings[name] = text
    return docstrings
