"""The generator of templated conversations.

Owns: the mix of domains and the joining of question-answer pairs to conversations. Does not own:
the wording (`tool_templates`, `text_templates`) or the prompt format (`render`). Data flow: (seed,
n) -> n conversations; the i-th depends on the seed and i alone, so that a longer run starts with
the shorter one.
"""

from collections.abc import Callable
from random import Random

from training.conversation import Conversation, Turn, assistant, user
from training.text_templates import (
    Pair,
    draw_echo,
    draw_greeting,
    draw_json_object,
    draw_list,
    draw_lookup,
    draw_python,
    draw_sum,
)
from training.tool_templates import draw_tool_conversation

TOOLS_SHARE = 0.10
"""Share of conversations with tools; they are long, so about half of the tokens."""

PAIR_DOMAINS: tuple[tuple[str, int, Callable[[Random], Pair]], ...] = (
    ("json", 32, draw_json_object),
    ("sum", 8, draw_sum),
    ("list", 20, draw_list),
    ("python", 10, draw_python),
    ("greeting", 5, draw_greeting),
    ("echo", 14, draw_echo),
    ("lookup", 11, draw_lookup),
)
"""(domain, weight, generator). Most of the weight is on answers that copy from the question."""

SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are a tiny assistant.", "Be brief.")


def _draw_pairs(rng: Random) -> Conversation:
    """One pair, or two to four pairs of any domains as one chat (domain `mixed`)."""
    weights = [weight for _, weight, _ in PAIR_DOMAINS]
    count = rng.choice((1, 1, 1, 2, 3, 4))
    chosen = rng.choices(PAIR_DOMAINS, weights, k=count)
    turns: list[Turn] = []
    if rng.random() < 0.15:
        turns.append(Turn("system", rng.choice(SYSTEM_PROMPTS)))
    for _, _, draw in chosen:
        question, answer = draw(rng)
        turns += [user(question), assistant(answer)]
    if count > 1:
        return Conversation("mixed", tuple(turns))
    domain = chosen[0][0]
    json_output = domain == "json" and rng.random() < 0.3
    return Conversation(domain, tuple(turns), json_output=json_output)


def draw_conversation(rng: Random) -> Conversation:
    """One conversation of a random domain."""
    return draw_tool_conversation(rng) if rng.random() < TOOLS_SHARE else _draw_pairs(rng)


def generate(seed: int, n: int) -> list[Conversation]:
    """`n` templated conversations, the same for the same arguments on every machine.

    Raises:
        ValueError: `n` is negative.
    """
    if n < 0:
        raise ValueError(f"number of conversations must be 0 or more, got {n}")
    # A string seed is hashed with SHA-512 by Random, independent of PYTHONHASHSEED.
    return [draw_conversation(Random(f"decodegrid:{seed}:{index}")) for index in range(n)]
