"""Host time: the loop runs on a real runner whose graphs do nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.host_time import EMITTED_PER_STEP, PROMPT_LEN, hollow_runner, host_seconds
from decodegrid.configs.load import load_config
from decodegrid.engine.build import build_runner
from decodegrid.engine.runner_protocol import LaunchedStep
from decodegrid.graphs.checkpoint import save_model


def test_the_loop_runs_to_the_end_of_every_text(
    make_model: Callable[..., Any],
    make_raw: Callable[..., dict[str, Any]],
    tmp_path: Path,
    native_kernels: Path,
) -> None:
    changes = {"hc_sinkhorn_iters": 2}  # cheap to trace
    model = make_model(dtype=torch.float32, **changes)
    save_model(model, tmp_path / "model", torch.float32, make_raw(**changes))
    (tmp_path / "x.yaml").write_text(
        "model: {checkpoint: model}\n"
        f"scheduler: {{max_num_reqs: 2, max_model_len: {PROMPT_LEN + 34}}}\n"
        "cache: {block_size: 4}\n"
        "speculation: {num_draft_tokens: 2, verify_tokens: all}\n"
        "compile: {backend: eager, cache_dir: cache, progress: false}\n"
    )
    runner = build_runner(load_config(tmp_path / "x.yaml", []))
    hollow = hollow_runner(runner)
    launched: list[tuple[tuple[int, ...], int]] = []
    launch = hollow.launch

    def watched(slots: Sequence[int], num_query_tokens: int) -> LaunchedStep:
        launched.append((tuple(slots), num_query_tokens))
        return launch(slots, num_query_tokens)

    hollow.launch = watched  # type: ignore[method-assign]
    assert host_seconds(hollow, 2, 10) > 0.0
    # Texts of 30 tokens: 3 in a step with all drafts, 1 in the steps that a text begins in.
    assert 29 // EMITTED_PER_STEP < len(launched) < 2 * 30 // EMITTED_PER_STEP
    assert {((1,), 1), ((1,), 3), ((1, 2), 4), ((1, 2), 6)} <= set(launched)
    assert hollow.grid.keys == runner.grid.keys
