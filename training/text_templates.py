"""Templated question and answer pairs without tools.

Owns: JSON objects from a sentence, sums, lists, Python functions, greetings, echoes, look-ups. Does
not own: the mix or the joining of pairs to conversations (`templates`). Data flow: a random
generator in, (question, answer) out. Each answer is right: sums are computed, everything else is
copied from the question.
"""

import json
from collections.abc import Callable
from random import Random

from training.values import (
    ANIMALS,
    COLORS,
    JOBS,
    draw_city,
    draw_code,
    draw_name,
    draw_noun,
    draw_nouns,
    draw_number,
    draw_word,
)

Pair = tuple[str, str]


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def draw_json_object(rng: Random) -> Pair:
    """A sentence with facts and the JSON object that holds them."""
    kind = rng.randrange(4)
    if kind == 0:
        name, age, city, job = draw_name(rng), rng.randint(5, 95), draw_city(rng), rng.choice(JOBS)
        sentence, value = rng.choice(
            (
                (f"{name} is {age} years old and lives in {city}.", ("name", "age", "city")),
                (f"{name} from {city} is a {job}.", ("name", "city", "job")),
                (f"My friend {name}, a {job}, is {age}.", ("name", "job", "age")),
                (f"{name}, {age}, works in {city} as a {job}.", ("name", "age", "city", "job")),
            )
        )
        facts: dict[str, object] = {"name": name, "age": age, "city": city, "job": job}
        record: dict[str, object] = {key: facts[key] for key in value}
    elif kind == 1:
        item, count, price = draw_noun(rng), draw_number(rng), rng.randint(1, 99) / 2
        sentence = rng.choice(
            (
                f"{count} pieces of {item} at {price} each.",
                f"Order {count} times {item}, price {price}.",
                f"We need {count} of the {item} for {price}.",
            )
        )
        record = {"item": item, "count": count, "price": price}
    elif kind == 2:
        animal, name, color = rng.choice(ANIMALS), draw_name(rng), rng.choice(COLORS)
        sentence = rng.choice(
            (
                f"{name} is a {color} {animal}.",
                f"The {color} {animal} is called {name}.",
                f"I saw {name}, my {animal}, it is {color}.",
            )
        )
        record = {"name": name, "animal": animal, "color": color}
    else:
        code, noun, open_ = draw_code(rng), draw_noun(rng), rng.random() < 0.5
        state = "open" if open_ else "closed"
        sentence = rng.choice(
            (f"Ticket {code} about the {noun} is {state}.", f"The {noun} ticket {code} is {state}.")
        )
        record = {"ticket": code, "about": noun, "open": open_}
    ask = rng.choice(
        ("Write as JSON: {s}", "Make a JSON object: {s}", "{s} Give me JSON.", "JSON please. {s}")
    )
    return ask.format(s=sentence), _dumps(record)


def draw_sum(rng: Random) -> Pair:
    """A small addition, subtraction or multiplication."""
    a, b = draw_number(rng), draw_number(rng)
    sign = rng.choice("++-*")
    if sign == "*":
        a, b = rng.randint(2, 12), rng.randint(2, 12)
    elif sign == "-" and b > a:
        a, b = b, a
    value = {"+": a + b, "-": a - b, "*": a * b}[sign]
    ask = rng.choice(("What is {q}?", "{q} = ?", "Compute {q}.", "How much is {q}?"))
    answer = rng.choice(("{v}", "{q} = {v}"))
    question = f"{a} {sign} {b}"
    # The short and the long answer need different questions, or the choice would be a coin toss.
    tail = " Show the sum." if answer != "{v}" else ""
    return ask.format(q=question) + tail, answer.format(q=question, v=value)


def draw_list(rng: Random) -> Pair:
    """Words or numbers to a JSON array, as they stand, reversed, sorted or counted."""
    count = rng.randint(2, 6)
    numeric = rng.random() < 0.4
    items: list[object] = [draw_number(rng) for _ in range(count)] if numeric else []
    if not numeric:
        items = list(draw_nouns(rng, count))
    text = ", ".join(str(item) for item in items)
    kind = rng.choice(("array", "array", "array", "reverse", "first", "last", "count"))
    if kind == "array":
        ask = rng.choice(
            ("Make a JSON array: {t}", "Write as a JSON list: {t}", "As an array: {t}")
        )
        return ask.format(t=text), _dumps(items)
    if kind == "reverse":
        return f"Reverse as JSON: {text}", _dumps(items[::-1])
    if kind == "count":
        return f"Count the items: {text}", str(count)
    return f"The {kind} of: {text}", str(items[0] if kind == "first" else items[-1])


_FUNCTIONS = (
    ("adds {n} to a number", "add_{n}", "x", "x + {n}"),
    ("multiplies a number by {n}", "times_{n}", "x", "x * {n}"),
    ("subtracts {n} from a number", "minus_{n}", "x", "x - {n}"),
    ("tells whether a number is larger than {n}", "over_{n}", "x", "x > {n}"),
    ("tells whether a number can be divided by {n}", "by_{n}", "x", "x % {n} == 0"),
    ("returns the first {n} items", "first_{n}", "items", "items[:{n}]"),
    ("returns the last {n} items", "last_{n}", "items", "items[-{n}:]"),
    ("repeats a text {n} times", "repeat_{n}", "text", "text * {n}"),
    ("adds two numbers", "add", "a, b", "a + b"),
    ("returns the larger of two numbers", "larger", "a, b", "max(a, b)"),
    ("returns the length of a list", "length", "items", "len(items)"),
    ("returns the sum of a list", "total", "items", "sum(items)"),
    ("reverses a text", "reverse", "text", "text[::-1]"),
    ("sorts a list", "sort", "items", "sorted(items)"),
    ("makes a text upper case", "upper", "text", "text.upper()"),
    ("counts the words of a text", "count_words", "text", "len(text.split())"),
)


def draw_python(rng: Random) -> Pair:
    """A one-line Python function, under its usual name or one that the user gives."""
    number = str(rng.randint(2, 99))
    row = rng.choice(_FUNCTIONS)
    what, name, parameters, body = (part.replace("{n}", number) for part in row)
    ask = f"Write a Python function that {what}."
    if rng.random() < 0.5:
        name = rng.choice((draw_word(rng), f"{draw_noun(rng)}_{draw_word(rng)}"))
        ask = rng.choice(
            (
                f"Write a Python function {name} that {what}.",
                f"Write a Python function that {what}. Call it {name}.",
            )
        )
    return ask, f"```python\ndef {name}({parameters}):\n    return {body}\n```"


def draw_greeting(rng: Random) -> Pair:
    """A greeting, a farewell, thanks, or a name told."""
    name = draw_name(rng)
    greeting = rng.choice(("Hi", "hi", "Hi!", "hi there", "Hello", "Hello!", "Hey"))
    return rng.choice(
        (
            (greeting, "Hello! How can I help you?"),
            (f"Hi, I am {name}.", f"Hello {name}! How can I help you?"),
            (f"My name is {name}.", f"Nice to meet you, {name}!"),
            (f"Hello, {name} here!", f"Hello {name}! How can I help you?"),
            ("Good morning", "Good morning! How can I help you?"),
            (f"Say hello to {name}.", f"Hello, {name}!"),
            (rng.choice(("Thanks!", "Thank you!", "thanks")), "You are welcome!"),
            (rng.choice(("Bye", "Goodbye!", "See you")), "Goodbye!"),
            ("How are you?", "I am fine, thank you. How can I help you?"),
            ("What can you do?", "I can tell stories, call tools, write JSON and do small sums."),
            ("Who are you?", "I am a tiny language model. I can tell stories and call tools."),
        )
    )


def draw_echo(rng: Random) -> Pair:
    """Text to repeat."""
    words = " ".join(
        rng.choice((draw_noun, draw_word, draw_name, draw_city))(rng)
        for _ in range(rng.randint(1, 6))
    )
    text = rng.choice((words, words, words, draw_code(rng), str(draw_number(rng))))
    if rng.random() < 0.15:
        times = rng.randint(2, 4)
        return f"Say {text} {times} times.", " ".join([text] * times)
    ask = rng.choice(("Repeat: {t}", "Say: {t}", "Echo: {t}", "Copy this: {t}", 'Say "{t}".'))
    return ask.format(t=text), text


ASKS = ("What is {k}?", "Value of {k}?", "{k}?", "Look up {k}.")
"""Questions for the value of a key."""


def draw_pairs(rng: Random, count: int) -> dict[str, object]:
    """Keys with values of one kind."""
    keys = draw_nouns(rng, count) if rng.random() < 0.5 else []
    while len(keys) < count:
        name = draw_name(rng)
        if name not in keys:
            keys.append(name)
    draw: Callable[[Random], object] = rng.choice(
        (draw_number, draw_code, draw_city, lambda r: r.choice(COLORS), draw_word)
    )
    return {key: draw(rng) for key in keys}


def write_pairs(rng: Random, pairs: dict[str, object]) -> str:
    """A table in one of three forms, with the gap to what follows."""
    form = rng.randrange(3)
    if form == 0:
        return _dumps(pairs) + " "
    if form == 1:
        return ", ".join(f"{k} = {v}" for k, v in pairs.items()) + ". "
    return "\n".join(f"{k}: {v}" for k, v in pairs.items()) + "\n"


def draw_lookup(rng: Random) -> Pair:
    """Some pairs and a question for one of them."""
    pairs = draw_pairs(rng, rng.randint(2, 7))
    key = rng.choice(list(pairs))
    ask = rng.choice(ASKS)
    return f"{write_pairs(rng, pairs)}{ask.format(k=key)}", str(pairs[key])
