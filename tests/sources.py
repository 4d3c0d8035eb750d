"""The kernel files as text, and the definitions that several of them repeat."""

import ast
import re

from cases import PAIRS

# A definition in a C++ string as clang-format has it: from the first column to a brace or semicolon at a line's end, or
# to the brace at the first column.
DEFINITION = re.compile(
    r"^(?!namespace|using|extern|TORCH_LIBRARY|static_assert|[ #}])\S(?:.*\};?|[^{}]*?;|(?:.*\n)+?\};?)$", re.MULTILINE
)


def source(stem: str) -> str:
    return PAIRS[stem].new_path.read_text()


def strings(stem: str) -> dict[str, str]:
    """The file's own strings by name: CUDA_SOURCE and CPP_SOURCE."""
    nodes = [node for node in ast.parse(source(stem)).body if isinstance(node, ast.Assign)]
    assigned = {ast.unparse(node.targets[0]): node.value for node in nodes}
    return {name: ast.literal_eval(assigned[name]) for name in ("CUDA_SOURCE", "CPP_SOURCE")}


def definitions(stem: str) -> dict[str, dict[str, str]]:
    """The file's functions and structs, in Python, C++ and CUDA: name to {head: text}, since C++ overloads
    and each file has functions of its own Model."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source(stem)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            parameters = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""
            found[node.name] = {parameters: ast.unparse(node)}
    nested = r"\([^()]*(\([^()]*\))*[^()]*\)"
    for language, text in strings(stem).items():
        for block in DEFINITION.findall(re.sub(" *//.*", "", text)):
            head = re.sub(r"\s+", " ", block.split("{")[0]).strip()
            bare = re.sub(rf"template <[^()]*?> (?=\w)|__launch_bounds__{nested}|alignas{nested}", "", head)
            name = re.search(r"\b(?:struct|class) (\w+)", bare) or re.search(r"(\w+)(?:<[^()]*>)?\(", bare)
            if name:
                found.setdefault(f"{language}: {name[1]}", {})[head] = block
    return found
