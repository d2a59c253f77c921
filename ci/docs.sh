#!/usr/bin/env bash
# Builds the site strictly: a dead link, a missing page or anchor, or an API name that isn't there fails. In an environment
# of its own with the docs extra alone, made once: nothing of the package is imported, so it needs no torch.
#
#   ci/docs.sh            builds out/site
#   ci/docs.sh serve      shows it at http://127.0.0.1:8000 and follows changes
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
docs_environment
fetched
export NO_MKDOCS_2_WARNING=1

if [[ ${1:-} == serve ]]; then
    exec python -m mkdocs serve
fi
python -m doctest ci/docstring_examples.py ci/site_pages.py
python -m mkdocs build --strict
PYTHONPATH=ci python - <<'CODE'
import pathlib, sys, site_pages
pages = {file: site_pages.loaded_from_elsewhere(file.read_text(encoding="utf-8"))
         for kind in ("*.html", "*.css") for file in pathlib.Path("out/site").rglob(kind)}
bad = [f"{file} loads {', '.join(places)}" for file, places in pages.items() if places]
sys.exit("\n".join(bad[:20]) or None if len(pages) > 20 else "out/site has no pages")
CODE
echo "docs: out/site/index.html"
