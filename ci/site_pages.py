"""What mkdocs.yml needs: the pages outside docs/, links to what is no page, and where the source is.

MkDocs calls on_config, on_files, on_page_markdown and on_page_context by their names, in this order.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PAGES = "README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md SECURITY.zh.md examples/README.md"
HOMES = {"en": "index.md", "zh": "zh/index.md"}
"""By language, the page that the first tab and the logo lead to. In Chinese it is README.zh.md."""
_IN_CHINESE = {"README.zh.md": HOMES["zh"], "examples/README.zh.md": "project/examples/readme.zh.md"}
OUTSIDE = {name: f"project/{name.lower()}" for name in _PAGES.split()} | _IN_CHINESE
"""Pages of the clone that docs/ links to, and where they lie in the site."""
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml"}
SHOWN = {
    name: f"project/{name}.md"
    for pattern in ("*.*", "grpo/*.*", "verl/**/*.*")
    for file in ROOT.glob(f"examples/{pattern}")
    if file.suffix in LANGUAGES
    for name in [file.relative_to(ROOT).as_posix()]
}
"""Examples: each is a page of the site with the file in it, reached by links alone."""
MODULES = {"delivery", "routers", "compat"}
"""Of what api.md names: they have no page of their own there, their names have."""
MEMBERS = {
    "Recording": "routes, metrics",
    "Replay": "metrics, skip",
    "Pinning": "metrics",
    "Observation": "shown",
    "Following": "open, close, paused, put, metrics",
    "RoutedExperts": "take, only, layer_ids, concat, unrecorded, of_sample, check_not_constant, "
    "to_bytes, to_buffers, from_bytes, save, load",
    "RouteStore": "writer, of",
    "TokenLayout": "of_batch, padded, packed, from_probe, gather, bad_routes, scatter",
    "ParallelLayout": "from_megatron, moe_layers, chunk_layers, alignment",
    "DecoderLayers": "of_pattern",
    "RoutedModel": "from_config",
    "Rollout": "extend, append, merge, truncate, tokens, routes",
}
"""Which of a class are shown, where not all are."""
SECTIONS = {"zh/smoke.md": "versions.md", "zh/glossary.md": "index.md"}
"""Pages in Chinese that are a part of another page in English."""
WORDS = {
    "Home": "首页",
    "Use it": "使用",
    "Look it up": "查阅",
    "Understand it": "理解",
    "Contribute": "参与开发",
    "Dark": "深色",
    "Light": "浅色",
}
"""The words of mkdocs.yml on a page in Chinese: the menu's tabs, and the two grounds."""
_NAME = re.compile(r"\| `([\w.]*\w)` \|")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_LOADED = re.compile(
    r"""<link\b(?![^>]*rel=["']?canonical)[^>]*?\shref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|\ssrc=["']?((?:https?:)?//[^"'\s>]+)|url\(["']?((?:https?:)?//[^"')]+)"""
)
"""What a browser fetches with a page: styles, scripts, images."""


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages that lie beside docs/."""
    from mkdocs.structure.files import File, InclusionLevel  # here: the tests read this without MkDocs

    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    for name, place in SHOWN.items():  # the page of a file that is no page
        file = ROOT / name
        code = f"# {file.name}\n\n```{LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8')}```\n"
        files.append(File.generated(config, place, content=code, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def loaded_from_elsewhere(page: str) -> list[str]:
    """The addresses on other hosts that a page of HTML loads; a link that is followed loads nothing.

    >>> loaded_from_elsewhere('<script src="https://a/x.js"></script> <img src=b.png> <a href="https://c/">c</a>')
    ['https://a/x.js']
    >>> loaded_from_elsewhere('<link rel=stylesheet href=//d/e.css> <style>@import url("http://f/g.css")</style>')
    ['//d/e.css', 'http://f/g.css']
    """
    return [place for groups in _LOADED.findall(page) for place in groups if place]


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """Links as the site has them, and the reference itself."""
    known = {file.src_uri for file in files}
    if page.file.src_uri == "api.md":
        markdown = with_reference(markdown)
    return relinked(markdown, page.file.src_uri, known)


def with_reference(markdown: str) -> str:
    """After each table the lines by which mkdocstrings shows its names; a plain file has no use for them.

    >>> print(with_reference("| `Replay` | It. |"))
    | `Replay` | It. |
    <BLANKLINE>
    ::: npu_replay.Replay
        options: {members: [metrics, skip]}
    <BLANKLINE>
    """
    lines: list[str] = []
    names: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        if match := _NAME.match(line):
            names.append(match[1])
        elif names:
            for name in names:
                members = f"\n    options: {{members: [{MEMBERS[name]}]}}" if name in MEMBERS else ""
                lines += ["", f"::: npu_replay.{name}{members}"] if name not in MODULES else []
            names.clear()
        lines.append(line)
    return "\n".join(lines)


def relinked(markdown: str, page: str, known: set[str]) -> str:
    """Turn links that run through the clone into links of the site; of what isn't in it the words stay.

    Args:
        markdown: the page's text, with links as the clone has them.
        page: where it lies in the site, «dev/tried.md», «project/readme.md».
        known: all files of the site.
    """
    in_clone = {place: name for name, place in OUTSIDE.items()}.get(page, f"docs/{page}")

    def link(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if "://" in target and image:
            return ""  # a badge: a page of the site loads nothing from elsewhere
        if "://" in target or target.startswith("#"):
            return match.group()
        path, hash_sign, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_clone), path))
        elsewhere = path.removeprefix("docs/") if path.startswith("docs/") else ""
        place = (OUTSIDE | SHOWN).get(path, elsewhere)
        if place not in known:
            return words
        place = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{image}[{words}]({place}{hash_sign}{anchor})"

    return _LINK.sub(link, markdown)


def on_page_context(context: Any, *, page: Any, config: Any, nav: Any) -> Any:
    """Give a page in Chinese the theme's Chinese words, and each page a switch to its other language."""
    source = page.file.src_uri
    urls = {nav_page.file.src_uri: nav_page.url for nav_page in nav.pages}
    english, chinese = in_both(source, set(urls))
    config.theme["language"] = language = "zh" if source == chinese else "en"
    home = next(nav_page for nav_page in nav.pages if nav_page.file.src_uri == HOMES[language])
    nav.items[0] = home
    config.extra["homepage"] = home.url
    both = [(english, "English", "en"), (chinese, "中文", "zh")]
    config.extra["alternate"] = [
        {"link": urls[place], "name": name, "lang": code} for place, name, code in both if english and chinese
    ]
    words = WORDS if source == chinese else {there: here for here, there in WORDS.items()}
    for item in nav.items:
        item.title = words.get(item.title, item.title)
    for ground in config.theme["palette"]:
        ground["toggle"]["name"] = words.get(ground["toggle"]["name"], ground["toggle"]["name"])
    return context


def in_both(source: str, known: set[str]) -> tuple[str, str]:
    """Where a page lies in English and in Chinese; empty where there is none.

    >>> in_both("zh/verl.md", {"verl.md", "zh/verl.md"}), in_both("verl.md", {"verl.md"})
    (('verl.md', 'zh/verl.md'), ('verl.md', ''))
    >>> in_both("project/security.zh.md", {"project/security.md", "project/security.zh.md"})
    ('project/security.md', 'project/security.zh.md')
    >>> in_both("project/readme.md", {"project/readme.md", "zh/index.md"})
    ('project/readme.md', 'zh/index.md')
    """
    if source == "project/readme.md":
        return source, HOMES["zh"]
    english = SECTIONS.get(source, source.removeprefix("zh/").replace(".zh.md", ".md"))
    places = f"zh/{english}", english.replace(".md", ".zh.md")
    chinese = source if source != english else next((place for place in places if place in known), "")
    return english if english in known else "", chinese
