"""A text for measures that need one: Shakespeare, from the Encyclopaedia Britannica.

The article is that of the 11th edition, 1911, which is in the public domain: without its
bibliography, as scanned.
"""

from importlib.resources import files
from pathlib import Path


def read(path: Path | None) -> str:
    """Reads the file, or the included text if `path` is None.

    Raises:
        ValueError: the file is not UTF-8.
    """
    if path is None:
        return files(__name__).joinpath("shakespeare_1911.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at {error.start}") from None


def read_all(path: Path | None) -> dict[str, str]:
    """Reads the .txt files of a folder by name, or the one text of `read`.

    Raises:
        ValueError: a file is not UTF-8, or the folder has no .txt file.
    """
    if path is None or not path.is_dir():
        return {"" if path is None else path.stem: read(path)}
    found = sorted(path.glob("*.txt"))
    if not found:
        raise ValueError(f"text={str(path)!r}: must be a text file, or a folder with .txt files")
    return {each.stem: read(each) for each in found}
