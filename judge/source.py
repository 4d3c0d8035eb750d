"""A kernel file's code, apart from what only its readers need: a changed comment leaves a record valid."""

import ast
import hashlib
import io
import re
import tokenize
from pathlib import Path


def code_of(text: str) -> str:
    """A kernel file without comments, docstrings and blank lines, in Python and in its C++ and CUDA strings."""
    lines, docstrings = text.splitlines(), set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings.add(node.body[0].value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.end_lineno > node.lineno:
            for row in range(node.lineno - 1, node.end_lineno):
                line = "" if node in docstrings else lines[row]
                lines[row] = re.sub(r'("(?:\\.|[^"\\])*")|//.*', lambda match: match[1] or "", line)
        elif node in docstrings:
            lines[node.lineno - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def code_sha256(path: Path) -> str:
    """What a record calls the file it measured: a changed comment leaves it as it is."""
    return hashlib.sha256(code_of(path.read_text()).encode()).hexdigest()
