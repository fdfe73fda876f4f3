"""The embedded tokenizer: special ids, lossless text, and the same ids through deepseek-recipe."""

import random

import deepseek_recipe as recipe
import pytest
from tokenizers import Tokenizer

from training.conversation import assistant, user
from training.render import render_full_pieces, render_prompt_pieces, to_recipe
from training.stories import Story, choose_prompt, is_plain, read_stories, render_story
from training.templates import generate
from training.train_tokenizer import train_tokenizer
from training.vocabulary import TOKENIZER_FILE, Vocabulary

BAR = "\uff5c"
EXPECTED_SPECIALS = {
    f"<{BAR}begin\u2581of\u2581sentence{BAR}>": 0,
    f"<{BAR}end\u2581of\u2581sentence{BAR}>": 1,
    f"<{BAR}\u2581pad\u2581{BAR}>": 2,
    f"<{BAR}User{BAR}>": 3,
    f"<{BAR}Assistant{BAR}>": 4,
    f"<{BAR}System{BAR}>": 5,
    "<think>": 6,
    "</think>": 7,
    f"{BAR}DSML{BAR}": 8,
    f"<{BAR}latest_reminder{BAR}>": 9,
    f"<{BAR}image{BAR}>": 10,
    f"<{BAR}noise{BAR}>": 2047,
}
TEXTS = (
    "",
    " ",
    "  two  spaces\t\ttabs\r\n\r\nlines\n \n",
    "It's 12,345.60 m\u00b2 \u2014 na\u00efve caf\u00e9 e\u0301",
    "\u4f60\u597d \u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f9d1\u200d\U0001f680\U0001f44d\U0001f3fd",
    "\x00\x01\x1f\x7f\u0085\u00a0\u2028\ufeff\ufffd\ue000",
    "def f(x):\n    return {'a': [1, 2.5e-3]}  # ok",
    "</think> <|User|> \uff5c\uff5c<\uff5c",
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.from_file()


@pytest.fixture(scope="module")
def encoding() -> recipe.DeepseekV41Encoding:
    tokenizer = recipe.Tokenizer.from_file(str(TOKENIZER_FILE))
    return recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)


def test_special_ids() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    assert tokenizer.get_vocab_size() == 2048
    added = {token.content: n for n, token in tokenizer.get_added_tokens_decoder().items()}
    assert added == EXPECTED_SPECIALS
    markup = [
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if not token.special
    ]
    assert sorted(markup) == sorted(["<think>", "</think>", f"{BAR}DSML{BAR}"])


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_round_trip_of_random_code_points() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    rng = random.Random(3)
    for limit in (0x80, 0x800, 0x10000, 0x110000):
        points = (rng.randrange(limit) for _ in range(3000))
        text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token() -> None:
    """All 256 byte tokens exist, so no text needs an unknown token."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    from_bytes = [n for n in range(2048) if len(tokenizer.id_to_token(n)) == 1]
    assert len(from_bytes) == 256


def test_digits_are_single_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FILE))
    tokens = tokenizer.encode("1234 + 56").tokens
    assert [t for t in tokens if t.isdigit()] == list("123456")


def test_recipe_and_tokenizers_agree(
    vocabulary: Vocabulary, encoding: recipe.DeepseekV41Encoding
) -> None:
    for conversation in generate(5, 120):
        turns, tools, as_json = (
            conversation.turns[:-1],
            conversation.tools,
            conversation.json_output,
        )
        expected = encoding.encode(to_recipe(turns, tools, as_json))
        rendered = render_prompt_pieces(turns, tools, as_json)
        assert vocabulary.encode(rendered) == expected
        # No templated text spells a special token, so the full vocabulary gives the same ids.
        assert vocabulary.full.encode(rendered.text).ids == expected


def test_document_is_prompt_and_answer(
    vocabulary: Vocabulary, encoding: recipe.DeepseekV41Encoding
) -> None:
    """What the model is trained on starts with the ids that it is asked with."""
    for conversation in generate(6, 60):
        c = conversation
        prompt = encoding.encode(to_recipe(c.turns[:-1], c.tools, c.json_output))
        full = vocabulary.encode(render_full_pieces(c.turns, c.tools, c.json_output))
        assert full[: len(prompt)] == prompt
        assert vocabulary.decode(full[len(prompt) : -1]) == c.turns[-1].content
        assert full[-1] == 1 and full.count(0) == 1


def test_typed_special_tokens_are_plain_text(
    vocabulary: Vocabulary, encoding: recipe.DeepseekV41Encoding
) -> None:
    text = " ".join(EXPECTED_SPECIALS)
    turns = [user(text)]
    ids = encoding.encode(to_recipe(turns))
    assert [n for n in ids if n in EXPECTED_SPECIALS.values()] == [0, 3, 4, 7]
    assert vocabulary.encode(render_prompt_pieces(turns)) == ids
    assert vocabulary.decode(ids[2:-2]) == text


def test_shortest_chat(vocabulary: Vocabulary) -> None:
    rendered = render_prompt_pieces([user("hi")])
    assert rendered.text == (
        f"<{BAR}begin\u2581of\u2581sentence{BAR}><{BAR}User{BAR}>hi<{BAR}Assistant{BAR}></think>"
    )
    ids = vocabulary.encode(rendered)
    assert (ids[:2], ids[-2:]) == ([0, 3], [4, 7])


def test_cut_story_has_no_end_token(vocabulary: Vocabulary) -> None:
    text = "One day a fox sang."
    for complete in (True, False):
        story = Story("Tell a story.", text, complete)
        ids = vocabulary.encode(render_story(story))
        assert (ids[-1] == 1) == complete
        assert ids.count(1) == int(complete)


def test_both_story_forms(vocabulary: Vocabulary) -> None:
    stories = read_stories()[:400]
    plain = [story for story in stories if is_plain(story)]
    assert 0.15 < len(plain) / len(stories) < 0.35
    for story in stories[:50]:
        ids = vocabulary.encode(render_story(story))
        assert (3 in ids) != is_plain(story)
        answer = [n for n, mark in zip(ids, vocabulary.mark_answers(ids), strict=True) if mark]
        assert vocabulary.decode([n for n in answer if n != 1]) == story.text


def test_story_prompts_are_reworded_with_their_facts() -> None:
    stories = [s for s in read_stories()[:1000] if "children's story" in s.prompt]
    prompts = [(s.prompt, choose_prompt(s)) for s in stories]
    reworded = [(old, new) for old, new in prompts if old != new]
    assert 0.3 < len(reworded) / len(prompts) < 0.5
    assert len({new.split(" about ")[0] for _, new in reworded}) == 5
    for old, new in reworded:
        assert all(word in old for word in new.split(" about ")[-1].strip(".").split()[:3]) or (
            new == "Tell me a story."
        )


def test_answer_marks(vocabulary: Vocabulary) -> None:
    turns = (user("hi"), assistant("Hello!"), user("bye"), assistant("Goodbye!"))
    ids = vocabulary.encode(render_full_pieces(turns))
    marked = [n for n, mark in zip(ids, vocabulary.mark_answers(ids), strict=True) if mark]
    assert vocabulary.decode(marked) == (
        f"Hello!<{BAR}end\u2581of\u2581sentence{BAR}>Goodbye!<{BAR}end\u2581of\u2581sentence{BAR}>"
    )


def test_answer_marks_skip_the_tool_preamble(vocabulary: Vocabulary) -> None:
    """The preamble mentions `</think>`; only the one that opens an answer counts."""
    conversation = next(c for c in generate(8, 200) if c.tools)
    ids = vocabulary.encode(render_full_pieces(conversation.turns, conversation.tools))
    marks = vocabulary.mark_answers(ids)
    first = marks.index(True)
    assert ids[first - 2 : first] == [4, 7]
    assert ids[:first].count(7) >= 2


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="2048 were asked for"):
        train_tokenizer(iter(["a b c"]))
