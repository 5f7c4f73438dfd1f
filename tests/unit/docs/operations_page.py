"""docs/reference/operations.md: what a provider of each operation is given and has to return.

python -m tests.unit.docs.operations_page    writes the page from the source of the operations
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from mvllm.platform.contract_operations import RETURNS, Operation, read_operations

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "operations.md"
HEAD = """\
# Operations

Models are made of these operations. A platform replaces one by an `OpProvider`, whose function has the
signature below; the reference in plain torch runs where nobody does. `mvllm ops --platform NAME` prints
the same with the providers of a platform, `mvllm contract` the same without one.

*Facts* are what `OpCase.facts` holds when a provider's `supports` is asked, once, at model load. A
parameter that *may be overwritten* is not read by the caller afterwards. `T` is the number of tokens of
the step; the compute dtype is `OpCase.dtype`.

Made from the source: `python -m tests.unit.docs.operations_page`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(name, operation) for name, operation in read_operations().items())])


def section(name: str, operation: Operation) -> str:
    """One operation."""
    parameters = "".join(f"    {parameter},\n" for parameter in operation.parameters)
    lines = [f"## {name}", "", operation.summary, ""]
    for paragraph in operation.notes.split("\n\n") if operation.notes else []:
        lines += [paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, 100), ""]
    lines += ["```python", f"def {name}(\n{parameters}) -> {operation.type}: ...", "```", ""]
    if operation.shapes:
        lines += ["| parameter | shape, dtype, range |", "|---|---|"]
        names = {key: "*result*" if key == RETURNS else f"`{key}`" for key in operation.shapes}
        lines += [f"| {names[key]} | {cell(text)} |" for key, text in operation.shapes.items()]
        lines.append("")
    lines += ["| fact | what it says |", "|---|---|"]
    lines += [f"| `{key}` | {cell(text)} |" for key, text in operation.facts.items()]
    if operation.may_overwrite:
        lines += ["", f"May be overwritten: {', '.join(f'`{one}`' for one in operation.may_overwrite)}."]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text within a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
