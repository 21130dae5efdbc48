"""Replay a pass, and the update of the weights, from CUDA graphs: one launch in place of thousands.

A graph repeats its kernels on the memory that they used when it was recorded. So each shape of micro-batch has a graph
and fixed inputs of its own, which the next micro-batch of this shape is copied into. Gradients are set to 0 and not
freed, so that they keep their places. One more graph checks and clips the gradients, steps, and sets them to 0. All
graphs share one pool of memory, because they are replayed one after another.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.environment import within
from fabric_ladder.techniques.kahan import Kahan

RATE = torch.float32  # the type in which CUDA's fused kernels read a learning rate from memory
MOST = 32  # graphs; each takes some MB of GPU memory for its thousands of kernels

Pass = Callable[[MicroBatch], tuple[Tensor, Tensor]]  # returns the loss and the number of right predictions


class CudaRecorder:
    """Records what a function launches on a GPU, without running it."""

    def __init__(self):
        self._pool = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the work on the same memory."""
        graph = torch.cuda.CUDAGraph()
        try:  # other threads, such as the loader's, may pin memory meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            hides = "due to a previous error during capture" in str(error)
            raise (hides and error.__context__) or error from None
        self._pool = graph.pool()
        return graph.replay


class _Recorded(NamedTuple):
    """A pass of one shape, and the tensors that it reads and writes."""

    micro_batch: MicroBatch
    results: tuple[Tensor, Tensor]
    replay: Callable[[], None]

    def run(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        for name, fixed in self.micro_batch.inputs.items():
            fixed.copy_(micro_batch.inputs[name], non_blocking=True)
        self.micro_batch.weight.fill_(micro_batch.weight)
        self.replay()
        return tuple(result.clone() for result in self.results)


class _Update(NamedTuple):
    """A recorded update of the weights; it reads the learning rate from a tensor, since a number would stay."""

    rate: Tensor
    broken: Tensor
    replay: Callable[[], None]

    def run(self, optimizer: Optimizer) -> Tensor:
        self.rate.fill_(optimizer.param_groups[0]["lr"])  # all groups have the same
        self.replay()
        return self.broken.clone()


class Graphs:
    """The recorded passes and the recorded update of a training.

    The first micro-batch of a shape runs without a graph: it prepares libraries and creates gradients outside of the
    pool. The second is recorded. Of too many graphs, the one that was not used for the longest time is dropped.

    Args:
        device: Where the passes run.

    Attributes:
        passes: All passes so far.
        replayed: Those from a graph.
        recorded: Graphs that were recorded, with that of the update.
        seconds: Spent on recording them.
    """

    def __init__(self, device: torch.device):
        self.device, self.recorded, self.seconds = device, 0, 0.0
        self.passes = self.replayed = 0
        self._recorder = CudaRecorder()
        self._known: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._seen: dict[Hashable, tuple[Tensor, Tensor]] = {}  # places for the results, outside of the pool
        self._update: _Update | None = None

    def run(self, work: Pass, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Run a pass, from its graph if there is one, and return the loss and the number of right predictions."""
        self.passes += 1
        key = micro_batch.masked, *((name, each.shape, each.dtype) for name, each in micro_batch.inputs.items())
        if key not in self._seen:
            results = work(micro_batch)
            self._seen[key] = tuple(map(torch.empty_like, results))
            return results
        if key not in self._known:
            self._known[key] = self._record(work, micro_batch, self._seen[key])
            if len(self._known) > MOST:
                del self._seen[self._known.popitem(last=False)[0]]
        self._known.move_to_end(key)
        self.replayed += 1
        return self._known[key].run(micro_batch)

    def update(self, work: Callable[[], Tensor], optimizer: Optimizer) -> Tensor:
        """Update the weights, from a graph if it can be recorded, and return whether a gradient was not finite.

        An update that makes state of the optimizer, as the first one does, runs without a graph.

        Args:
            work: The update; returns a boolean on the device.
            optimizer: As set up by Fabric. Only a fused step reads its rate on the device.
        """
        if not _is_recordable(optimizer):
            return work()
        stepped = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
        if not all(optimizer.state.get(weight) for weight in stepped):
            self._update = None
            rounded = torch.tensor(optimizer.param_groups[0]["lr"], dtype=RATE).item()  # as a recorded step reads it
            with _replaced(optimizer, lr=rounded):
                return work()
        if self._update is None:
            self._update = self._record_update(work, optimizer)
        return self._update.run(optimizer)

    def describe(self) -> str:
        """Return a line about the graphs of the training."""
        share = f"{self.replayed / max(self.passes, 1):.0%} of the passes"
        return f"CUDA graphs: {self.recorded} recorded in {self.seconds:.1f} s, {share} replayed"

    def forget(self) -> None:
        """Drop all graphs and their memory."""
        self._update = None
        self._recorder = CudaRecorder()
        self._known.clear()
        self._seen.clear()

    def _record(self, work: Pass, micro_batch: MicroBatch, results: tuple[Tensor, Tensor]) -> _Recorded:
        inputs = {name: each.to(self.device, copy=True) for name, each in micro_batch.inputs.items()}
        # a number of 64 bits, rounded as the number of an unrecorded pass is
        weight = torch.tensor(micro_batch.weight, dtype=torch.float64, device=self.device)
        fixed = micro_batch._replace(inputs=inputs, weight=weight)

        def recorded() -> None:
            for result, new in zip(results, work(fixed), strict=True):
                result.copy_(new)  # out of the pool, whose memory the next graph uses again

        return _Recorded(fixed, results, self._timed(recorded))

    def _record_update(self, work: Callable[[], Tensor], optimizer: Optimizer) -> _Update:
        rate = torch.zeros((), dtype=RATE, device=self.device)
        broken = torch.zeros((), dtype=torch.bool, device=self.device)
        with _replaced(optimizer, lr=rate, capturable=True):  # PyTorch refuses to record a step without it
            return _Update(rate, broken, self._timed(lambda: broken.copy_(work())))

    def _timed(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record work, and count it."""
        start = perf_counter()
        replay = self._recorder.record(work)
        self.recorded += 1
        self.seconds += perf_counter() - start
        return replay


@contextmanager
def _replaced(optimizer: Optimizer, **values) -> Iterator[None]:
    """Give all parameter groups these values in this block."""
    with ExitStack() as stack:
        for group in optimizer.param_groups:
            stack.enter_context(within(group, **values))
        yield


def _is_recordable(optimizer: Optimizer) -> bool:
    """Return whether a step computes nothing on the host, such as a rate, or the weight decay of `Kahan`."""
    decays = isinstance(optimizer.optimizer, Kahan) and any(group["weight_decay"] for group in optimizer.param_groups)
    return all(group.get("fused") for group in optimizer.param_groups) and not decays
