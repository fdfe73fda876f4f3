"""Which layers do what: the layer schedule of a config by kind.

Data flow: model config -> ids of the target's layers by kind, in the order of their first layer.

Source: DeepSeek-V4.1-Flash tech report, CSA2 (sources, reuse, reindex).
"""

from enum import Enum

from decodegrid.graphs.model_config import ModelConfig


class LayerKind(Enum):
    """What a layer attends to beside its own window; the value is what reports print."""

    WINDOW = "window only"
    SOURCE = "full source"
    """Makes compressed entries and index keys, and chooses among them."""
    REUSE = "reuse"
    """Reads another layer's entries through another layer's choice."""
    REINDEX = "reindex"
    """Reads another layer's entries through its own choice."""


def layer_kind(config: ModelConfig, layer: int) -> LayerKind:
    """Kind of a target layer, 0 .. num_hidden_layers - 1."""
    if config.compress_ratios[layer] == 0:
        return LayerKind.WINDOW
    if layer in config.kv_source_layer_ids:
        return LayerKind.SOURCE
    return LayerKind.REINDEX if layer in config.index_source_layer_ids else LayerKind.REUSE


def layers_by_kind(config: ModelConfig) -> dict[LayerKind, list[int]]:
    """Ids of the target's layers by kind; kinds that do not occur have an empty list."""
    found: dict[LayerKind, list[int]] = {kind: [] for kind in LayerKind}
    for layer in range(config.num_hidden_layers):
        found[layer_kind(config, layer)].append(layer)
    return found
