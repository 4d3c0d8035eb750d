"""A pool of processes that loses nothing: what dies or hangs is said of the item it happened at, and the rest is done.

No torch here, so that its own test is quick.
"""

import multiprocessing
import multiprocessing.connection
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

TO_BEGIN = 120  # seconds: many import at once
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


class Worker:
    """A process with one thread, the items it has been given, and when it was last heard of."""

    def __init__(self, function: Callable, gpu: str):
        context = multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(function, other_end), daemon=True)
        with mock.patch.dict(os.environ, ONE_THREAD | {"CUDA_VISIBLE_DEVICES": gpu}):
            self.process.start()
        other_end.close()
        self.items, self.heard, self.began = deque(), time.monotonic(), False

    def take(self, share: Iterable) -> None:
        self.items, self.heard = deque(share), time.monotonic()
        self.connection.send(list(self.items))

    def answer(self, patience: float) -> tuple[str | None, bool]:
        """What is said of its first item, and whether the process goes on. The first answer only says that it began."""
        said = f"it hangs: no answer for {patience:.0f} s", False
        if self.connection.poll():
            try:
                said = self.connection.recv()
            except (EOFError, ConnectionError):
                self.process.join()
                said = f"its process ended with exit code {self.process.exitcode}", False
        if not self.began and not said[1]:
            raise RuntimeError(f"before the first case: {said[0]}")
        self.heard = time.monotonic()
        return said


def _serve(function: Callable, connection) -> None:
    connection.send((None, True))
    while True:
        for item in connection.recv():
            said = function(item)
            goes_on = "CUDA error" not in (said or "")  # after one, every call of the process fails
            connection.send((said, goes_on))
            if not goes_on:
                return


def in_processes(
    function: Callable, shares: Iterable[Iterable], processes: int, patience: float, gpus: list[str]
) -> Iterator[tuple]:
    """Each item of the shares with what `function` says of it: a text or None. The processes take the GPUs in turn.

    A process that dies, is silent for longer than `patience` seconds or says a CUDA error is replaced, and what was
    left of its share is handed out again.
    """
    shares, left, started = iter(shares), deque(), 0
    workers: list[Worker] = []
    try:
        while True:
            while len(workers) < processes:
                workers.append(Worker(function, gpus[started % len(gpus)]))
                started += 1
            for worker in workers:
                if not worker.items and (share := left.popleft() if left else next(shares, None)):
                    worker.take(share)
            busy = {worker.connection: worker for worker in workers if worker.items}
            if not busy:
                return
            ready = multiprocessing.connection.wait(busy, timeout=1)
            for connection, worker in busy.items():
                longest = patience if worker.began else TO_BEGIN
                if connection not in ready and time.monotonic() - worker.heard <= longest:
                    continue
                said, goes_on = worker.answer(patience)
                if not worker.began:
                    worker.began = True
                    continue
                yield worker.items.popleft(), said
                if not goes_on:
                    worker.process.kill()
                    workers.remove(worker)
                    left.extend([worker.items] if worker.items else [])
    finally:
        for worker in workers:
            worker.process.kill()
