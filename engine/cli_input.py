"""Text that comes in as bytes: UTF-8, with or without a byte order mark.

Owns the decoding of prompt files and of standard input, and the words that refuse other bytes.
"""

from decodegrid.engine.request_error import RequestError

STANDARD_INPUT = "standard input"


def decode_utf8(name: str, data: bytes, offset: int = 0) -> str:
    """Text of bytes that stand at byte `offset` of the input `name`.

    A byte order mark at the start of the input is dropped. Raises RequestError with the position,
    counted from the start of the input, of the first byte that is not UTF-8.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 at byte {offset + error.start}") from error
    return text if offset else text.removeprefix("\ufeff")
