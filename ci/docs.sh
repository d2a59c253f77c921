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
echo "docs: out/site/index.html"
