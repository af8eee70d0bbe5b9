"""A text for measures that need one: Shakespeare, from the Encyclopaedia Britannica.

The article is that of the 11th edition, 1911, which is in the public domain: without its
bibliography, as scanned.
"""

from importlib.resources import files
from pathlib import Path


def read(path: Path | None) -> dict[str, str]:
    """Reads the texts by name: of a file, of a folder's .txt files, or if None, the included one.

    Raises:
        ValueError: a file is not UTF-8, or the folder has no .txt file.
    """
    if path is None:
        included = files(__name__) / "shakespeare_1911.txt"
        return {"shakespeare_1911": included.read_text(encoding="utf-8")}
    if not path.is_dir():
        return {path.stem: _read(path)}
    found = sorted(path.glob("*.txt"))
    if not found:
        raise ValueError(f"text={str(path)!r}: must be a text file, or a folder with .txt files")
    return {each.stem: _read(each) for each in found}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at {error.start}") from None
