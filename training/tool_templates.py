"""Templated conversations with tool calls.

Owns: six tools with their schemas, and for each the request, the call, the tool's result and the
closing answer. Does not own: the DSML spelling of a call (`render`) or the mix (`templates`). Data
flow: a random generator in, `Conversation` out. Every argument of a call stands in the user's
sentence, so that calling is copying.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from training.conversation import Call, Conversation, Tool, Turn, assistant, user
from training.values import (
    CITIES,
    DAYS,
    TOPICS,
    UNITS,
    WEATHER,
    draw_city,
    draw_name,
    draw_noun,
    draw_number,
    draw_time,
    draw_word,
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that needs one call: what the user says, the call, its result and the answer."""

    request: str
    arguments: dict[str, object]
    result: dict[str, object]
    answer: str


@dataclass(frozen=True, slots=True)
class ToolTemplate:
    """A tool and the way to draw exchanges that use it."""

    tool: Tool
    draw: Callable[[Random], Exchange]


def _tool(name: str, description: str, properties: dict[str, str]) -> Tool:
    """A tool whose arguments (name -> JSON type) are all required, unless the type ends in `?`."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind.rstrip("?")} for key, kind in properties.items()},
        "required": [key for key, kind in properties.items() if not kind.endswith("?")],
    }
    return Tool(name, description, json.dumps(schema))


def _draw_weather(rng: Random) -> Exchange:
    city, sky, degrees = draw_city(rng), rng.choice(WEATHER), rng.randint(-9, 38)
    if rng.random() < 0.5:
        days = rng.randint(2, 9)
        request = rng.choice(
            (
                "What will the weather be in {c} for the next {d} days?",
                "Give me a {d} day forecast for {c}.",
                "Weather in {c}, {d} days please.",
                "How is the weather in {c} over {d} days?",
            )
        ).format(c=city, d=days)
        arguments: dict[str, object] = {"city": city, "days": days}
    else:
        request = rng.choice(
            (
                "What is the weather in {c}?",
                "How is the weather in {c} today?",
                "Is it warm in {c}?",
                "Tell me the weather for {c}.",
                "{c} weather",
            )
        ).format(c=city)
        arguments = {"city": city}
    result: dict[str, object] = {"sky": sky, "degrees": degrees}
    return Exchange(request, arguments, result, f"It is {sky} in {city}, {degrees} degrees.")


def _draw_event(rng: Random) -> Exchange:
    day, time = rng.choice(DAYS), draw_time(rng)
    if rng.random() < 0.5:
        title = f"{rng.choice(TOPICS)} with {draw_name(rng)}"
    else:
        title = f"{rng.choice((*TOPICS, draw_word(rng)))} meeting"
    request = rng.choice(
        (
            "Book {t} on {d} at {h}.",
            "Put {t} in my calendar for {d} at {h}.",
            "Schedule {t} at {h} on {d}.",
            "Please add {t}, {d} {h}.",
            "I have {t} on {d} at {h}, write it down.",
        )
    ).format(t=title, d=day, h=time)
    arguments: dict[str, object] = {"title": title, "day": day, "time": time}
    event = draw_number(rng)
    return Exchange(
        request, arguments, {"ok": True, "id": event}, f"Done: {title} on {day} at {time}."
    )


def _draw_timer(rng: Random) -> Exchange:
    minutes, label = draw_number(rng), draw_noun(rng)
    request = rng.choice(
        (
            "Set a timer for {m} minutes for the {l}.",
            "Start a {m} minute timer called {l}.",
            "Timer: {l}, {m} minutes.",
            "Remind me about the {l} in {m} minutes.",
        )
    ).format(m=minutes, l=label)
    arguments: dict[str, object] = {"minutes": minutes, "label": label}
    return Exchange(
        request, arguments, {"ok": True}, f"The {label} timer is set to {minutes} minutes."
    )


def _draw_conversion(rng: Random) -> Exchange:
    source, target = rng.choice(UNITS)
    value: float = draw_number(rng)
    if rng.random() < 0.3:
        value += rng.choice((0.5, 0.25, 0.1))
    request = rng.choice(
        (
            "Convert {v} {s} to {t}.",
            "How many {t} are {v} {s}?",
            "What is {v} {s} in {t}?",
            "{v} {s} in {t}, please.",
        )
    ).format(v=value, s=source, t=target)
    arguments: dict[str, object] = {"value": value, "from_unit": source, "to_unit": target}
    result = round(draw_number(rng) + rng.random(), 1)
    return Exchange(
        request, arguments, {"value": result}, f"{value} {source} is {result} {target}."
    )


def _draw_item(rng: Random) -> Exchange:
    item, name = draw_noun(rng), rng.choice(("shopping", "packing", "wish", "todo", draw_word(rng)))
    request = rng.choice(
        (
            "Add {i} to my {n} list.",
            "Put {i} on the {n} list.",
            "My {n} list needs {i}.",
            "Write {i} on the list called {n}.",
        )
    ).format(i=item, n=name)
    arguments: dict[str, object] = {"list": name, "item": item}
    count = rng.randint(1, 30)
    return Exchange(
        request, arguments, {"items": count}, f"I added {item}. The {name} list has {count} items."
    )


def _draw_message(rng: Random) -> Exchange:
    name = draw_name(rng)
    text = rng.choice(
        (
            f"I am in {draw_city(rng)}",
            f"see you at {draw_time(rng)}",
            f"please bring the {draw_noun(rng)}",
            f"the {draw_noun(rng)} is ready",
            f"{draw_name(rng)} says hello",
            "I will be late",
            "call me back",
        )
    )
    request = rng.choice(
        ("Tell {n}: {t}.", "Send {n} the message: {t}.", "Message {n}: {t}.", "Write to {n}: {t}.")
    ).format(n=name, t=text)
    arguments: dict[str, object] = {"to": name, "text": text}
    return Exchange(request, arguments, {"sent": True}, f"I told {name}: {text}.")


TOOL_TEMPLATES = (
    ToolTemplate(
        _tool("get_weather", "Weather of a city", {"city": "string", "days": "integer?"}),
        _draw_weather,
    ),
    ToolTemplate(
        _tool(
            "create_event", "Add an event", {"title": "string", "day": "string", "time": "string"}
        ),
        _draw_event,
    ),
    ToolTemplate(
        _tool("set_timer", "Start a timer", {"minutes": "integer", "label": "string"}), _draw_timer
    ),
    ToolTemplate(
        _tool(
            "convert_units",
            "Convert a value",
            {"value": "number", "from_unit": "string", "to_unit": "string"},
        ),
        _draw_conversion,
    ),
    ToolTemplate(
        _tool("add_item", "Add to a list", {"list": "string", "item": "string"}), _draw_item
    ),
    ToolTemplate(
        _tool("send_message", "Send a message", {"to": "string", "text": "string"}), _draw_message
    ),
)


def draw_tool_conversation(rng: Random) -> Conversation:
    """One to three tools on offer and one to eight requests, each called, answered and closed.

    Long conversations share one tool preamble of the prompt format, which is most of a short one.
    One request in eight has two calls in one turn; one turn in ten needs no tool.
    """
    offered = rng.sample(TOOL_TEMPLATES, rng.choice((1, 1, 2, 2, 3)))
    turns: list[Turn] = []
    if rng.random() < 0.3:
        turns.append(Turn("system", rng.choice(("You are a helpful assistant.", "Be brief."))))
    for _ in range(rng.randint(1, 8)):
        if rng.random() < 0.1:
            city = rng.choice(CITIES)
            turns += [user(f"Thanks! Say {city}."), assistant(f"{city}.")]
            continue
        chosen = [rng.choice(offered)]
        if rng.random() < 1 / 8:
            chosen.append(rng.choice(offered))
        exchanges = [template.draw(rng) for template in chosen]
        calls = tuple(
            Call(t.tool.name, json.dumps(e.arguments, ensure_ascii=False))
            for t, e in zip(chosen, exchanges, strict=True)
        )
        turns.append(user(" ".join(e.request for e in exchanges)))
        turns.append(Turn("assistant", "", calls))
        turns += [Turn("tool", json.dumps(e.result)) for e in exchanges]
        turns.append(assistant(" ".join(e.answer for e in exchanges)))
    return Conversation("tools", tuple(turns), tuple(t.tool for t in offered))
