"""The committed story corpus as documents.

Owns: reading `corpus/teacher_stories.jsonl.gz` and the choice between chat and plain text. Does not
own: the prompt format (`render`) or the split (`data`). Data flow: file -> `Story` -> `Rendered`.
"""

import gzip
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from training.conversation import assistant, user
from training.render import Rendered, render_full_pieces, render_plain

CORPUS = Path(__file__).parent / "corpus" / "teacher_stories.jsonl.gz"
PLAIN_SHARE = 0.28
"""Share of stories (not of tips) that stand after the begin-of-sentence token without a frame."""
REWORDED_SHARE = 0.4
"""Share of story prompts that are put in other words; the corpus has one wording for all."""

_STORY_PROMPT = re.compile(
    r"Write a short children's story (?:about|in which) (?P<who>an? \w+ \w+) (?:who )?"
    r"(?P<does>finds|loses|shares) (?P<what>.+?)(?: with a friend)? "
    r"(?:near|at|by) (?P<where>the .+)\."
)
_REWORDINGS = (
    "Tell me a story about {who}.",
    "Tell me a story about {who} and {what}.",
    "Write a story about {who} who {does} {what}.",
    "Write a short story about {who}.",
    "A story about {who} near {where}, please.",
    "Tell me a story.",
)


@dataclass(frozen=True, slots=True)
class Story:
    """One record of the corpus; `complete` is false where the length limit cut the text."""

    prompt: str
    text: str
    complete: bool


def hash_share(text: str, salt: str) -> float:
    """A stable number in [0, 1) that depends on the text and the salt alone."""
    digest = hashlib.sha256(f"{salt}:{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def read_stories(path: Path = CORPUS) -> list[Story]:
    """All records, in file order.

    Raises:
        ValueError: a line lacks a field; the message has file and line.
    """
    stories = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            record = json.loads(line)
            missing = {"prompt", "text", "complete"} - record.keys()
            if missing:
                raise ValueError(f"{path}:{number}: missing field {sorted(missing)[0]!r}")
            stories.append(Story(record["prompt"], record["text"], record["complete"]))
    return stories


def is_plain(story: Story) -> bool:
    """Whether this record is a story that stands without a chat frame."""
    is_story = _STORY_PROMPT.fullmatch(story.prompt) is not None
    return is_story and hash_share(story.text, "plain") < PLAIN_SHARE


def choose_prompt(story: Story) -> str:
    """What the user says in a chat: the record's prompt or a shorter one with its facts."""
    match = _STORY_PROMPT.fullmatch(story.prompt)
    share = hash_share(story.text, "reworded") / REWORDED_SHARE
    if match is None or share >= 1:
        return story.prompt
    return _REWORDINGS[int(share * len(_REWORDINGS))].format(**match.groupdict())


def render_story(story: Story) -> Rendered:
    """The story as a document; a cut one has no end-of-sentence token."""
    if is_plain(story):
        return render_plain(story.text, story.complete)
    turns = (user(choose_prompt(story)), assistant(story.text))
    return render_full_pieces(turns, complete=story.complete)
