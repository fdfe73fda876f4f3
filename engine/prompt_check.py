"""Refuses prompts before the start-up, which compiles and may take minutes.

Owns no rule: the refusals and their words are those of admission, with the limits that the
deployment will have. Needs the tokenizer and the deployment, and no torch unless `cache.pool_bytes`
sizes the pool, which depends on the model.
"""

from collections.abc import Sequence

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.admission import EngineLimits, build_request
from decodegrid.engine.grammar_compiler import check_grammar
from decodegrid.engine.request_error import RequestError
from decodegrid.engine.sampling_params import SamplingParams
from decodegrid.engine.tokenizer import ChatMessage, Tokenizer


def check_prompts(loaded: LoadedConfig, prompts: Sequence[str], params: SamplingParams) -> None:
    """Raise what LLM.generate would raise for these prompts.

    Raises RequestError, and ValueError or OSError for the checkpoint's tokenizer.json.
    """
    tokenizer = _tokenizer(loaded)
    for index, prompt in enumerate(prompts):
        try:
            _check(loaded, tokenizer, tokenizer.encode(prompt), params)
        except RequestError as error:
            where = f"prompt {index}: " if len(prompts) > 1 else ""
            raise RequestError(f"{where}{error}") from error


def check_conversation(
    loaded: LoadedConfig, messages: Sequence[ChatMessage], params: SamplingParams
) -> None:
    """The same for the conversation up to the next answer."""
    tokenizer = _tokenizer(loaded)
    _check(loaded, tokenizer, tokenizer.encode_chat(messages), params)


def _tokenizer(loaded: LoadedConfig) -> Tokenizer:
    if not loaded.checkpoint_dir.is_dir():
        raise ValueError(f"{loaded.checkpoint_dir}: no such checkpoint directory")
    return Tokenizer(loaded.checkpoint_dir / "tokenizer.json")


def _check(
    loaded: LoadedConfig, tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams
) -> None:
    build_request(
        "unsent",
        token_ids,
        params,
        seed=0,
        eos_token_id=tokenizer.eos_token_id,
        # That the tokenizer fits the model's vocabulary is for the start-up to say.
        limits=EngineLimits.of_deployment(loaded.config, tokenizer.vocab_size, _num_blocks(loaded)),
    )
    if params.structured_outputs is not None:
        check_grammar(params.structured_outputs.source)


def _num_blocks(loaded: LoadedConfig) -> int:
    """Blocks of the pool; with `cache.memory_fraction` the most that start-up may choose."""
    if not loaded.config.cache.pool_bytes:
        return loaded.config.num_blocks
    # Imported here: they import torch, which the other deployments do without.
    from decodegrid.engine.pool_size import resolve_num_blocks
    from decodegrid.graphs.checkpoint import read_checkpoint_config

    model = read_checkpoint_config(loaded.checkpoint_dir)
    return resolve_num_blocks(loaded.config, model, None)
