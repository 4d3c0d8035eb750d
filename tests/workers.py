"""Calls a function in several processes: where one dies or hangs the answer says so, and the other items are done.

No torch here, so that its own test is quick.
"""

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from unittest import mock

TO_BEGIN = 120  # seconds: many import at once
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


class Worker:
    """A process that calls the function; after one that died, hung or had a CUDA error, a new one."""

    def __init__(self, function: Callable, gpu: str):
        self.function, self.gpu, self.process = function, gpu, None

    def call(self, item, patience: float) -> tuple:
        """The worker again, so that it is given the next item; the item; and what is said of it."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, other_end = context.Pipe()
            self.process = context.Process(target=_serve, args=(self.function, other_end), daemon=True)
            self.process.start()
            other_end.close()
            if said := self.answer(self.gpu, TO_BEGIN):
                raise RuntimeError(f"before the first case: {said}")
        said = self.answer(item, patience)
        if "CUDA error" in (said or ""):  # after one, every call of the process fails
            self.end()
        return self, item, said

    def answer(self, asked, patience: float) -> str | None:
        try:
            self.connection.send(asked)
            if self.connection.poll(patience):
                return self.connection.recv()
            said = f"it hangs: no answer for {patience:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join()
            said = f"its process ended with exit code {self.process.exitcode}"
        self.end()
        return said

    def end(self) -> None:
        if self.process:
            self.process.kill()
            self.process = None


def _serve(function: Callable, connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = connection.recv()  # in time: CUDA begins with the first call
    connection.send(None)
    while True:
        connection.send(function(connection.recv()))


def in_processes(
    function: Callable, items: Iterable, processes: int, patience: float, gpus: list[str]
) -> Iterator[tuple]:
    """Each item with what `function` says of it: a text or None. The processes take the GPUs in turn."""
    items, workers = iter(items), [Worker(function, gpus[i % len(gpus)]) for i in range(processes)]
    with mock.patch.dict(os.environ, ONE_THREAD), ThreadPoolExecutor(processes) as threads:
        try:
            calls = {threads.submit(worker.call, item, patience) for worker, item in zip(workers, items)}
            while calls:
                done, calls = wait(calls, return_when=FIRST_COMPLETED)
                for worker, item, said in (call.result() for call in done):
                    calls |= {threads.submit(worker.call, item, patience) for item in itertools.islice(items, 1)}
                    yield item, said
        finally:
            for worker in workers:
                worker.end()
