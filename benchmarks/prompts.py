"""The fixed prompts of the benchmark and their token ids.

Owns eight structured chats (tool calls, JSON, code, copying) and eight requests for a story, as
text; none of them was drawn from a training file. The V4.1 prompt format is deepseek-recipe's.
Data flow: ChatPrompt -> conversation record -> token ids up to where the assistant speaks.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe as recipe


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool on offer; `parameters_json` is a JSON Schema as text."""

    name: str
    description: str
    parameters_json: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """One or more turns of a user, answered by the texts between them."""

    user_turns: tuple[str, ...]
    answers: tuple[str, ...] = ()
    """One fewer than the user's turns."""
    tools: tuple[ToolSchema, ...] = ()


_EVENT = ToolSchema(
    "create_event",
    "Add an event",
    '{"type": "object", "properties": {"title": {"type": "string"}, "day": {"type": "string"}, '
    '"time": {"type": "string"}}, "required": ["title", "day", "time"]}',
)
_MESSAGE = ToolSchema(
    "send_message",
    "Send a message",
    '{"type": "object", "properties": {"to": {"type": "string"}, "text": {"type": "string"}}, '
    '"required": ["to", "text"]}',
)
_UNITS = ToolSchema(
    "convert_units",
    "Convert a value",
    '{"type": "object", "properties": {"value": {"type": "number"}, "from_unit": {"type": '
    '"string"}, "to_unit": {"type": "string"}}, "required": ["value", "from_unit", "to_unit"]}',
)

STRUCTURED = (
    ChatPrompt(("Schedule budget meeting at 10:30 on Tuesday.",), tools=(_EVENT,)),
    ChatPrompt(("Send Maria the message: the train is late.",), tools=(_MESSAGE,)),
    ChatPrompt(("Convert 42 miles to km.",), tools=(_UNITS, _MESSAGE)),
    ChatPrompt(("Make a JSON object: Ines, 41, works in Oslo as a baker.",)),
    ChatPrompt(("Write as JSON: Omar is 29 years old and lives in Lima.",)),
    ChatPrompt(("Make a JSON array: 14, 3, 88, 27, 61, 5, 90, 12, 44",)),
    ChatPrompt(("Write a Python function that multiplies a number by 34. Call it scale.",)),
    ChatPrompt(
        ("Make a JSON array: lamp, river, goat", "Reverse as JSON: lamp, river, goat"),
        ('["lamp", "river", "goat"]',),
    ),
)

STORIES = tuple(
    ChatPrompt((f"Write a short children's story about {who} who finds {what} near {where}.",))
    for who, what, where in (
        ("a brave rabbit", "a silver key", "the old bridge"),
        ("a curious girl", "a lost kite", "the lake"),
        ("a sleepy bear", "a jar of honey", "the river"),
        ("a kind farmer", "a tiny door", "the barn"),
        ("a clever fox", "a red hat", "the old mill"),
        ("a shy turtle", "a shiny stone", "the beach"),
        ("a young sailor", "an old map", "the harbor"),
        ("a happy frog", "a golden leaf", "the pond"),
    )
)


def encode_prompts(prompts: tuple[ChatPrompt, ...], tokenizer: Path) -> list[tuple[int, ...]]:
    """Token ids of each prompt, the assistant's opening included, without thinking.

    tokenizer: a tokenizer.json with the special tokens of the format. Raises ValueError for turns
    and answers that do not alternate.
    """
    text = tokenizer.read_text(encoding="utf-8")
    encoding = recipe.DeepseekV41Encoding().with_tokenizer(recipe.Tokenizer.from_str(text))
    return [tuple(encoding.encode(_conversation(prompt))) for prompt in prompts]


def _conversation(prompt: ChatPrompt) -> recipe.Conversation:
    if len(prompt.answers) != len(prompt.user_turns) - 1:
        raise ValueError(
            f"{len(prompt.user_turns)} turns of the user with {len(prompt.answers)} answers; "
            "there must be one answer fewer than turns"
        )
    messages: list[recipe.Message] = []
    for index, turn in enumerate(prompt.user_turns):
        messages.append(recipe.UserMessage(turn))
        if index < len(prompt.answers):
            messages.append(recipe.AssistantMessage(prompt.answers[index]))
    tools = [
        recipe.ToolDefinition(tool.name, tool.description, json.loads(tool.parameters_json))
        for tool in prompt.tools
    ]
    return recipe.Conversation(messages, thinking_mode=False, tools=tools or None)
