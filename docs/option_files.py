"""The YAML files of conf/ that show every key of an option: made from the classes, so that both agree.

python docs/option_files.py --check     # what differs, exit status 1
python docs/option_files.py --write     # writes what differs; edited values go back to the classes' defaults
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dtf.config.option_files import files
from dtf.config.settings import load_parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    todo = parser.add_mutually_exclusive_group(required=True)
    todo.add_argument("--check", action="store_true")
    todo.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    load_parts([])
    conf = Path(__file__).parents[1] / "conf"
    other = {path: text for path, text in files(conf).items() if not path.is_file() or path.read_text("utf-8") != text}
    for path, text in other.items():
        print(f"conf/{path.relative_to(conf)}: {'written' if write else 'not as its class says'}")
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    if other and not write:
        print("python docs/option_files.py --write makes them anew; or change the class")
    return int(bool(other) and not write)


if __name__ == "__main__":
    sys.exit(main())
