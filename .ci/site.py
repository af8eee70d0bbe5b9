"""Makes links from docs/ to any file of the repository work both on GitHub and in the site.

A hook of mkdocs. Pages use links that GitHub follows, such as ../bench/README.md. Every link target
outside docs/ becomes a file of the site: Markdown becomes a page, code a page that shows it, a
folder a page with its names, anything else a copy. README.md becomes the home page. A link with the
name of a page as its text gets the page's title. In the navigation, a folder represents its pages.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# code, which is skipped, or a link's opening and its target
LINK = re.compile(
    r"^(`{3,}|~{3,}).*?^\1|`[^`\n]+`|(\]\()(?!https?://|mailto:)([^)#\s]+)",
    re.MULTILINE | re.DOTALL,
)
# code, which is skipped, or a link with a page's file as its text
NAMED = re.compile(
    r"^(`{3,}|~{3,}).*?^\1|`[^`\n]+`|\[[\w./-]+\.md\]\((?P<target>(?!https?://)[^)#\s]+)",
    re.MULTILINE | re.DOTALL,
)
# code in table cells, where lines may also break after an opening bracket
CELL_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>[^\n]*</td>)")
# resources that a browser would fetch from another host
FETCHED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//[^"]+'
    r'|<link\b[^>]*\brel="(?:stylesheet|preconnect)"[^>]*\bhref="(?:https?:)?//[^"]+'
    r'|<link\b[^>]*\bhref="(?:https?:)?//[^"]+"[^>]*\brel="(?:stylesheet|preconnect)"'
)
LANGUAGES = {".py": "python", ".pyi": "python", ".toml": "toml"}


def place(path: str) -> str:
    """Returns the path of a repository file's or folder's source in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    return f"{path}.md" if Path(path).suffix in LANGUAGES else path


def linked(path: str) -> set[str]:
    """Returns the files and folders of the repository that a Markdown file links to."""
    text, folder = (ROOT / path).read_text(encoding="utf-8"), posixpath.dirname(path)
    targets = [link[3] for link in LINK.finditer(text) if link[3]]
    return {posixpath.normpath(posixpath.join(folder, target)) for target in targets}


def made(path: str, config: MkDocsConfig) -> File:
    """Returns the site's file for a file or folder of the repository outside docs/."""
    there, uri = ROOT / path, place(path)
    if there.is_dir():
        names = sorted(name for name in os.listdir(there) if name[0] not in "._")
        names = "\n".join(f"- `{name}`" for name in names)
        file = File.generated(config, uri, content=f"# {path}\n\n{names}\n")
    elif there.suffix in LANGUAGES:
        code = there.read_text(encoding="utf-8")
        shown = f"# {path}\n\n~~~~{LANGUAGES[there.suffix]}\n{code}~~~~\n"
        file = File.generated(config, uri, content=shown)
    else:
        file = File.generated(config, uri, abs_src_path=str(there))
    file.inclusion = InclusionLevel.NOT_IN_NAV
    return file


def pages(folder: str) -> list[str]:
    """Returns the pages of a folder of docs/, its index first."""
    found = (ROOT / "docs" / folder).glob("*.md")
    return [f"{folder}{name}" for name in sorted((path.name for path in found), key=index_first)]


def index_first(name: str) -> tuple[bool, str]:
    """Sorts index.md before other names."""
    return name != "index.md", name


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replaces a folder in the navigation by its pages."""
    for section in config.nav or []:
        for title, entry in section.items():
            if isinstance(entry, str) and entry.endswith("/"):
                section[title] = pages(entry)
    config.nav = [section for section in config.nav or [] if all(section.values())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the targets of the pages' links, their own targets, and so on."""
    seen = {f"docs/{file.src_uri}" for file in files}
    waiting = {"README.md", *(path for path in seen if path.endswith(".md"))}
    while waiting:
        path = waiting.pop()
        if path not in seen and (ROOT / path).exists():  # mkdocs warns of broken links
            files.append(made(path, config))
        seen.add(path)
        if path.endswith(".md") and (ROOT / path).exists():
            waiting |= linked(path) - seen
    return files


def source(page: Page) -> str:
    """Returns the path in the repository of a page's source."""
    file = page.file
    if file.src_uri == "index.md":
        return "README.md"
    return file.src_uri if file.generated_by else f"docs/{file.src_uri}"


def title(path: str, otherwise: str) -> str:
    """Returns the title of a page of the repository."""
    there = ROOT / path
    if not there.is_file():
        return otherwise
    heading = re.search(r"^# (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else otherwise


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Converts links of the repository to links of the site."""
    here, folder = posixpath.dirname(page.file.src_uri), posixpath.dirname(source(page))

    def moved(link: re.Match) -> str:
        if not link[3]:
            return link[0]
        target = place(posixpath.normpath(posixpath.join(folder, link[3])))
        return link[2] + posixpath.relpath(target, here or ".")

    def titled(link: re.Match) -> str:
        target = link["target"]
        if target is None:
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        return f"[{title(path, posixpath.basename(path))}]({target}"

    return LINK.sub(moved, NAMED.sub(titled, markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Allows long expressions in tables to break."""
    return CELL_CODE.sub(lambda code: code[0].replace("(", "(<wbr>"), html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Raises an error if a page would fetch something from another host."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri}: must not fetch {found.group()!r}")
    return output
