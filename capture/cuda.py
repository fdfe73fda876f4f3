"""Capture and replay on CUDA: the same step recorded into a torch.cuda.CUDAGraph.

Owns the side stream and the memory pool that all graphs share. Does not own compilation or the
order of captures. Data flow: a step is warmed up and then captured on one side stream; replays run
on the caller's stream. Its order of calls is tested against a stand-in;
nothing here has run on a card.
"""

from collections.abc import Hashable

import torch

from decodegrid.capture.backend import Step


class CudaGraph:
    """A captured step on CUDA."""

    __slots__ = ("_graph", "key")

    def __init__(self, key: Hashable, graph: torch.cuda.CUDAGraph) -> None:
        self.key = key
        self._graph = graph

    @property
    def num_nodes(self) -> int:
        """Always 0: counting them takes cuda-python (`decodegrid.capture.cuda_nodes`)."""
        return 0

    @property
    def raw_graph(self) -> int:
        """The cudaGraph_t that was captured, for cuda-python."""
        return self._graph.raw_cuda_graph()

    def replay(self) -> None:
        """Enqueue the graph on the current stream; does not wait for it."""
        self._graph.replay()


class CudaBackend:
    """Captures steps on one side stream into one shared pool; capture the largest key first.

    Args:
        device: the card that holds the static buffers.
        num_warmups: runs before each capture, on the capture stream, so that lazy set-up of
            libraries and kernels for these shapes is not recorded.

    Raises:
        RuntimeError: no CUDA device is available.
    """

    def __init__(self, device: torch.device, num_warmups: int = 2) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(f"capture on {device} needs a CUDA device; torch sees none")
        if num_warmups < 1:
            raise ValueError(f"num_warmups is {num_warmups}; at least 1 is needed before a capture")
        self._device = device
        self._num_warmups = num_warmups
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, key: Hashable, step: Step) -> CudaGraph:
        """Warm the step up and capture it; the warm-ups really write state, the capture does
        not."""
        # Kept beside what is instantiated from it, so that its nodes can be read.
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.device(self._device), torch.no_grad():
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for _ in range(self._num_warmups):
                    step()
            self._stream.synchronize()
            # Thread-local: other threads of the process may allocate while this one captures.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                step()
            graph.instantiate()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return CudaGraph(key, graph)
