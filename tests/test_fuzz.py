"""A slice of what `python tests/fuzz.py` runs by the ten thousand."""

import pytest
from cases import STEMS
from fuzz import SHAPES, misses


@pytest.mark.parametrize("stem", STEMS)
def test_random_cases(stem, device):
    missed = [*misses(stem, 0, range(100 if stem in SHAPES else 2), device)]
    assert not missed, "\n".join(missed)
