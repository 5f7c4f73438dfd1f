"""Random JSON schemas and regular expressions, from a seed."""

from __future__ import annotations

import random
from typing import Any

_NAMES = ("a", "name", "größe", "x y", 'quo"te', "back\\slash", "z1", "list", "$id_", "emoji😀")
_TEXTS = ("", "red", "a b", 'say "hi"', "tab\t", "naïve", "日本", "0", "null")
_PATTERNS = ("^[a-z]{1,4}$", "^\\d{2}-\\d{2}$", "^(foo|ba[rz])+$", '^[^"\\\\]{0,3}$', "^.{1,2}$")
_PIECES = ("[a-c]", "x", "\\d", "(?:yes|no)", "[^a-z\\n]", ".", "é", "\\w", "\\s", "(a|bc)", "[0-9A-F]", "-", "😀")
_COUNTS = ("", "?", "+", "*", "{2}", "{1,3}", "{0,2}")


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A random schema whose values are mostly short."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth > 0:
        kinds += ["object", "object", "array", "array", "tuple", "anyOf", "ref", "types"]
    match rng.choice(kinds):
        case "string":
            low = rng.randrange(3)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randrange(6)}
        case "integer":
            low = rng.randrange(-50, 50)
            return rng.choice([{"type": "integer"}, {"type": "integer", "minimum": low, "maximum": low + 40}])
        case "number":
            return {"type": "number", "minimum": -1, "exclusiveMaximum": 2.5}
        case "enum":
            return {"enum": rng.sample([*_TEXTS, 1, 2.5, True, None, [1], {"k": 0}], 4)}
        case "const":
            return {"const": rng.choice([*_TEXTS, 17, None, [1, "a"]])}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(_PATTERNS)}
        case "object":
            names = rng.sample(_NAMES, rng.randrange(4))
            schema: dict[str, Any] = {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
            }
            if rng.random() < 0.7:
                schema["additionalProperties"] = rng.choice([False, {"type": "integer", "minimum": 0, "maximum": 9}])
            return schema
        case "array":
            low = rng.randrange(3)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + rng.randrange(3)}
        case "tuple":
            items = [random_schema(rng, depth - 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]}
        case "types":
            return {"type": ["integer", "null", "boolean"]}
        case "ref":
            node = {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
            return {"$ref": "#/$defs/n", "$defs": {"n": node}} if depth == 3 else {"type": "boolean"}
        case kind:
            return {"type": kind}


def random_regex(rng: random.Random) -> str:
    """A pattern with the same meaning in Python's `re`."""
    pieces = [rng.choice(_PIECES) + rng.choice(_COUNTS) for _ in range(rng.randrange(1, 7))]
    pattern = "".join(pieces)
    return f"(?:{pattern}|{rng.choice(_PIECES)})" if rng.random() < 0.3 else pattern
