"""The JSON Schema of a policy, for editors: what the readers say of themselves, in that language.

It takes whatever the readers take, so an editor never marks a good policy as wrong; what must hold between keys, and
whether a name is defined, only `headrace check` tells. A value may always be written with variables. The committed
`policy.schema.json` is this module's output.
"""

from __future__ import annotations

import json
import re
from typing import Any

from policies.read import POLICY
from policies.reader import Either, Listed, Named, Reader, Scalar, Section

_VARIABLE = {"type": "string", "pattern": r"\$\{", "description": "${NAME} or ${NAME:-default}, out of the environment"}


def json_schema() -> str:
    """The schema as JSON text, with a newline at its end."""
    head = {
        "$schema": "http://json-schema.org/draft-07/schema#",  # the newest that YAML language servers know in full
        "title": "Headrace policy",
    }
    document = head | _described(POLICY) | {"definitions": {"variable": _VARIABLE}}
    return json.dumps(document, indent=2) + "\n"


def _described(reader: Reader[Any]) -> dict[str, Any]:
    match reader:
        case Scalar():
            form = dict(reader.form)
            if form != {"type": ["string", "number"]}:  # which is any text, variables included
                form = {"anyOf": [form, {"$ref": "#/definitions/variable"}]}
            return {"description": _sentence(reader), **form}
        case Section():
            return _section(reader)
        case Listed():
            return {"type": "array", "minItems": 1, "items": _described(reader.part)}
        case Named():
            names = {"propertyNames": {"pattern": _whole(reader.names)}} if reader.names else {}
            return {"type": "object", **names, "additionalProperties": _described(reader.part)}
        case Either():
            return {"anyOf": [_described(reader.short), _described(reader.long)]}
    raise TypeError(f"{type(reader).__name__} is no kind of reader that has a schema")


def _section(reader: Section[Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object", "description": _sentence(reader)}
    if reader.needed:
        made["required"] = list(reader.needed)
    if reader.one_of:
        made["oneOf"] = [{"required": [key]} for key in reader.one_of]
    made["properties"] = {}
    for key, part in reader.keys.items():
        default = reader.defaults.get(key)
        told = {"default": part.write(default)} if isinstance(part, Scalar) and default not in (None, "") else {}
        made["properties"][key] = _described(part) | told
    if reader.free:
        made["patternProperties"] = {f"^{reader.free}": {}}
    return made | {"additionalProperties": False}


def _sentence(reader: Reader[Any]) -> str:
    about = reader.about if isinstance(reader, Section) else reader.expected
    return f"{about.removesuffix('.')}; without it: {reader.unset}" if reader.unset else about


def _whole(pattern: re.Pattern[str]) -> str:
    return f"^(?:{pattern.pattern})$"
