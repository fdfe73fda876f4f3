"""What `decodegrid config check` finds, all of it: refusals, doubts, and what it cannot see.

Owns which rule is asked when, and what a missing part of the world means. The rules are those of
start-up (engine/deployment_check.py), whose first refusal is the first one here. Where the
deployment is for another machine, what this one lacks - a GPU, the checkpoint, a package - is no
refusal but a line of `not_checked`.

Data flow: deployment, and a config.json in the checkpoint's place if one is given -> `Findings`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from decodegrid.configs.load import LoadedConfig
from decodegrid.engine.compute_dtypes import DTYPES
from decodegrid.engine.cubin_folder import check_cubins
from decodegrid.engine.deployment_check import (
    MODEL_RULES,
    capacity_of,
    check_caches,
    check_device,
    check_package,
    check_package_backend,
    check_processes,
    check_surface_room,
    weight_form,
)
from decodegrid.engine.pool_size import resolve_num_blocks
from decodegrid.engine.server_keys import read_keys
from decodegrid.engine.terminal_text import one_line
from decodegrid.engine.tokenizer import Tokenizer
from decodegrid.engine.unused_settings import unused_settings
from decodegrid.graphs.checkpoint import (
    check_form,
    inspect_checkpoint,
    read_checkpoint_config,
)
from decodegrid.graphs.checkpoint_files import INDEX_FILE, SINGLE_FILE, read_json_object
from decodegrid.graphs.checkpoint_inventory import MAX_TENSORS, num_tensors_bound
from decodegrid.graphs.checkpoint_names import FLOAT_DTYPES
from decodegrid.graphs.model import is_wide_parameter
from decodegrid.graphs.model_config import ModelConfig, parse_model_config

Result = TypeVar("Result")


@dataclass(slots=True)
class Findings:
    """Everything that was found, a line each."""

    too_early: list[str] = field(default_factory=list)
    """What a start of this version refuses, and a later one may take."""
    refused: list[str] = field(default_factory=list)
    """What start-up refuses on every machine; without any, the plan can be made."""
    refused_here: list[str] = field(default_factory=list)
    """What start-up refuses on this machine, or on a device of the given size."""
    warnings: list[str] = field(default_factory=list)
    """What starts, and is hardly meant so."""
    not_checked: list[str] = field(default_factory=list)
    """What this machine lacks to tell."""
    model: ModelConfig | None = None
    """None where no config.json could be read."""
    model_source: str = ""
    """The config.json that it comes from."""
    has_narrow_floats: bool | None = None
    """Whether every float matrix of the checkpoint is known to be bfloat16; None: not known."""

    @property
    def problems(self) -> list[str]:
        """All refusals, in the order in which start-up would meet them."""
        return [*self.too_early, *self.refused, *self.refused_here]

    def result(self, rule: Callable[[], Result], into: list[str]) -> Result | None:
        """What a rule returns; what it raises becomes a line, once, and None is returned."""
        try:
            return rule()
        except (ValueError, OSError) as error:
            line = one_line(error)
            if line not in into:
                into.append(line)
            return None

    def attempt(self, rule: Callable[[], None], into: list[str]) -> bool:
        """Ask a rule that only raises. Returns whether it raised nothing."""

        def asked() -> bool:
            rule()
            return True

        return self.result(asked, into) is not None


def find_all(loaded: LoadedConfig, model_config: Path | None, *, is_elsewhere: bool) -> Findings:
    """Ask every rule.

    model_config: a config.json to take for the checkpoint's, whose directory is then not looked
    at. is_elsewhere: the deployment is for another machine than this one; a deployment for CUDA is,
    where this one has no GPU.
    """
    found = Findings()
    config = loaded.config
    lacks_gpu = config.model.device == "cuda" and not torch.cuda.is_available()
    is_elsewhere = is_elsewhere or lacks_gpu or model_config is not None
    found.attempt(lambda: check_processes(config), found.too_early)
    _read_model(found, loaded, model_config, is_elsewhere)
    if found.model is not None:
        _ask_model_rules(found, loaded, found.model)
    found.attempt(lambda: check_surface_room(config), found.refused)
    found.attempt(lambda: check_package_backend(loaded), found.refused)
    if lacks_gpu:
        found.attempt(lambda: check_device(config), found.not_checked)
    if found.model is not None:
        _ask_package(found, loaded, found.model, is_elsewhere)
        _ask_checkpoint(found, loaded, found.model, model_config is not None, is_elsewhere)
    if not is_elsewhere:
        found.attempt(lambda: check_cubins(loaded), found.refused_here)
        found.attempt(lambda: check_caches(loaded), found.refused_here)
    _ask_keys(found, loaded)
    found.warnings += unused_settings(loaded)
    return found


def _read_model(
    found: Findings, loaded: LoadedConfig, model_config: Path | None, is_elsewhere: bool
) -> None:
    path = model_config or loaded.checkpoint_dir / "config.json"
    if model_config is None and is_elsewhere and not path.is_file():
        found.not_checked.append(
            f"{loaded.checkpoint_dir}: no checkpoint here: what depends on the model, sizes among "
            "it (--model-config FILE takes its config.json from elsewhere)"
        )
        return

    def read() -> None:
        if model_config is None:
            model = read_checkpoint_config(loaded.checkpoint_dir)
        else:
            model = _parse(model_config)
        found.model, found.model_source = model, str(path)

    found.attempt(read, found.refused)


def _parse(path: Path) -> ModelConfig:
    try:
        return parse_model_config(read_json_object(path))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _ask_model_rules(found: Findings, loaded: LoadedConfig, model: ModelConfig) -> None:
    config = loaded.config
    sized = found.result(partial(resolve_num_blocks, config, model, None), found.refused)
    # The other rules do not look at the pool.
    capacity = capacity_of(config, config.num_blocks if sized is None else sized)
    for rule in MODEL_RULES:
        found.attempt(partial(rule, model, capacity), found.refused)
    found.attempt(partial(_check_shares, model, config.parallel.expert), found.refused)


def _check_shares(model: ModelConfig, num_processes: int) -> None:
    """Experts are divided in equal shares."""
    counts = {"n_routed_experts": model.n_routed_experts}
    if model.num_nextn_predict_layers:
        counts["dspark_n_routed_experts"] = model.dspark_n_routed_experts
    for name, count in counts.items():
        if count % num_processes:
            raise ValueError(
                f"parallel.expert is {num_processes}; it must divide the checkpoint's {name}, "
                f"which is {count}"
            )


def _ask_package(
    found: Findings, loaded: LoadedConfig, model: ModelConfig, is_elsewhere: bool
) -> None:
    package = loaded.package_dir
    if package is None or loaded.config.compile.backend != "inductor":
        return
    if is_elsewhere and not package.is_dir():
        found.not_checked.append(f"{package}: no package here: whether it is of this deployment")
        return
    found.attempt(lambda: check_package(loaded, model), found.refused_here)


def _ask_checkpoint(
    found: Findings,
    loaded: LoadedConfig,
    model: ModelConfig,
    is_given: bool,
    is_elsewhere: bool,
) -> None:
    """Tokenizer and tensors; is_given: the config.json is not the checkpoint's own."""
    directory, settings = loaded.checkpoint_dir, loaded.config.model
    form = weight_form(loaded.config, model)
    if form != "expanded" and not model.quantized:
        what = "but the checkpoint is stored as floats; must be 'expanded'"
        found.refused.append(f"{directory}: weights is {form!r}, {what}")
    found.has_narrow_floats = True if model.quantized else None
    tokenizer = directory / "tokenizer.json"
    missing = [] if tokenizer.is_file() and not is_given else ["tokenizer"]
    has_tensors = any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    missing += [] if has_tensors and not is_given else ["tensors"]
    if is_elsewhere and missing:
        found.not_checked.append(f"{directory}: {' and '.join(missing)} of the checkpoint")
    if is_elsewhere and "tensors" in missing:
        # Otherwise the tensors that are there bound what is made of config.json.
        found.attempt(partial(_check_bound, model, found.model_source), found.refused)

    def check_tokenizer() -> None:
        Tokenizer(tokenizer).check_vocabulary(model.vocab_size)

    def check_tensors() -> None:
        checked = inspect_checkpoint(directory)
        dtype = DTYPES[settings.dtype]
        check_form(checked, settings.device, dtype, form, settings.engram_tables)
        if not model.quantized:
            found.has_narrow_floats = all(
                FLOAT_DTYPES[stored.dtype] == torch.bfloat16
                for name, stored in checked.stored.items()
                if len(stored.shape) > 1 and not is_wide_parameter(name)
            )

    for part, rule in (("tokenizer", check_tokenizer), ("tensors", check_tensors)):
        if is_elsewhere and part in missing:
            continue
        is_fine = found.attempt(rule, found.refused)
        if part == "tokenizer" and not is_fine:
            return  # the check of the tensors reads the same file and would say it again


def _check_bound(model: ModelConfig, source: str) -> None:
    bound = num_tensors_bound(model, None)
    if bound > MAX_TENSORS:
        raise ValueError(f"{source}: asks for up to {bound:,} tensors, above {MAX_TENSORS:,}")


def _ask_keys(found: Findings, loaded: LoadedConfig) -> None:
    path = loaded.api_keys_path
    if path is None:
        return
    if not path.exists():
        # Secrets are seldom where a deployment is checked, and only `serve` reads them.
        found.warnings.append(f"{path}: no such file; serve needs it (server.api_keys_file)")
        return
    found.result(lambda: read_keys(path), found.refused_here)
