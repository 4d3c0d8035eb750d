"""The kernel files as text, and the marked blocks that several of them repeat."""

import re

from cases import SOLUTIONS, STEMS

BEGIN = re.compile(r"^\s*(?:#|//) --- shared: (?P<name>.+?) \(home: kernels/(?P<home>\w+)\.py\) ---$")
END = re.compile(r"^\s*(?:#|//) --- end shared: (?P<name>.+?) ---$")


def source(stem: str) -> str:
    return (SOLUTIONS / f"{stem}.py").read_text()


def shared_blocks(stem: str) -> dict[str, tuple[str, str]]:
    """Name to (stem of the home file, text). Every line that looks like a marker must be one."""
    blocks, name, home, lines = {}, None, None, []
    for number, line in enumerate(source(stem).splitlines(), 1):
        begin, end = BEGIN.match(line), END.match(line)
        assert bool(begin or end) == ("--- shared" in line or "--- end shared" in line), f"{stem}:{number}: a malformed marker"
        if begin:
            assert name is None and begin["name"] not in blocks, f"{stem}:{number}: a block inside another, or twice"
            name, home, lines = begin["name"], begin["home"], []
        elif end:
            assert name == end["name"], f"{stem}:{number}: ends a block that did not begin"
            blocks[name], name = (home, "\n".join(lines)), None
        elif name:
            lines.append(line)
    assert name is None, f"{stem}: {name} does not end"
    return blocks


def one_of_each_build() -> list[str]:
    """One stem for each way of building: files with an equal block `build` are built in the same way, and the shortest stands for all."""
    ways = {}
    for stem in sorted(STEMS, key=lambda stem: len(source(stem))):
        try:
            code = shared_blocks(stem)["build"][1]
        except (AssertionError, KeyError):
            code = source(stem)
        ways.setdefault(code, stem)
    return list(ways.values())
