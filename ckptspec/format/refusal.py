"""Owns how an error of the schema validator is told: rule, pointer, expected and found; decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ckptspec.errors import Where
from ckptspec.format.report import Finding

Schema = Mapping[str, Any]
Place = tuple[Any, ...]  # steps into a document
UNKNOWN_FIELD = "unknown field"
_SHOWN = 80  # characters of a value that a finding quotes


def refusals(schema: Schema, document: Any, place: Place, error: Any, file: str | None) -> Iterator[Finding]:
    """Yield what one error says: a finding, or one for every unknown field of an object.

    `schema` is the one that was asked, about the value at `place` of `document`; `error` is jsonschema_rs's.
    """
    rule, holder, asked = _asserted(schema, error.schema_path)
    place, value = _located(document, (*place, *error.instance_path))
    keyword = error.schema_path[-1]
    if keyword == "additionalProperties" and asked is False:
        known = holder.get("properties", {})
        for field in getattr(error.kind, "unexpected", None) or [x for x in value if x not in known]:
            yield Finding(rule, "error", UNKNOWN_FIELD, Where(file, pointer((*place, field))))
        return
    found: str | None = _shown(value)
    inner = getattr(error.kind, "error", None)  # set where the name of a field is what was refused
    if inner is not None:
        place, found = (*place, inner.instance), _shown(inner.instance)
    if keyword in ("required", "not"):
        asked, found = getattr(error.kind, "property", asked), None
    message, expected = _WORDS.get(keyword, _other)(asked)
    yield Finding(rule, "error", message, Where(file, pointer(place)), expected, found)


def pointer(place: Sequence[Any]) -> str:
    """Return the JSON pointer (RFC 6901) of the steps in `place`; the empty text is the whole document."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in place)


def _asserted(schema: Schema, path: Sequence[Any]) -> tuple[str, Schema, Any]:
    """Return the rule id nearest to the end of `path`, the subschema its last keyword stands in, and what that asks."""
    rule = str(schema.get("$comment", ""))
    holder: Any = schema
    node: Any = schema
    for step in path:
        holder, node = node, node[step]
        if step == "$ref":  # some versions name the reference, some go straight to `$defs`
            node = schema["$defs"][node.removeprefix("#/$defs/")]
        if isinstance(node, dict):
            rule = node.get("$comment", rule)
    return rule, holder, node


def _located(document: Any, steps: Place) -> tuple[Place, Any]:
    """Return the steps as the document has them, and the value they lead to.

    jsonschema_rs gives a field called "007" as the step 7 and leaves out one called "": both are put right here.
    """
    place: Place = ()
    for step in steps:
        if isinstance(document, dict) and step not in document:
            if str(step) not in document and "" in document:
                place, document = (*place, ""), document[""]
            if isinstance(document, dict):
                step = next((k for k in (str(step), *document) if k in document and _is_step(k, step)), None)
        if step is None or not isinstance(document, (dict, list)):
            break
        place, document = (*place, step), document[step]
    return place, document


def _is_step(field: str, step: Any) -> bool:
    return field == str(step) or field.removeprefix("+").lstrip("0") == str(step).lstrip("0")


def _shown(value: Any) -> str:
    """Return a value in short, as JSON would write it."""
    if isinstance(value, (dict, list)):
        return f"an object of {len(value)} fields" if isinstance(value, dict) else f"an array of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:  # Python refuses to write very long integers
        return f"an integer of {value.bit_length()} bits"
    text = json.dumps(value[:_SHOWN] if isinstance(value, str) else value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


Words = Callable[[Any], tuple[str, "str | None"]]


def _plain(message: str, unit: str = "") -> Words:
    return lambda asked: (message, f"{asked}{unit}")


def _least(message: str, unit: str = "") -> Words:
    return lambda asked: (message, f"at least {asked}{unit}")


def _most(message: str, unit: str = "") -> Words:
    return lambda asked: (message, f"at most {asked}{unit}")


def _choice(message: str) -> Words:
    return lambda asked: (message, " or ".join(map(str, [asked] if isinstance(asked, str) else asked)))


def _other(asked: Any) -> tuple[str, str | None]:
    return "refused by the schema", _shown(asked)


# How to say what a keyword of JSON Schema asks: message and expectation.
_WORDS: dict[str, Words] = {
    "type": _choice("wrong type"),
    "const": lambda asked: ("wrong value", _shown(asked)),
    "enum": _choice("not one of the allowed values"),
    "required": lambda asked: ("missing field", _shown(asked)),
    "not": lambda asked: ("fields that exclude each other", "no " + " and ".join(asked.get("required", ()))),
    "pattern": _plain("not of the right form"),
    "minimum": _least("too small"),
    "maximum": _most("too large"),
    "minLength": _least("too short", " characters"),
    "maxLength": _most("too long", " characters"),
    "minItems": _least("too few entries"),
    "maxItems": _most("too many entries"),
    "minProperties": _least("too few fields"),
    "maxProperties": _most("too many fields"),
    "uniqueItems": lambda asked: ("an entry occurs twice", None),
}
