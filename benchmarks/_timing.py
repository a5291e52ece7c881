"""Times that can be compared: cold L2, candidates interleaved in a rotating order, medians with their spread.

Methods on a GPU. `graph`: a CUDA graph of launches that rotate over enough inputs to leave the L2 behind, timed as
a whole; the launch costs nothing, so it is right for short ops. `flush`: the L2 is overwritten before each launch and
events stand around the launch alone; right from about 20 us on, where the events' own microsecond is small.
`step`: a call of a whole model, from an idle device on. On a CPU the clock is read around each call. What a call costs
the host is taken apart from that: `host_times`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch

GRAPH_BELOW_BYTES = 64 << 20  # about 20 us of an H200's memory
MIN_LAUNCHES = 16  # a graph
MAX_SETS = 512
ROUNDS = 6
MIN_SAMPLES = 3  # of a candidate
MAX_SAMPLES = 200  # a round

Times = tuple[float, float, float]  # p10, median, p90 in us


def l2_bytes(device: str) -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0


def input_sets(device: str, nbytes: int, warm: bool) -> int:
    """How many copies of the inputs and outputs a rotation needs so that each launch finds a cold L2."""
    if device == "cpu" or warm:
        return 1
    if nbytes >= GRAPH_BELOW_BYTES:
        return 1  # the flush makes it cold
    return min(MAX_SETS, max(2, -(-4 * l2_bytes(device) // max(nbytes, 1))))


def method(device: str, nbytes: int, sets: int, warm: bool) -> str:
    if device == "cpu":
        return "clock"
    if nbytes >= GRAPH_BELOW_BYTES and not warm:
        return "flush"
    # One set that is larger than the L2 is cold in any case.
    return "graph" if sets * nbytes >= 2 * l2_bytes(device) else "graph, warm L2"


class _Clock:
    """Samples of calls by the host's clock."""

    def __init__(self, calls: list[Callable], before: Callable):
        self.call, self.before = calls[0], before
        self.taken: list = []

    def sample(self) -> None:
        self.before()
        start = time.perf_counter()
        self.call()
        self.taken.append((time.perf_counter() - start) * 1e6)

    def collect(self) -> list[float]:
        return self.taken


class _Events(ABC):
    """Samples of what `run` puts on the stream, by pairs of events that are read once the device is done."""

    launches = 1

    def __init__(self):
        self.taken: list = []

    def before(self) -> None:  # noqa: B027 - nothing, unless a method of timing needs it
        """What comes before each sample, untimed."""

    @abstractmethod
    def run(self) -> None:
        """Puts what is timed on the stream."""

    def sample(self) -> None:
        self.before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.run()
        end.record()
        self.taken.append((start, end))

    def collect(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self.launches for start, end in self.taken]


def capture(calls: list[Callable], launches: int) -> tuple[torch.cuda.CUDAGraph, list]:
    """A graph of `launches` calls. Outputs live for one rotation, so that no launch writes where a recent one did.

    It is captured on the current stream, which must not be the default one, nor another than that of the inputs'
    forward: autograd runs a backward where its forward ran.
    """
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph, outputs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for i in range(launches):
            outputs.append(calls[i % len(calls)]())
            if len(outputs) > len(calls):
                outputs.pop(0)
    return graph, outputs


class _Graph(_Events):
    def __init__(self, calls: list[Callable]):
        super().__init__()
        self.launches = -(-MIN_LAUNCHES // len(calls)) * len(calls)
        self.graph, self.outputs = capture(calls, self.launches)

    def run(self) -> None:
        self.graph.replay()


class _Flush(_Events):
    def __init__(self, calls: list[Callable], flush: torch.Tensor):
        super().__init__()
        self.calls, self.flush, self.turn = calls, flush, 0
        (us,) = host_times({"": calls[0]}, rounds=3, burst=10).values()
        if statistics.median(us) > 30:  # more than the flush hides: events would time the host
            self.graphs = [capture([call], 1) for call in calls]
            self.calls = [graph.replay for graph, _ in self.graphs]

    def before(self) -> None:
        self.flush.zero_()

    def run(self) -> None:
        self.calls[self.turn % len(self.calls)]()
        self.turn += 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """This thread on one core and no garbage collection: what else makes two runs of one call differ."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else None
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    if cores:
        os.sched_setaffinity(0, {max(cores)})  # interrupts are served by the first ones
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)
        if collects:
            gc.enable()


def host_times(calls: dict[str, Callable], rounds: int = 100, burst: int = 200) -> dict[str, list[float]]:
    """Host time in us of one call of each candidate: what it takes to launch, not to run. One sample a burst.

    The candidates take turns in bursts of a few milliseconds, so that a disturbance of the host meets all of them and
    the quietest bursts meet none. Small inputs, and the device waited for between bursts, untimed: its queue never
    fills, which would time the device.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    with quiet():
        for turn in range(rounds):
            shift = turn % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                call = calls[name]
                for _ in range(10):  # after another candidate
                    call()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(burst):
                    call()
                samples[name].append((time.perf_counter() - start) * 1e6 / burst)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return samples


class _Step(_Events):
    """One long call from an idle device on, its launches included: what a step of a model takes."""

    def __init__(self, calls: list[Callable], before: Callable):
        super().__init__()
        self.call, self.prepare = calls[0], before

    def before(self) -> None:
        self.prepare()
        torch.cuda.synchronize()

    def run(self) -> None:
        self.call()


def spread(samples: list[float]) -> Times:
    if len(samples) < 2:
        return (samples[0],) * 3
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return tenths[0], statistics.median(samples), tenths[8]


def nothing() -> None:
    pass


class Bench:
    """Times of several candidates for one problem, a closure for each input set; `before` is what a sample needs.

    What is taken follows from `budget_ms` for each candidate: as many samples as it holds, spread over the rounds, but
    three at the least. An interrupt ends `run`; `samples` holds what there is by then.
    """

    def __init__(self, device: str, how: str, budget_ms: float, rounds: int = ROUNDS):
        self.how, self.budget_ms, self.rounds = how, budget_ms, rounds
        self.samplers: dict[str, _Clock | _Events] = {}
        self.flush = None
        if how == "flush":
            self.flush = torch.empty(4 * l2_bytes(device), dtype=torch.int8, device=device)

    def sampler(self, calls: list[Callable], before: Callable) -> _Clock | _Events:
        if self.how == "clock":
            return _Clock(calls, before)
        if self.how == "step":
            return _Step(calls, before)
        return _Flush(calls, self.flush) if self.how == "flush" else _Graph(calls)

    def warmed(self, sampler: _Clock | _Events) -> int:
        """How many samples to take of a candidate, which is warm behind this."""

        def cost_ms(samples: int) -> float:
            start = time.perf_counter()
            for _ in range(samples):
                sampler.sample()
            sampler.collect()
            return (time.perf_counter() - start) * 1e3 / samples

        cost = cost_ms(1)
        if cost < self.budget_ms / self.rounds:  # of a long one, the first must do
            cost = cost_ms(2)
        sampler.taken.clear()
        return max(MIN_SAMPLES, min(MAX_SAMPLES * self.rounds, int(self.budget_ms / max(cost, 1e-3))))

    def run(
        self,
        candidates: dict[str, list[Callable]],
        failed: Callable[[str, Exception], None],
        before: dict[str, Callable] | None = None,
    ) -> dict[str, list[float]]:
        """us of each sample of each candidate, those left out that failed."""
        counts = {}
        for name, calls in candidates.items():
            try:
                sampler = self.sampler(calls, (before or {}).get(name, nothing))
                counts[name] = self.warmed(sampler)
            except Exception as error:  # a peer that cannot be captured, or runs out of memory
                failed(name, error)
                continue
            self.samplers[name] = sampler
        names = list(self.samplers)
        rounds = min(self.rounds, max(counts.values(), default=0))
        for turn in range(rounds):
            shift = turn % max(1, len(names))
            for name in names[shift:] + names[:shift]:
                if name not in self.samplers:
                    continue
                count = counts[name] * (turn + 1) // rounds - counts[name] * turn // rounds
                try:
                    if count > 1:  # a sample so long that it is one of a round does not notice what ran before it
                        self.samplers[name].sample()
                        self.samplers[name].taken.pop()
                    for _ in range(count):
                        self.samplers[name].sample()
                except Exception as error:  # out of memory beside the others
                    failed(name, error)
                    del self.samplers[name]
        return self.samples()

    def samples(self) -> dict[str, list[float]]:
        return {name: taken for name, sampler in self.samplers.items() if (taken := sampler.collect())}
