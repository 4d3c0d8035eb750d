"""Outlives the judging: a candidate runs in the judge's process, and may end it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # of prctl(2)


def in_a_child(main: Callable[[], int]) -> int | None:
    """What `main` returns in a forked process, or None where that ended first: by os._exit, a crash, an exception of main's own.

    Called before anything has started threads or a GPU, which do not survive a fork.
    """
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody is left to hear of it
        code = main()
        os.write(tell, bytes([code]))
        sys.exit(code)
    os.close(tell)
    os.waitpid(child, 0)
    os.set_blocking(told, False)  # a process that it left behind may still hold the other end
    try:
        answer = os.read(told, 1)
    except BlockingIOError:
        answer = b""
    os.close(told)
    return answer[0] if answer else None
