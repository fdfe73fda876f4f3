"""A live run for a profile: a few built-in requests through the engine's own scheduler.

Owns how the prompts of `decodegrid.engine.bench_prompts` are decoded and what is taken from the
counters. Data flow: ready runner and deployment -> LLM -> requests decoded to their ends ->
`LiveRun`: hits, pads and surplus tokens of each pair, drafts by position. The scheduler, the verify
budget and the loop are those of every other run.
"""

from collections.abc import Sequence

from decodegrid.capture.profile_document import GraphHits, LiveRun, PositionCounts
from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.bench_prompts import PromptSource, make_prompts
from decodegrid.engine.llm import LLM
from decodegrid.engine.pool_size import resolve_num_blocks
from decodegrid.engine.runner import Runner
from decodegrid.engine.runner_watch import make_watch
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.stats import EngineStats
from decodegrid.engine.surface_run import make_policy
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.graphs.checkpoint import read_checkpoint_config


def built_in_prompts(tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """Token ids of structured chats and stories in turns, the same at each call."""
    return make_prompts(PromptSource("mixed"), tokenizer, count, seed=0, context_len=None)


def live_params(
    loaded: LoadedConfig, prompts: Sequence[Sequence[int]], *, to_the_limit: bool = False
) -> list[SamplingParams]:
    """How each prompt is decoded: as the command line would, with seeds 0, 1, ...

    to_the_limit: until a request is as long as the deployment allows, past any end of text.
    Raises ValueError where a prompt leaves no room for a token.
    """
    config, limit = loaded.config, loaded.config.scheduler.max_model_len
    longest = max(map(len, prompts))
    if longest >= limit:
        raise ValueError(
            f"scheduler.max_model_len is {limit}; a built-in prompt of a live run has {longest} "
            f"tokens, so that at least {longest + 1} are needed"
        )
    wanted = limit if to_the_limit else config.sampling.max_tokens
    return [
        SamplingParams(
            temperature=config.sampling.temperature,
            max_tokens=min(wanted, limit - len(prompt)),
            seed=seed,
            top_p=config.sampling.top_p,
            top_k=config.sampling.top_k,
            ignore_eos=to_the_limit,
        )
        for seed, prompt in enumerate(prompts)
    ]


def check_live(loaded: LoadedConfig, tokenizer: Tokenizer, num_requests: int) -> None:
    """Raise ValueError, before the start-up, where a deployment cannot run so many prompts."""
    engine_type = loaded.config.scheduler.engine_type
    if engine_type != "normal":
        raise ValueError(
            f"scheduler.engine_type is {engine_type}; a live run needs normal, which both prefills "
            "and decodes"
        )
    prompts = built_in_prompts(tokenizer, num_requests)
    num_blocks = resolve_num_blocks(
        loaded.config, read_checkpoint_config(loaded.checkpoint_dir), None
    )
    limits = EngineLimits.of_deployment(loaded.config, tokenizer.vocab_size, num_blocks)
    for prompt, params in zip(prompts, live_params(loaded, prompts), strict=True):
        build_request(
            "unsent",
            list(prompt),
            params,
            seed=0,
            eos_token_id=tokenizer.eos_token_id,
            limits=limits,
        )


def live_llm(
    runner: Runner, loaded: LoadedConfig, tokenizer: Tokenizer, *, prompts_first: bool = False
) -> LLM:
    """An LLM of the deployment around a runner that is ready.

    prompts_first: prefill whatever waits before anything is decoded.
    """
    settings = loaded.config
    steps = settings.scheduler.decode_steps_per_prefill_chunk
    return LLM.from_runner(
        runner,
        tokenizer,
        decode_steps_per_prefill_chunk=0 if prompts_first else steps,
        policy=make_policy(runner, loaded),
        watch=make_watch(runner, loaded),
        async_scheduling=settings.has_step_in_flight,
        structured_outputs=settings.structured_outputs,
        engine_type=settings.scheduler.engine_type,
    )


def run_live(
    runner: Runner, loaded: LoadedConfig, tokenizer: Tokenizer, num_requests: int
) -> LiveRun:
    """Decode that many requests, queued at once, and count what happened. The runner stays open."""
    prompts = built_in_prompts(tokenizer, num_requests)
    with live_llm(runner, loaded, tokenizer) as llm:
        llm.generate(prompts, live_params(loaded, prompts))
        return live_facts(llm.stats, num_requests)


def live_facts(stats: EngineStats, num_requests: int) -> LiveRun:
    """What the counters of a run hold, in the document's form."""
    uses = stats.grid.trace().pairs if stats.num_decode_steps else {}
    return LiveRun(
        num_requests=num_requests,
        num_decode_steps=stats.num_decode_steps,
        num_emitted=stats.num_emitted,
        decode_seconds=stats.decode_seconds,
        graph_seconds=stats.graph_seconds,
        pad_row_share=stats.pad_row_share,
        surplus_token_share=stats.surplus_token_share,
        positions=PositionCounts(
            drafted=stats.drafted_per_position,
            offered=stats.offered_per_position,
            verified=stats.verified_per_position,
            accepted=stats.accepted_per_position,
            reached=stats.reached_per_position,
        ),
        hits=[
            GraphHits(
                num_reqs=key.num_reqs,
                num_query_tokens=key.num_query_tokens,
                replays=use.steps,
                pad_rows=use.pad_rows,
                surplus_tokens=use.surplus_tokens,
            )
            for key, use in uses.items()
        ],
    )
