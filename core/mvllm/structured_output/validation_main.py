"""Program that validates outputs under limits: `python -m mvllm.structured_output.validation_main <parent pid>`.

Schemas come from clients: a pattern may backtrack without end, and references may multiply. So each job has SECONDS of
processor time and MEMORY_BYTES, which the kernel enforces. Nothing is fetched: a reference to another document is an
error.

    stdin   ValidationJobs               each: 4 bytes of length, little-endian, then msgpack
    stdout  a ValidationResult per job
"""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mvllm.executor.process.pipe_process import read_message, write_message
from mvllm.executor.process.process_utils import die_with_parent, limit_memory, limit_processor_time, set_process_name
from mvllm.structured_output.additional_properties import STRICT_KEY
from mvllm.structured_output.structural_tag import NUMBERED
from mvllm.structured_output.vocabulary import one_line

SECONDS = 1
MEMORY_BYTES = 256 << 20
MAX_WARNINGS = 8
_MAX_MESSAGE = 200


class ValidationJob(msgspec.Struct, array_like=True, frozen=True):
    """A text to validate.

    Attributes:
        schema: JSON schema, as text; a structural tag if `has_calls`.
        text: JSON, behind at most white space; what follows it is ignored. Or free text with calls.
        thoughts_start, thoughts_end: Delimiters of reasoning in front of the JSON.
        has_calls: The text has the structures of a structural tag.
    """

    schema: str
    text: str
    thoughts_start: str | None = None
    thoughts_end: str | None = None
    has_calls: bool = False


class ValidationResult(msgspec.Struct, array_like=True, frozen=True):
    """The result of a job.

    Attributes:
        warnings: What of the schema the text does not satisfy.
        error: Why it was not validated; None if it was.
    """

    warnings: list[str]
    error: str | None = None


def main() -> None:
    """The program."""
    die_with_parent(int(sys.argv[1]))
    set_process_name("OutputValidator")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import jsonschema  # type: ignore[import-untyped]  # noqa: F401  (before memory is limited)

    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    try:
        limit_memory(MEMORY_BYTES)
        while True:
            job = read_message(jobs, ValidationJob)
            limit_processor_time(SECONDS)
            write_message(results, validate(job))
    except (EOFError, BrokenPipeError):
        pass
    finally:
        sys.stdout.flush()
        os._exit(0)


def validate(job: ValidationJob) -> ValidationResult:
    """Validates the first JSON value of a text, or its calls, after its reasoning."""
    text = job.text
    if job.thoughts_end is not None and (job.thoughts_start is None or text.lstrip().startswith(job.thoughts_start)):
        text = text.partition(job.thoughts_end)[2]
    try:
        if job.has_calls:
            errors = _errors_of_calls(json.loads(job.schema)["structures"], text)
        else:
            value, _ = json.JSONDecoder().raw_decode(text.lstrip())
            errors = (_describe(error) for error in _errors(json.loads(job.schema), value))
        return ValidationResult(list(itertools.islice(errors, MAX_WARNINGS)))
    except Exception as e:  # noqa: BLE001  (it is the result)
        return ValidationResult([], f"{type(e).__name__}: {one_line(e)[:_MAX_MESSAGE]}")


def _errors(schema: Any, value: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        schema.pop(STRICT_KEY, None)
    return iter(_validator(schema).iter_errors(value))


def _errors_of_calls(structures: Sequence[Mapping[str, Any]], text: str) -> Iterator[str]:
    """Validates the structures of a structural tag in a text, in order.

    Raises:
        ValueError: The arguments of a call are not JSON.
    """
    begins = {tag["begin"]: tag for tag in structures}
    # The longest first: a shorter beginning may be its prefix.
    beginning = re.compile("|".join(re.escape(begin) for begin in sorted(begins, key=len, reverse=True)))
    number, position = 0, 0
    while found := beginning.search(text, position):
        number += 1
        tag = begins[found[0]]
        style, position = tag.get("style", "json"), found.end()
        if style == NUMBERED and (counted := re.compile("[0-9]{1,4}").match(text, position)):
            position = counted.end() + len(tag.get("separator", ""))
        elif style != "json":
            raise ValueError("the arguments of its calls are not JSON")
        while text[position : position + 1].isspace():
            position += 1
        value, position = json.JSONDecoder().raw_decode(text, position)
        for error in _errors(tag["schema"], value):
            yield _describe(error, f" of call {number}")


def _validator(schema: Any) -> Any:
    """A validator of the schema's draft, for references within the schema and to the standard's own schemas alone."""
    from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator
    from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    kind: Any = validator_for(schema, default=Draft202012Validator)
    if kind in (Draft201909Validator, Draft202012Validator):  # these have it under other names; the grammar has both
        kind = extend(kind, {"dependencies": Draft7Validator.VALIDATORS["dependencies"]})
    return kind(schema, registry=REGISTRY)


def _describe(error: Any, where: str = "") -> str:
    place = "/".join(["#", *(str(step) for step in error.absolute_path)])
    message = one_line(error.message)
    if len(message) > _MAX_MESSAGE:
        message = message[:_MAX_MESSAGE] + "..."
    return f"The output does not satisfy {error.validator} at {place[:_MAX_MESSAGE]}{where}: {message}"


if __name__ == "__main__":
    main()
