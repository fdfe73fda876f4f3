"""JSON schemas of tools, of the choice among them, and of forms of the text, in OpenAI's protocols.

Owns both spellings: chats have a function inside of a tool, responses have one object. Data flow:
properties of bodies.
"""

from decodegrid.engine.server_schema_fields import (
    BOOLEAN,
    STRING,
    Schema,
    array,
    or_null,
    record,
)

OBJECT: Schema = {"type": "object"}


def tool_properties(*, is_flat: bool) -> dict[str, Schema]:
    """tools, tool_choice and parallel_tool_calls. is_flat: as responses have them."""
    function = {
        "name": STRING,
        "description": or_null(STRING),
        "parameters": or_null(OBJECT, about="A JSON schema."),
        "strict": or_null(BOOLEAN),
    }
    kind = {"type": {"const": "function"}}
    if is_flat:
        tool = record({**kind, **function}, ["type", "name"], may_have_nulls=True)
        named = record({**kind, "name": STRING}, ["type", "name"], may_have_nulls=True)
    else:
        inner = record(function, ["name"], may_have_nulls=True)
        tool = record({**kind, "function": inner}, ["type", "function"], may_have_nulls=True)
        name = record({"name": STRING}, ["name"], may_have_nulls=True)
        named = record({**kind, "function": name}, ["type", "function"], may_have_nulls=True)
    allowed = {"mode": {"enum": ["auto", "required"]}, "tools": array(named, 1)}
    what = {"type": {"const": "allowed_tools"}}
    if is_flat:
        offer = record({**what, **allowed}, ["type", *allowed], may_have_nulls=True)
    else:
        inner = record(allowed, allowed, may_have_nulls=True)
        fields = {**what, "allowed_tools": inner}
        offer = record(fields, fields, may_have_nulls=True)
    words = {"enum": ["auto", "none", "required"]}
    return {
        "tools": or_null(array(tool)),
        "tool_choice": or_null(words, named, offer, about="Among the tools that are given."),
        "parallel_tool_calls": or_null(BOOLEAN, about="False with tools only."),
    }


def format_schemas(schema: Schema, *, is_flat: bool) -> list[Schema]:
    """The forms that a text may be asked to have: free, a JSON object, or that of a schema.

    schema: the record with name and schema. is_flat: its fields stand beside the type.
    """
    found = [
        record({"type": {"const": kind}}, ["type"], may_have_nulls=True)
        for kind in ("text", "json_object")
    ]
    kind_of: dict[str, Schema] = {"type": {"const": "json_schema"}}
    if is_flat:
        properties = {**kind_of, **schema["properties"]}
        found.append(record(properties, ["type", *schema["required"]], may_have_nulls=True))
    else:
        properties = {**kind_of, "json_schema": schema}
        found.append(record(properties, properties, may_have_nulls=True))
    return found
