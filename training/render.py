"""Conversations as text in the DeepSeek-V4.1 prompt format.

Owns: the mapping from `Conversation` to deepseek-recipe's records, and the cut that turns a prompt
with history into a training document. Does not own: the format itself, which is deepseek-recipe's
encoder, without thinking. Data flow: conversation -> `Rendered` (text and where its special tokens
are) -> `training.vocabulary` -> token ids.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import deepseek_recipe as recipe

from training.conversation import Conversation, Tool, Turn

BOS = recipe.SpecialToken.Bos.default_str()
EOS = recipe.SpecialToken.Eos.default_str()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text and the half-open character ranges of it that are special tokens; all else is plain
    text."""

    text: str
    special_ranges: tuple[tuple[int, int], ...]

    def pieces(self) -> list[tuple[str, bool]]:
        """The text cut into (piece, is a special token), in order, without empty pieces."""
        found: list[tuple[str, bool]] = []
        position = 0
        for start, end in self.special_ranges:
            found += [(self.text[position:start], False), (self.text[start:end], True)]
            position = end
        found.append((self.text[position:], False))
        return [(piece, special) for piece, special in found if piece]


def _to_recipe_message(turn: Turn, index: int) -> recipe.Message:
    match turn.role:
        case "system":
            return recipe.SystemMessage(turn.content)
        case "user":
            return recipe.UserMessage(turn.content)
        case "tool":
            return recipe.ToolMessage(turn.content)
        case "assistant":
            calls = [
                recipe.ToolCall(f"call_{index}_{n}", call.name, call.arguments_json)
                for n, call in enumerate(turn.calls)
            ]
            return recipe.AssistantMessage(turn.content, tool_calls=calls or None)


def to_recipe(
    turns: Sequence[Turn], tools: Sequence[Tool] = (), json_output: bool = False
) -> recipe.Conversation:
    """The same conversation as deepseek-recipe's record, thinking off."""
    definitions = [
        recipe.ToolDefinition(t.name, t.description, json.loads(t.parameters_json)) for t in tools
    ]
    return recipe.Conversation(
        [_to_recipe_message(turn, index) for index, turn in enumerate(turns)],
        thinking_mode=False,
        tools=definitions or None,
        response_format="json_object" if json_output else "text",
    )


def _render(turns: Sequence[Turn], tools: Sequence[Tool], json_output: bool) -> Rendered:
    encoding = recipe.DeepseekV41Encoding()
    rendered = encoding.render_conversation(to_recipe(turns, tools, json_output))
    return Rendered(rendered.prompt, tuple(rendered.special_ranges))


def _drop_specials(rendered: Rendered, count: int) -> Rendered:
    """Without the last `count` special tokens, which must end the text."""
    kept = rendered.special_ranges[: len(rendered.special_ranges) - count]
    cut = rendered.special_ranges[len(kept)][0]
    assert sum(e - s for s, e in rendered.special_ranges[len(kept) :]) == len(rendered.text) - cut
    return Rendered(rendered.text[:cut], kept)


def render_prompt_pieces(
    turns: Sequence[Turn], tools: Sequence[Tool] = (), json_output: bool = False
) -> Rendered:
    """The prompt up to the point where the assistant speaks next.

    Raises:
        ValueError: the last turn is the assistant's, so nothing is asked.
    """
    if not turns or turns[-1].role == "assistant":
        raise ValueError("a prompt needs a last turn that is not the assistant's")
    return _render(turns, tools, json_output)


def render_full_pieces(
    turns: Sequence[Turn],
    tools: Sequence[Tool] = (),
    json_output: bool = False,
    complete: bool = True,
) -> Rendered:
    """The whole conversation with the last answer and, when `complete`, its end-of-sentence token.

    Raises:
        ValueError: the last turn is not the assistant's.
    """
    if not turns or turns[-1].role != "assistant":
        raise ValueError("a training document needs the assistant's turn at its end")
    # The encoder opens one more assistant turn (two special tokens) after a finished answer.
    return _drop_specials(_render(turns, tools, json_output), 2 if complete else 3)


def render_prompt(
    messages: Sequence[Turn], tools: Sequence[Tool] = (), json_output: bool = False
) -> str:
    """Text of `render_prompt_pieces`."""
    return render_prompt_pieces(messages, tools, json_output).text


def render_full(
    messages: Sequence[Turn],
    tools: Sequence[Tool] = (),
    json_output: bool = False,
    complete: bool = True,
) -> str:
    """Text of `render_full_pieces`."""
    return render_full_pieces(messages, tools, json_output, complete).text


def render_plain(text: str, complete: bool = True) -> Rendered:
    """A text after the begin-of-sentence token, without a chat frame; ended when `complete`."""
    full = BOS + text + (EOS if complete else "")
    ranges = [(0, len(BOS))]
    if complete:
        ranges.append((len(full) - len(EOS), len(full)))
    return Rendered(full, tuple(ranges))


def render_conversation(conversation: Conversation) -> Rendered:
    """`render_full_pieces` of a templated conversation."""
    c = conversation
    return render_full_pieces(c.turns, c.tools, c.json_output)
