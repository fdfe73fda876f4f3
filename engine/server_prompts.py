"""Several prompts of one request.

Owns their names in the engine and the order in which their pieces come together. Data flow: a
stream for each prompt -> one stream, whose pieces say which prompt they are of.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from decodegrid.engine.request_output import StreamOutput


def prompt_names(request_id: str, num_prompts: int) -> tuple[str, ...]:
    """The engine's names of a request's prompts; a single one has the request's."""
    if num_prompts == 1:
        return (request_id,)
    return tuple(f"{request_id}-{index}" for index in range(num_prompts))


def merge_pieces(
    streams: Sequence[AsyncGenerator[StreamOutput, None]],
) -> AsyncGenerator[StreamOutput, None]:
    """The pieces of all streams as they come; `index` is the place of the stream.

    Raises what one of them raises. Closing it closes them all.
    """
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(
    streams: Sequence[AsyncGenerator[StreamOutput, None]],
) -> AsyncGenerator[StreamOutput, None]:
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                piece = task.result()
                if piece.output is None:
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
                yield replace(piece, index=index)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
