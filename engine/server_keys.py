"""The API keys that may use the server.

Owns their file and the comparison, which takes the same time for any wrong key. Keys are kept as
digests only, and no message holds one.
"""

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_MAX_BYTES: Final = 2**20
"""Of a file of keys."""
_MIN_CHARS: Final = 16
"""Of a key: shorter ones can be guessed."""


class ApiKeys:
    """A set of keys; an empty one lets everybody in."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        self._digests = tuple(_digest(key) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accepts(self, headers: Mapping[str, str]) -> bool:
        """Whether a request's `Authorization: Bearer KEY` or `x-api-key` names one of them.

        headers: by name in lower case.
        """
        if not self._digests:
            return True
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        # Every key is compared, so that the time does not tell which one was near.
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(found)


def read_keys(path: Path | None) -> ApiKeys:
    """The keys of a file: one a line, empty lines and those that begin with # left out.

    None: nobody needs one. Raises OSError, and ValueError for what is no file (a pipe may never
    end) or a huge one, for a file that is not UTF-8 or has no key, and for a key that is too short
    or no word of printable ASCII, with its line's number.
    """
    if path is None:
        return ApiKeys()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file")
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ValueError(f"{path}: {size} bytes; at most {_MAX_BYTES} are read")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 at byte {error.start}") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < _MIN_CHARS:
            raise ValueError(f"{path}:{number}: a key needs at least {_MIN_CHARS} characters")
        if not all("!" <= char <= "~" for char in key):
            raise ValueError(f"{path}:{number}: a key is one word of printable ASCII characters")
        keys.append(key)
    if not keys:
        raise ValueError(f"{path}: no API key in it; server.api_keys_file may be empty instead")
    return ApiKeys(tuple(keys))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()
