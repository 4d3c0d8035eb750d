"""The kernel files as text, and the definitions that several of them repeat."""

import ast
import re
from collections.abc import Iterator

from cases import SOLUTIONS


def source(stem: str) -> str:
    return (SOLUTIONS / f"{stem}.py").read_text()


def strings(stem: str) -> dict[str, str]:
    """The file's own strings by name: CUDA_SOURCE and CPP_SOURCE."""
    assigned = {ast.unparse(node.targets[0]): node.value for node in ast.parse(source(stem)).body if isinstance(node, ast.Assign)}
    return {name: ast.literal_eval(assigned[name]) for name in ("CUDA_SOURCE", "CPP_SOURCE")}


def _blocks(text: str) -> Iterator[str]:
    """What begins at the first column of a C++ string, each to its closing brace or semicolon; without comments."""
    block: list[str] = []
    for line in re.sub(r"//.*", "", text).splitlines():
        if not block and (not line.strip() or line[0] in " #}" or line.startswith(("namespace", "using", "extern", "TORCH_LIBRARY", "static_assert"))):
            continue
        block.append(line.rstrip())
        joined = "\n".join(block)
        if joined.count("{") == joined.count("}") and joined.endswith(("}", ";")):
            yield joined
            block = []


def definitions(stem: str) -> dict[str, dict[str, str]]:
    """The functions and structs at the file's top level, in Python, C++ and CUDA: name to {head: text}, since C++ overloads."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source(stem)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = {"Python": ast.unparse(node)}
    for language, text in strings(stem).items():
        for block in _blocks(text):
            head = re.sub(r"\s+", " ", block.split("{")[0]).strip()
            bare = re.sub(r"template <[^()]*?> (?=\w)|__launch_bounds__\([^()]*(\([^()]*\))*[^()]*\)|alignas\([^()]*(\([^()]*\))*[^()]*\)", "", head)
            if name := re.search(r"\b(?:struct|class) (\w+)", bare) or re.search(r"(\w+)(?:<[^()]*>)?\(", bare):
                found.setdefault(f"{language}: {name[1]}", {})[head] = block
    return found
