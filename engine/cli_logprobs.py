"""Log-probabilities as lines of text, one a token.

Owns the form: logprob, rank, the token, and the most probable tokens at its place. Tokens stand in
quotes with everything that does not print escaped; one without a text of its own by its id.
"""

from collections.abc import Iterator, Sequence

from decodegrid.engine.logprobs import Logprob, TokenLogprobs
from decodegrid.engine.request_output import RequestOutput
from decodegrid.engine.terminal_text import printable


def logprob_lines(output: RequestOutput) -> Iterator[str]:
    """What a result holds of them, prompt first; nothing where none were asked for."""
    if output.prompt_logprobs is not None:
        yield "-- logprobs of the prompt"
        yield from _lines(output.prompt_logprobs)
    for completion in output.outputs:
        if completion.logprobs is not None:
            yield f"-- logprobs (sum {completion.cumulative_logprob:.4f})"
            yield from _lines(completion.logprobs)


def _lines(tokens: Sequence[TokenLogprobs | None]) -> Iterator[str]:
    for entries in tokens:
        if entries is None:
            continue
        token_id, own = next(iter(entries.items()))
        rank = "" if own.rank is None else f"#{own.rank}"
        line = f"{own.logprob:10.4f} {rank:>4}  {_name(token_id, own)}"
        others = [
            f"{_name(other_id, entry)} {entry.logprob:.4f}"
            for other_id, entry in entries.items()
            if other_id != token_id
        ]
        yield line + (f"   others: {', '.join(others)}" if others else "")


def _name(token_id: int, entry: Logprob) -> str:
    return f'"{printable(entry.decoded_token)}"' if entry.decoded_token else f"id {token_id}"
