"""Lines of code by room, and characters of pages (docs/ and the README), against the ceilings in ceilings.json.

    make size                   what each room has, may have, and how many more or fewer than on the branch main
    make size ARGS=--lower      lower every ceiling to what its room has, rounded up to the next 10
    make size ARGS=--check      only what is wrong, as `make check` asks

A room is a folder named in ceilings.json, without its subfolders named there; a new folder counts to the one above it. Ceilings
only fall: they are held against those of the last commit and of the one before it.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CEILINGS = "tests/infra/ceilings.json"
STEP = 10
Rooms = dict[str, int]


def git(*arguments: str) -> str:
    """What git prints; nothing where it fails, as without a repository or an earlier commit."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout


def room_of(path: str, rooms: Rooms) -> str:
    """The innermost room that a file counts to, or no name."""
    if path.endswith(".md"):
        return "docs" if path == "README.md" or path.startswith("docs/") else ""
    code = path.endswith((".py", ".js", ".css", ".html"))
    return max((room for room in rooms if code and room != "docs" and path.startswith(f"{room}/")), key=len, default="")


def size(path: str, text: str | None = None) -> int:
    """Of a text, or of the file as it is now."""
    if text is None:
        text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
    return len(text) if path.endswith(".md") else text.count("\n")


def faults(ceilings: Rooms, before: Rooms, found: Rooms) -> list[str]:
    """A line for each room above its ceiling, and each ceiling that rose; a new room's is taken from those beside it."""
    rose = [(room, before.get(room, most), most) for room, most in ceilings.items()]
    for part in sorted({room.split("/")[0] for room in before}):
        was, most = (sum(n for room, n in of.items() if room.split("/")[0] == part) for of in (before, ceilings))
        rose.append((f"all rooms of {part}", was, most))
    above = [(room, found[room], most) for room, most in ceilings.items() if found[room] > most]
    return [
        f"{room} has {has:,}, {has - most:,} above its ceiling in {CEILINGS}: take out as many (make size)"
        for room, has, most in above
    ] + [
        f"{CEILINGS}: the ceiling of {room} rose from {was:,} to {most:,}; ceilings only fall: set it back, and take lines out"
        for room, was, most in rose
        if most > was
    ]


def main(asked: list[str]) -> None:
    ceilings: Rooms = json.loads((ROOT / CEILINGS).read_text())
    found, more = Counter[str](), Counter[str]()
    for path in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if room := room_of(path, ceilings):
            found[room] += size(path)
    if "--lower" in asked:
        ceilings = {room: min(most, -(-found[room] // STEP) * STEP) for room, most in ceilings.items()}
        (ROOT / CEILINGS).write_text(json.dumps(ceilings, indent=2) + "\n")
    if "--check" not in asked:
        new = git("ls-files", "--others", "--exclude-standard")
        for path in (git("diff", "--name-only", "--no-renames", "main") + new).splitlines():
            if room := room_of(path, ceilings):
                more[room] += size(path) - size(path, git("show", f"main:{path}"))
        for room, most in ceilings.items():
            print(f"{room:<32}{found[room]:>9,} of{most:>9,}{more[room]:>+9,}")
    commits = [json.loads(text) for commit in ("HEAD", "HEAD^") if (text := git("show", f"{commit}:{CEILINGS}"))]
    if said := {line: None for before in commits or [ceilings] for line in faults(ceilings, before, found)}:
        sys.exit("\n".join(said))


if __name__ == "__main__":
    main(sys.argv[1:])
