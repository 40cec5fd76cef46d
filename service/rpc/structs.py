"""google.protobuf.Struct to plain Python data. Numbers stay the doubles they are on the wire; chat templates
make whole ones ints again, whatever client the data came from (service.text.json_values).
"""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from service.rpc.violations import Violations


def struct_to_dict(struct: Struct, path: str, violations: Violations) -> dict[str, Any]:
    """What cannot be converted is reported under `path` and left as None."""
    return {key: _value_to_python(value, f"{path}.{key}", violations) for key, value in struct.fields.items()}


def _value_to_python(value: Value, path: str, violations: Violations) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        return value.string_value
    if kind == "number_value":
        return _number(value.number_value, path, violations)
    if kind == "bool_value":
        return value.bool_value
    if kind == "struct_value":
        return struct_to_dict(value.struct_value, path, violations)
    if kind == "list_value":
        return [
            _value_to_python(item, f"{path}[{i}]", violations)
            for i, item in enumerate(value.list_value.values)
        ]
    if kind is None:
        violations.add(path, "is a google.protobuf.Value of no kind; null has a kind of its own")
    return None


def _number(number: float, path: str, violations: Violations) -> float | None:
    if not math.isfinite(number):
        violations.add(path, f"is {number}; must be a finite number")
        return None
    return number
