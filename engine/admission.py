"""Checks a prompt and its parameters against what the deployment can hold.

Owns every refusal of a request. Gives a Request that is certain to be served to its end when it is
alone on the device, so that the scheduler never has to fail one later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.request import Request
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.runner_protocol import StepRunner
from decodegrid.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The sizes of the device that requests and schedules are checked against."""

    num_draft_tokens: int
    max_num_reqs: int
    max_model_len: int
    block_size: int
    """Tokens a block covers."""
    num_blocks: int
    """Blocks of the pool, the null block included."""
    prefill_chunk_size: int
    """Prompt tokens a prefill step computes at most."""
    vocab_size: int

    @classmethod
    def of(cls, runner: StepRunner) -> "EngineLimits":
        return cls(
            num_draft_tokens=runner.num_draft_tokens,
            max_num_reqs=runner.max_num_reqs,
            max_model_len=runner.max_model_len,
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            prefill_chunk_size=runner.prefill_chunk_sizes[-1],
            vocab_size=runner.vocab_size,
        )

    @classmethod
    def of_deployment(
        cls, config: DeploymentConfig, vocab_size: int, num_blocks: int
    ) -> "EngineLimits":
        """The limits of a runner that is not built yet.

        num_blocks: the pool's, or the most it can get where start-up decides; what is too large
        for the pool is then refused after the start.
        """
        return cls(
            num_draft_tokens=config.speculation.num_draft_tokens,
            max_num_reqs=config.scheduler.max_num_reqs,
            max_model_len=config.scheduler.max_model_len,
            block_size=config.cache.block_size,
            num_blocks=num_blocks,
            prefill_chunk_size=config.scheduler.prefill_chunk_sizes[-1],
            vocab_size=vocab_size,
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that cover num_tokens positions."""
        return -(-num_tokens // self.block_size)


def build_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    seed: int,
    eos_token_id: int,
    limits: EngineLimits,
) -> Request:
    """Check and build a request.

    The output ends at max_tokens or at the context limit, whichever comes first. Raises
    RequestError with the value and the limit.
    """
    _check_token_ids("prompt token id", prompt_token_ids, limits.vocab_size)
    _check_token_ids("stop token id", params.stop_token_ids, limits.vocab_size)
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("the prompt is empty; it needs at least 1 token")
    if num_prompt >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; the context of {limits.max_model_len} tokens "
            f"leaves room for a prompt of at most {limits.max_model_len - 1}"
        )
    eos_ids = () if params.ignore_eos else (eos_token_id,)
    stop_token_ids = tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids)))
    max_drafts = params.max_drafts
    if max_drafts is not None and max_drafts > limits.num_draft_tokens:
        raise RequestError(
            f"speculation is {max_drafts} drafts; the deployment makes {limits.num_draft_tokens} "
            "(speculation.num_draft_tokens)"
        )
    max_seq_len = limits.max_model_len
    if params.max_tokens is not None:
        max_seq_len = min(max_seq_len, num_prompt + params.max_tokens)
    num_needed = limits.num_blocks_for(max_seq_len)
    if num_needed >= limits.num_blocks:
        raise RequestError(
            f"{num_prompt} prompt tokens and {max_seq_len - num_prompt} output tokens need "
            f"{num_needed} cache blocks of {limits.block_size} tokens; "
            f"the pool has {limits.num_blocks - 1}"
        )
    return Request(
        request_id,
        prompt_token_ids,
        max_seq_len=max_seq_len,
        temperature=float(params.temperature),
        seed=seed,
        stop_token_ids=stop_token_ids,
        eos_token_id=None if params.ignore_eos else eos_token_id,
        top_p=float(params.top_p),
        top_k=params.top_k,
        max_drafts=max_drafts,
    )


def _check_token_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise RequestError(f"{what} {index} must be an integer, got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{what} {index} is {token_id}; the vocabulary has ids 0 to {vocab_size - 1}"
            )
