"""Parses modules into syntax trees, so that the contract is read without importing it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def parse_module(module: str) -> ast.Module:
    """The syntax tree of a module, which is not imported (its parent packages are)."""
    found = importlib.util.find_spec(module)
    assert found is not None and found.origin is not None, module
    return ast.parse(Path(found.origin).read_text("utf-8"))


def parse_signature(signature: str) -> tuple[list[str], str]:
    """The parameters and the result's type of `(x: Tensor, n: int = 0) -> Tensor`; the type may be left out."""
    [function] = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef), signature
    return function_parameters(function.args), "" if function.returns is None else ast.unparse(function.returns)


def function_parameters(arguments: ast.arguments) -> list[str]:
    """Parameters as written, with `*` before keyword-only ones."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [_parameter(argument, default) for argument, default in zip(positional, defaults)]
    if arguments.vararg is not None:
        texts.append("*" + _parameter(arguments.vararg, None))
    elif arguments.kwonlyargs:
        texts.append("*")
    texts += [_parameter(argument, default) for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg is not None:
        texts.append("**" + _parameter(arguments.kwarg, None))
    return texts


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    text = argument.arg + (f": {ast.unparse(argument.annotation)}" if argument.annotation is not None else "")
    return text + (f" = {ast.unparse(default)}" if default is not None else "")
