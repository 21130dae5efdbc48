"""Change how mkdocs builds the site: footers follow the ladder, and links to scripts and notebooks lead to copies."""

import re
from itertools import pairwise
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def on_nav(nav, config, files):
    """Let the previous and the next page of a technique be those of the ladder, not of its group."""
    numbered = [(re.match(r"techniques/(\d+)_", page.file.src_uri), page) for page in nav.pages]
    ladder = [page for _, page in sorted((int(found[1]), page) for found, page in numbered if found)]
    for before, after in pairwise(ladder):
        before.next_page, after.previous_page = after, before
    ladder[-1].next_page = None


def on_page_markdown(markdown, page, config, files):
    """Copy each file outside docs/ that a page links to onto the site."""
    up = "../" * page.file.src_uri.count("/")  # to docs/
    for path in re.findall(rf"\]\({re.escape(up)}\.\./([^)#]+)\)", markdown):
        if not files.get_file_from_path(path):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        markdown = markdown.replace(f"]({up}../{path})", f"]({up}{path})")
    return markdown
