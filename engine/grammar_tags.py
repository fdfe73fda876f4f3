"""The grammar of reasoning and tool calls in the model's own marks.

Owns the translation of a source of the kind "calls" into xgrammar's structural tag. Compiles
nothing; the compiler imports it, and with it the library, when the first such source comes.

Source: xgrammar's builtin tag for DeepSeek V4.1.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from xgrammar import StructuralTag, get_model_structural_tag
from xgrammar.structural_tag import AnyTokensFormat, SequenceFormat, TagFormat, TokenFormat

_MODEL: Final = "deepseek_v4_1"
_OPENING: Final = "\n\n<\uff5cDSML\uff5c calls>\n"
"""Of the calls; a prompt that asks for them ends with it."""
_CHOICES: Final[Mapping[str, Literal["none", "auto", "required"]]] = {
    "none": "none",
    "may": "auto",
    "must": "required",
    "one": "required",
}
"""The library's words. That there is one call, and of which tool, the tools and the number say."""


def structural_tag(text: str, max_whitespace: int, silent_ids: Sequence[int] = ()) -> StructuralTag:
    """The tag of a source's text. Raises ValueError for tools that the library does not take.

    max_whitespace: characters between the parts of an argument's JSON. silent_ids: tokens that
    reasoning has none of.
    """
    wanted = json.loads(text)
    tag = get_model_structural_tag(
        _MODEL,
        tools=[_tool(tool) for tool in wanted["tools"]],
        tool_choice=_CHOICES[wanted["mode"]],
        reasoning="disabled" if wanted["thinking_end_id"] is None else "enabled",
        max_whitespace_cnt=max_whitespace,
        parallel_tool_calls=wanted["is_parallel"] and wanted["mode"] != "one",
    )
    if wanted["thinking_end_id"] is not None:
        _make_thinking(tag, wanted, silent_ids)
    return tag


def text_before(text: str) -> str:
    """What of the grammar's text stands in the prompt already."""
    return _OPENING if json.loads(text)["is_open"] else ""


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["parameters"]}
    return {"type": "function", "function": function}


def _make_thinking(tag: StructuralTag, wanted: dict[str, Any], silent_ids: Sequence[int]) -> None:
    """Have the reasoning end with its token, and be counted in tokens: the library's own tag would
    as well have the token's name written out in others."""
    whole = tag.format
    assert isinstance(whole, SequenceFormat), "reasoning is the first of several parts"
    thinking = whole.elements[0]
    assert isinstance(thinking, TagFormat)
    end = wanted["thinking_end_id"]
    thinking.content = AnyTokensFormat(
        exclude_tokens=list({end, *silent_ids}), max_tokens=wanted["max_thinking_tokens"]
    )
    thinking.end = TokenFormat(token=end)
