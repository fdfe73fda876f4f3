"""The step that a captured graph is held against: plain torch, region by region, nothing compiled.

Owns the plain form of every op, and rounding noise that may be added behind each region. The same
weights and static buffers are used as by the captured graphs. Data flow: model and buffers -> plain
regions -> `EagerSteps.run` of a captured key.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from decodegrid.capture.grid import StepVariant
from decodegrid.engine.runner import Runner
from decodegrid.engine.step_graphs import PrefillKey, StepKey, StepParts
from decodegrid.graphs.regions import RegionTable, build_regions, plain_regions
from decodegrid.kernels.filters import filter_logits, filter_logits_op
from decodegrid.kernels.providers.laid_out import PLAIN_OF_ANY
from decodegrid.kernels.sampling import (
    gumbel_noise,
    gumbel_noise_op,
    uniform_noise,
    uniform_noise_op,
)
from decodegrid.kernels.select_entries import select_entries, select_entries_op
from decodegrid.kernels.top_logits import top_logits, top_logits_op

PLAIN_FORMS: Mapping[object, Callable[..., Any]] = MappingProxyType(
    {
        filter_logits_op: filter_logits,
        gumbel_noise_op: gumbel_noise,
        select_entries_op: select_entries,
        top_logits_op: top_logits,
        uniform_noise_op: uniform_noise,
    }
)
"""Of the ops that regions call in every form: opaque to the compiler, native once installed."""

NAMESPACE = "decodegrid"


class PlainOps(TorchDispatchMode):
    """Runs the plain form of this project's ops, whatever is installed for them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        """Ops of this project so far."""

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Raise RuntimeError for an op of this project without a plain form."""
        plain = PLAIN_FORMS.get(func)
        if func.namespace != NAMESPACE:
            return func(*args, **(kwargs or {}))
        if plain is None:
            raise RuntimeError(f"op {func} has no plain form in {__name__}")
        self.num_calls += 1
        return plain(*args, **(kwargs or {}))


def with_plain_ops(function: Callable[..., None]) -> Callable[..., None]:
    """A region whose ops run in their plain forms."""
    # Looking at every op costs more than most ops. Which of them a region calls depends on no
    # value, so those of its first call say whether later ones have to be looked at.
    has_ops = True

    def call(*args: Any) -> None:
        nonlocal has_ops
        if not has_ops:
            function(*args)
            return
        with PlainOps() as mode:
            function(*args)
        has_ops = mode.num_calls > 0

    return call


class RoundingNoise:
    """Multiplies numbers by 1 + scale * u, u uniform in -1..1, as if each had been rounded.

    Args:
        scale: relative size of the noise.
        spared: tensors that are left as they are: those that share memory with one of these.
    """

    def __init__(self, scale: float, spared: Sequence[Tensor], seed: int) -> None:
        self._scale = scale
        self._spared = {tensor.untyped_storage().data_ptr() for tensor in spared}
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def disturb(self, value: object) -> None:
        """Add noise to a float tensor, or to each of a list."""
        if isinstance(value, list | tuple):
            for item in value:
                self.disturb(item)
            return
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        if value.untyped_storage().data_ptr() in self._spared:
            return
        device = value.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        noise = torch.rand(
            value.shape, generator=self._generators[device], device=device, dtype=value.dtype
        )
        value.mul_(1.0 + self._scale * (2.0 * noise - 1.0))

    def behind(
        self, function: Callable[..., None], run: Callable[..., None]
    ) -> Callable[..., None]:
        """A region that is followed by noise in what it has written; an op has none.

        function: whose arguments say by their names what is written. run: does its work.
        """
        if not isinstance(function, FunctionType):
            return run
        names = inspect.signature(function).parameters
        written = [i for i, name in enumerate(names) if name.endswith("_out") or name == "stream"]

        def call(*args: Any) -> None:
            run(*args)
            for index in written:
                self.disturb(args[index])

        return call


class EagerSteps:
    """The steps of a runner in plain torch, on its own weights, state and buffers.

    Args:
        runner: whose state the steps write.
        draft_temperatures: divisors of the confidence logits, one for each draft, as captured.
        noise: relative size of rounding noise behind every region; 0 adds none.
        seed: of the noise.
    """

    def __init__(
        self,
        runner: Runner,
        draft_temperatures: Sequence[float],
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        model = runner.model
        specs = build_regions(
            model.config, model.state.capacity, as_ops=False, kernels=PLAIN_OF_ANY
        )
        table = plain_regions(specs)
        calls = {name: with_plain_ops(call) for name, call in table.calls.items()}
        if noise:
            state = [tensor for _, tensor in model.state.tensors()]
            behind = RoundingNoise(noise, state, seed).behind
            calls = {name: behind(table.calls[name], call) for name, call in calls.items()}
        divisors = torch.tensor(
            list(draft_temperatures) or [1.0],
            dtype=model.state.slots.confidence.dtype,
            device=model.state.slots.confidence.device,
        )
        self._parts = StepParts(RegionTable(calls), model, runner.buffers, divisors)

    def run(self, key: PrefillKey | StepKey) -> None:
        """Run the step of a captured key on what the static inputs hold; a rich one in both halves,
        a report behind its chunk."""
        with torch.no_grad():
            for step in self._steps(key):
                step()

    def _steps(self, key: PrefillKey | StepKey) -> list[Callable[[], None]]:
        parts = self._parts
        if isinstance(key, PrefillKey):
            chunk = parts.prefill(PrefillKey(key.num_tokens))
            return [chunk] if key.variant is StepVariant.FUSED else [chunk, parts.prefill(key)]
        if key.variant is StepVariant.FUSED:
            return [parts.fused(key)]
        return list(parts.rich(key))
