"""Checks a prompt and its parameters against what the deployment can hold.

Owns every refusal of a request. Gives a Request that is certain to be served to its end when it is
alone on the device, so that the scheduler never has to fail one later.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from decodegrid.configs.schema import DeploymentConfig
from decodegrid.engine.grammar_matcher import RequestGrammar
from decodegrid.engine.request import Request
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.rich_params import RichParams
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
    has_rich: bool = True
    """Whether steps were captured that penalties, bias, logprobs and grammars need."""
    num_snapshots: int = 0
    """Windows that the device keeps for a prefix cache; 0 for no such cache."""
    keep_tokens: int = 0
    """Tokens that a bounded replay keeps in the decoder's layers; 0 for exact prefill."""

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
            num_snapshots=runner.num_snapshots,
            keep_tokens=runner.keep_tokens,
            has_rich=runner.has_rich,
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
            has_rich=config.grid.rich,
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
    _check_token_ids("logit_bias key", tuple(params.logit_bias or ()), limits.vocab_size)
    if params.structured_outputs is not None:
        trigger = params.structured_outputs.trigger_token_ids
        _check_token_ids("trigger token id", trigger, limits.vocab_size)
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
    rich = RichParams.of(params, eos_token_id)
    _check_rich(params, rich, max_seq_len - num_prompt, limits)
    num_needed = limits.num_blocks_for(max_seq_len)
    if num_needed >= limits.num_blocks:
        raise RequestError(
            f"{num_prompt} prompt tokens and {max_seq_len - num_prompt} output tokens need "
            f"{num_needed} cache blocks of {limits.block_size} tokens; "
            f"the pool has {limits.num_blocks - 1}"
        )
    request = Request(
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
        min_p=float(params.min_p),
        rich=rich,
    )
    if params.structured_outputs is not None:
        request.grammar = RequestGrammar(params.structured_outputs, eos_token_id)
    return request


def _check_rich(
    params: SamplingParams, rich: RichParams, num_left: int, limits: EngineLimits
) -> None:
    """Refuse what the deployment has no steps for, and a min_tokens that cannot be kept.

    num_left: tokens that the context leaves for the output.
    """
    others = ("prompt_logprobs", "structured_outputs")
    asked = [*rich.names, *(name for name in others if getattr(params, name) is not None)]
    if asked and not limits.has_rich:
        raise RequestError(
            f"{asked[0]} is not served by this deployment: it captures plain steps only "
            "(grid.rich = false)"
        )
    if params.prompt_logprobs is not None and limits.keep_tokens:
        raise RequestError(
            "prompt_logprobs is not served by this deployment: prefill.bounded_replay leaves the "
            f"decoder's layers out for all but the last {limits.keep_tokens} tokens"
        )
    if params.min_tokens > num_left:
        raise RequestError(
            f"min_tokens is {params.min_tokens}; the context of {limits.max_model_len} tokens "
            f"leaves room for {num_left} behind the prompt"
        )
    if params.min_tokens and len(rich.banned_token_ids) >= limits.vocab_size:
        raise RequestError(
            f"min_tokens is {params.min_tokens} and every token of the vocabulary is a stop token: "
            "none is left to choose"
        )


def _check_token_ids(what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise RequestError(f"{what} {index} must be an integer, got {token_id!r}")
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{what} {index} is {token_id}; the vocabulary has ids 0 to {vocab_size - 1}"
            )
