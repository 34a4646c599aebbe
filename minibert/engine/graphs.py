"""All layers by one launch: CUDA graphs, for batches so small that a GPU would wait for Python.

A graph (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs) repeats recorded kernels at the same
addresses. So tokens and boundaries are copied into tensors of a few round sizes, a graph for each, and the numbers of
sequences and their lengths are data: spare tokens are a sequence of their own, spare sequences are empty.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minibert.engine.layers import begin_like, is_watched
from minibert.model.encoder import BertEncoder
from minibert.model.packing import Packing, is_tracing

logger = logging.getLogger("minibert")

LARGEST = 2048  # tokens; the products of more take longer than their launches
GRAPHS = 64  # of one model; each keeps its launches, its input and its result
WARM_UPS = 3  # as the page above has it: nothing may be set up for the first time while a graph is recorded
Layers = Callable[[Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """What is fixed in a graph."""

    tokens: int
    sequences: int
    longest: int


class Graph(NamedTuple):
    """Recorded launches, and the tensors that they read and write."""

    launch: Callable[[], None]
    hidden_states: Tensor
    boundaries: Tensor
    result: Tensor


class Recorder:
    """Makes graphs on one stream and with one memory for what lies between the layers, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, layers: Layers, hidden_states: Tensor, boundaries: Tensor) -> Graph:
        """What `layers` does with these two, recorded."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UPS):
                layers(hidden_states, boundaries)
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with their work on the GPU meanwhile.
        with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
            result = layers(hidden_states, boundaries)
        return Graph(graph.replay, hidden_states, boundaries, result)


class GraphedEncoder(BertEncoder):
    """The stack of layers, with attention "varlen"; what a graph cannot do, or fails to, goes the usual way.

    A shape is recorded when it is met for the second time, since that takes as long as several runs. Can be called from
    several threads.
    """

    def __init__(self, plain: BertEncoder) -> None:
        begin_like(self, plain)
        self.layer = plain.layer
        self._parts = list(self.layer.modules())
        self._lock = threading.Lock()
        self._is_able = True
        self._graphs: OrderedDict[Shape, Graph | None] = OrderedDict()  # None: met once; the last used is the last
        self._recorder: Recorder | None = None

    def forward(
        self, hidden_states: Tensor, packing: Packing, need_weights: bool = False, need_states: bool = False
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """As in `BertEncoder`."""
        if not (need_weights or need_states) and self._fits(hidden_states, packing):
            with self._lock:
                result = self._by_graph(hidden_states, packing)
            if result is not None:
                return result, [], []
        return super().forward(hidden_states, packing, need_weights, need_states)

    def _fits(self, hidden_states: Tensor, packing: Packing) -> bool:
        """Whether a graph would do the same: nobody watches the layers, or wants gradients or other attention."""
        return (
            self._is_able
            and 0 < len(hidden_states) <= LARGEST
            and packing.mask is None
            and not hidden_states.requires_grad
            and not is_tracing()
            and not torch.is_autocast_enabled(hidden_states.device.type)
            and _is_on_default_stream(hidden_states.device)
            and all(_can_be_recorded(module) for module in self._parts)
        )

    def _by_graph(self, hidden_states: Tensor, packing: Packing) -> Tensor | None:
        """The last hidden states (T, C), by the graph of their shape; None if there is none."""
        lengths = packing.every_length
        shape = shape_of(lengths)
        if shape not in self._graphs:
            self._graphs[shape] = None
            if len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
            return None
        try:
            graph = self._graphs[shape] or self._record(shape, hidden_states)
        except RuntimeError as error:
            logger.warning("CUDA graphs are left out, small batches take longer: %s", error)
            self._is_able = False
            self._graphs.clear()
            return None
        self._graphs[shape] = graph
        self._graphs.move_to_end(shape)
        graph.hidden_states[: len(hidden_states)].copy_(hidden_states)
        graph.boundaries.copy_(boundaries_of(lengths, shape))
        graph.launch()
        return graph.result[: len(hidden_states)].clone()  # the next launch writes where this one wrote

    def _record(self, shape: Shape, like: Tensor) -> Graph:
        run = super().forward

        def layers(hidden_states: Tensor, boundaries: Tensor) -> Tensor:
            return run(hidden_states, Packing.from_boundaries(boundaries, shape.tokens, shape.longest))[0]

        # No tensors of inference mode, which could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if self._recorder is None:
                self._recorder = Recorder(like.device)
            hidden_states = like.new_zeros(shape.tokens, like.shape[1])
            boundaries = boundaries_of([shape.tokens], shape).to(like.device)
            return self._recorder(layers, hidden_states, boundaries)


def shape_of(lengths: Sequence[int]) -> Shape:
    """The shape for sequences of these lengths: up to a quarter more tokens, and powers of two.

    There is room for the spare tokens, as one more sequence.
    """
    tokens = sum(lengths)
    step = max(16, 1 << max(0, (tokens - 1).bit_length() - 3))
    rounded = -(-tokens // step) * step
    return Shape(rounded, power_of_two(len(lengths) + 1), power_of_two(max(*lengths, rounded - tokens)))


def boundaries_of(lengths: Sequence[int], shape: Shape) -> Tensor:
    """(shape.sequences + 1,) int32 on the CPU: where each sequence begins, then the spare tokens, then empty ones."""
    starts = [0, *accumulate(lengths)]
    return torch.tensor(starts + [shape.tokens] * (shape.sequences + 1 - len(starts)), dtype=torch.int32)


def power_of_two(number: int) -> int:
    """The first that is no less."""
    return 1 << (number - 1).bit_length()


def _can_be_recorded(module: nn.Module) -> bool:
    """Whether its work is launches alone: what listens to it would not be called by a graph."""
    return not is_watched(module) and vars(module).get("attn_implementation", "varlen") == "varlen"


def _is_on_default_stream(device: torch.device) -> bool:
    """Graphs share memory, so all of them run on one stream; one that records something itself is another."""
    return device.type != "cuda" or torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
