"""docs/reference/operations.md: signature, shapes and facts of each operation.

python -m plugins.conformance.tests.operations_page    writes the page from the source of the operations
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from mvllm_conformance.contract_operations import RETURNS, Operation, read_operations

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "operations.md"
HEAD = """\
# Operations

Models consist of these operations. A platform replaces one by an `OpProvider`, whose function has
the signature below; without a provider the plain-torch reference runs. `mvllm ops --platform NAME`
prints the operations with the providers of a platform, `mvllm contract` without them.

*Facts* are the contents of `OpCase.facts` in a provider's `supports`, which core calls once, at
model load. The caller does not read a parameter that *may be overwritten* afterwards; one that is
*updated* is written in place, as a part of the result. `T` and `R` are the numbers of tokens and
requests of the step; the compute dtype is `OpCase.dtype`.

Made from the source: `python -m plugins.conformance.tests.operations_page`.
"""


def page() -> str:
    """The complete page."""
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
    lines += ["| fact | description |", "|---|---|"]
    lines += [f"| `{key}` | {cell(text)} |" for key, text in operation.facts.items()]
    if operation.may_overwrite:
        lines += ["", f"May be overwritten: {', '.join(f'`{one}`' for one in operation.may_overwrite)}."]
    if operation.updates:
        lines += ["", f"Updated: {', '.join(f'`{one}`' for one in operation.updates)}."]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text within a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
