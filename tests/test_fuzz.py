"""A slice of what `python tests/tools/fuzz.py` runs by the ten thousand, and the pool that runs it."""

import signal

import pytest
from cases import COMPILED, PORTABLE, STEMS
from fuzz import again, miss
from workers import in_processes


@pytest.mark.parametrize("stem", STEMS)
def test_random_cases(stem, device):
    """On a Hopper more than half of those for its files are by our kernels; large products take a second each."""
    count = 100
    if stem not in PORTABLE:
        count = 2 if stem not in COMPILED else 20 if "linear" in stem else 100
    cases = [(stem, 0, index, device.type) for index in range(count)]
    said = list(map(miss, cases))
    missed = [again(*case, words) for case, words in zip(cases, said) if words]
    assert not missed, "\n".join(missed)
    if stem not in PORTABLE and device.type == "cuda":
        assert said.count(None) > len(cases) / 2


def test_what_dies_or_hangs_is_said_and_the_rest_is_done():
    dies, hangs, nothing = signal.SIGKILL, signal.SIGSTOP, signal.SIGURG
    items = [nothing, dies, nothing, hangs, nothing, nothing, nothing]
    said = list(in_processes(signal.raise_signal, items, 2, 4, [""]))
    assert sorted(item for item, _ in said) == sorted(items)
    assert {item: words for item, words in said if words} == {
        dies: "its process ended with exit code -9",
        hangs: "it hangs: no answer for 4 s",
    }
