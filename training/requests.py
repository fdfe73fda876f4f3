"""Requests with known answers, and how much of an answer is right.

Owns the choice of requests from either side of the split, the parsing of answers, and the count of
values that were copied from the prompt. Does not own generation. Data flow: templates and stories
-> `Request` (token ids of a prompt) -> an engine's text -> `Score`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import deepseek_recipe as recipe

from training.conversation import Tool, Turn, user
from training.data import is_heldout, split_key
from training.render import render_prompt_pieces
from training.stories import choose_prompt, is_plain, read_stories
from training.templates import generate
from training.text_templates import draw_json_object, draw_list
from training.tool_templates import TOOL_TEMPLATES
from training.vocabulary import Vocabulary

KINDS = ("object", "array", "call")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt up to where the assistant speaks."""

    kind: str
    """One of KINDS, or "chat" and "story", which have no expected answer."""
    ids: tuple[int, ...]
    expected: str = ""
    """JSON text: the object, the array, or [name, arguments] of the call."""


@dataclass(frozen=True, slots=True)
class Score:
    """What of one answer is right."""

    parsed: bool
    copied: int
    """Values that equal those of the prompt."""
    total: int
    """Values that the prompt asks for."""


def _prompt_ids(
    vocabulary: Vocabulary, turns: tuple[Turn, ...], tools: tuple[Tool, ...] = ()
) -> tuple[int, ...]:
    return tuple(vocabulary.encode(render_prompt_pieces(turns, tools)))


def _draw(rng: Random, kind: str) -> tuple[str, str, tuple[Tool, ...]]:
    """Question, expected JSON text and tools of one request."""
    if kind == "call":
        template = rng.choice(TOOL_TEMPLATES)
        exchange = template.draw(rng)
        expected = json.dumps([template.tool.name, exchange.arguments])
        return exchange.request, expected, (template.tool,)
    question, answer = (draw_json_object if kind == "object" else draw_list)(rng)
    return question, answer, ()


def heldout_requests(vocabulary: Vocabulary, count: int, seed: int) -> list[Request]:
    """`count` requests whose questions are on the held-out side, the kinds taking turns."""
    found: list[Request] = []
    index = 0
    while len(found) < count:
        kind = KINDS[len(found) % len(KINDS)]
        question, expected, tools = _draw(Random(f"decodegrid:requests:{seed}:{index}"), kind)
        index += 1
        fits = kind != "array" or expected.startswith("[")
        if fits and is_heldout(question):
            ids = _prompt_ids(vocabulary, (user(question),), tools)
            found.append(Request(kind, ids, expected))
    return found


def story_requests(vocabulary: Vocabulary, *, heldout: bool) -> Iterator[Request]:
    """Each different story prompt of one side of the split, in file order."""
    seen: set[str] = set()
    for story in read_stories():
        question = choose_prompt(story)
        if is_heldout(story.prompt) != heldout or is_plain(story) or question in seen:
            continue
        seen.add(question)
        yield Request("story", _prompt_ids(vocabulary, (user(question),)))


def chat_requests(vocabulary: Vocabulary, count: int, seed: int) -> Iterator[Request]:
    """Prefixes of `count` templated conversations of the training side, each up to one of the
    assistant's turns."""
    for index, conversation in enumerate(generate(seed, count)):
        if is_heldout(split_key(conversation)):
            continue
        places = [i for i, turn in enumerate(conversation.turns) if turn.role == "assistant"]
        place = Random(f"decodegrid:prefix:{seed}:{index}").choice(places)
        yield Request(
            "chat", _prompt_ids(vocabulary, conversation.turns[:place], conversation.tools)
        )


def parse_calls(text: str) -> list[tuple[str, Any]]:
    """(name, arguments) of each call that deepseek-recipe finds in an answer."""
    body = {"model": "DeepSeek-V4.1-Flash", "messages": [{"role": "user", "content": "x"}]}
    options = recipe.ConversionOptions(default_thinking_mode=False)
    request = recipe.ChatCompletionRequest(body).convert(options)
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "id", "tiny")
    parsing = recipe.ParsingOptions(parse_tool_calls=True)
    processor = recipe.StreamProcessor(generator, parsing)
    chunks = processor.push(recipe.InferenceChunk.ready())
    chunks += processor.push(recipe.InferenceChunk.text(text, 1))
    chunks += processor.push(recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop))
    response = recipe.ChatCompletionResponse("id", "tiny", 0, 1, 0)
    for chunk in chunks:
        assert isinstance(chunk, recipe.ChatCompletionChunk)
        response.accumulate(chunk)
    message = json.loads(response.to_json())["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def score(request: Request, answer: str) -> Score:
    """Compare an answer's text, without its end-of-sentence token, with what was asked."""
    wanted: Any = json.loads(request.expected)
    try:
        found: Any = parse_calls(answer) if request.kind == "call" else json.loads(answer)
    except ValueError:
        found = None
    if request.kind == "call":
        name, wanted = wanted
        found = found[0][1] if found and found[0][0] == name else None
    if not isinstance(found, type(wanted)):
        return Score(False, 0, len(wanted))
    if isinstance(wanted, dict):
        copied = sum(key in found and found[key] == value for key, value in wanted.items())
    else:
        copied = sum(one == other for one, other in zip(found, wanted, strict=False))
    return Score(True, copied, len(wanted))
