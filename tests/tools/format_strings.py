"""clang-format for the CUDA and C++ strings of kernels/: python tests/tools/format_strings.py [--write] [FILE ...]

Without --write it shows what clang-format would change, and exits with 1 if that is anything; `make lint` asks so. The
style is .clang-format's. A string is a module constant whose name ends in _SOURCE, written as r\"\"\"...\"\"\".
"""

import argparse
import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
QUOTES = 'r"""'
NO_OUTPUTS = re.compile(r'::\s*(?="[a-z]+"\()')  # of an asm statement; clang-format takes :: for the one of a::b


def formatted(code: str, language: str) -> str:
    """The code as clang-format has it, `language` being the ending of a file of its kind."""
    beside_python = Path(sys.executable).parent / "clang-format"  # where pip puts it
    program = str(beside_python) if beside_python.exists() else "clang-format"
    command = [program, f"--style=file:{ROOT / '.clang-format'}", f"--assume-filename=string.{language}"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stdout


def rewritten(text: str) -> str:
    """A kernel file's text with its strings formatted."""
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):  # from the last to the first, so that line numbers stay true
        is_constant = isinstance(node, ast.Assign) and isinstance(getattr(node.value, "value", None), str)
        if not is_constant or not node.targets[0].id.endswith("_SOURCE") or node.end_lineno == node.lineno:
            continue
        first, last = node.lineno - 1, node.end_lineno - 1
        assert lines[first].rstrip().endswith(QUOTES) and lines[last].strip() == QUOTES[1:], f"line {node.lineno}"
        code = NO_OUTPUTS.sub(": : ", "".join(lines[first + 1 : last]))
        lines[first + 1 : last] = [formatted(code, "cu" if "CUDA" in node.targets[0].id else "cpp")]
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="change the files")
    parser.add_argument("files", nargs="*", type=Path, help="default: all of kernels/")
    options = parser.parse_args()
    changed = []
    for path in options.files or sorted((ROOT / "kernels").rglob("*.py")):
        before = path.read_text()
        after = rewritten(before)
        if after == before:
            continue
        changed.append(path)
        if options.write:
            path.write_text(after)
        else:
            pairs = difflib.unified_diff(before.splitlines(), after.splitlines(), str(path), "formatted", "", "", 1, "")
            print("\n".join(pairs))
    if changed and not options.write:
        print(f"{len(changed)} files are not as clang-format has them: python tests/tools/format_strings.py --write")
    return 1 if changed and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
