"""docs/reference/python-api.md: every name that `mvllm` exports, with its signature and its docstring.

python -m tests.unit.docs.python_api_page    writes the page from the docstrings
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import mvllm

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "python-api.md"
HEAD = """\
# Python API

What `from mvllm import ...` offers, generated from the docstrings
(`python -m tests.unit.docs.python_api_page`). Names that are not on this page are internal and may
change.
"""
WIDTH = 100
TABLES = {"EngineArgs": "engine-settings.md", "SamplingParams": "sampling-parameters.md"}
"""Classes whose fields have a separate page."""
KINDS = {
    "Engines": ("LLM", "AsyncLLM", "LLMEngine", "EngineArgs"),
    "Inputs": (
        *("SamplingParams", "RequestOutputKind", "StructuredOutputsParams", "BeamSearchParams", "PoolingParams"),
        *("LoRARequest", "TextPrompt", "TokensPrompt"),
    ),
    "Outputs": (
        *("RequestOutput", "CompletionOutput", "Logprob", "BeamSearchOutput", "PoolingRequestOutput"),
        *("EmbeddingRequestOutput", "ClassificationRequestOutput", "ScoringRequestOutput"),
    ),
    "Weights": ("SharedMemoryWeights", "WeightTransferGroup", "WeightTransferInfo"),
    "Errors": ("MvllmError", "RequestError", "RequestFailedError", "ConfigError", "ModelError", "PlatformError"),
}

IMAGES = "mvllm.images"
IMAGE_NAMES = ("Images", "AsyncImages", "ImageParams", "ImageRequestOutput", "GeneratedImage")
"""Names of the package mvllm-image-generation, of which `mvllm` exports those that users make or read."""

ALIASES = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}
"""Further names of classes."""


def page() -> str:
    """The complete page."""
    parts = [HEAD]
    for title, names in KINDS.items():
        parts.append(f"## {title}\n")
        parts += [class_section(name, getattr(mvllm, name)) for name in names]
    package = importlib.import_module(IMAGES)
    parts.append("## Image generation\n")
    text = (
        "Of the package `mvllm-image-generation`: `llm.images` is an Images, and the `images` of an AsyncLLM an "
        "AsyncImages. `generate_images` and `decode_images` of both are its methods `generate` and `decode`."
    )
    parts.append(textwrap.fill(text, WIDTH) + "\n")
    parts += [class_section(name, getattr(package, name)) for name in IMAGE_NAMES]
    parts.append("## Other names\n")
    parts += [f"- `{alias}` is `{name}`." for alias, name in ALIASES.items()]
    return "\n".join(parts) + "\n"


def class_section(name: str, cls: type) -> str:
    """One class with its public methods."""
    lines = [f"### {name}", ""]
    if not issubclass(cls, BaseException | dict | enum.Enum):
        lines += [code(class_signature(name, cls)), ""]
    lines += [markdown(inspect.getdoc(cls) or "", skip=("Attributes",) if name in TABLES else ()), ""]
    if name in TABLES:
        lines += [f"The fields are in [{TABLES[name].removesuffix('.md')}]({TABLES[name]}).", ""]
    if issubclass(cls, enum.Enum):
        lines += [", ".join(f"`{member.name}`" for member in cls), ""]
    for method, kind, function in public_methods(cls):
        shown = f"{kind}{method}{signature(function)}" if kind != "property " else f"{method}: {returned(function)}"
        lines += [f"#### {name}.{method}", "", code(shown), "", markdown(inspect.getdoc(function) or ""), ""]
    return "\n".join(lines)


def public_methods(cls: type) -> Iterator[tuple[str, str, Any]]:
    """(name, kind, function) of a class's members in the order of their source, its own before inherited ones."""
    if cls.__name__ not in KINDS["Engines"]:
        return
    owners = [owner for owner in cls.__mro__ if owner.__module__.startswith("mvllm.")]
    members = {name: inspect.getattr_static(cls, name) for owner in owners for name in vars(owner)}
    for name, member in members.items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name, "property ", member.fget
        elif isinstance(member, classmethod | staticmethod):
            yield name, "", member.__func__
        elif inspect.isfunction(member):
            yield name, "async " if inspect.iscoroutinefunction(inspect.unwrap(member)) else "", member


def class_signature(name: str, cls: type) -> str:
    if name in TABLES:
        return f"{name}({'model, ' if name == 'EngineArgs' else ''}...)"
    if issubclass(cls, msgspec.Struct):
        fields = [(f.name, f.default, f.default_factory) for f in msgspec.structs.fields(cls)]
    elif dataclasses.is_dataclass(cls):
        fields = [(f.name, f.default, f.default_factory) for f in dataclasses.fields(cls)]
    else:
        return f"{name}{signature(cls.__init__)}"
    missing = (msgspec.NODEFAULT, dataclasses.MISSING)
    parameters = [
        f"{each}={value!r}" if value not in missing else each if factory in missing else f"{each}=..."
        for each, value, factory in fields
    ]
    return f"{name}({', '.join(parameters)})"


def signature(function: Any) -> str:
    """Parameters and result as written in the source, without `self` and `cls`."""
    found = inspect.signature(function)
    parameters, keyword_only = [], False
    for name, parameter in found.parameters.items():
        if name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parameters.append("*")
            keyword_only = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {default_text(parameter.default)}"
        parameters.append(f"{star}{name}: {parameter.annotation}{default}")
    result = found.return_annotation
    return f"({', '.join(parameters)})" + ("" if result in ("None", None, found.empty) else f" -> {result}")


def default_text(value: object) -> str:
    return value.__name__ if inspect.isclass(value) else repr(value)


def returned(function: Any) -> str:
    return str(function.__annotations__.get("return", "Any"))


def code(text: str) -> str:
    """A code block, with one parameter per line if the text is too long for one line."""
    if len(text) > WIDTH and (match := re.fullmatch(r"(.*?)\((.*)\)( -> .*)?", text)):
        parameters = "".join(f"    {each},\n" for each in split_parameters(match[2]))
        text = f"{match[1]}(\n{parameters}){match[3] or ''}"
    return f"```python\n{text}\n```"


def split_parameters(text: str) -> list[str]:
    """Splits at the commas outside brackets."""
    found, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [each.strip() for each in found]


def markdown(docstring: str, skip: tuple[str, ...] = ()) -> str:
    """A docstring with its sections (Args, Attributes, Returns, Raises) as lists."""
    parts = []
    for block in re.split(r"\n\n", docstring):
        match = re.match(r"(Args|Attributes|Returns|Raises):\n", block)
        if match is None:
            parts.append(block if block.startswith(" ") else textwrap.fill(" ".join(block.split()), WIDTH))
        elif match[1] not in skip:
            parts.append(f"{match[1]}:\n\n{entries(match[1], textwrap.dedent(block[match.end() :]))}")
    return "\n\n".join(parts)


def entries(title: str, text: str) -> str:
    """The entries of a section as a list; further lines of an entry are indented in the source."""
    if title == "Returns":
        return textwrap.fill(" ".join(text.split()), WIDTH)
    lines = []
    for entry in re.split(r"\n(?=\S)", text.strip()):
        names, colon, meaning = " ".join(entry.split()).partition(": ")
        shown = ", ".join(f"`{name}`" for name in names.split(", ")) if colon else names
        lines.append(textwrap.fill(f"- {shown}{colon}{meaning}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
