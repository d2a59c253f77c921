#!/usr/bin/env bash
# Builds the site strictly: a dead link, a missing page or anchor, or an API name that isn't there fails. In an environment
# of its own with the docs extra alone, made once: nothing of the package is imported, so it needs no torch.
#
#   ci/docs.sh            builds out/site
#   ci/docs.sh serve      shows it at http://127.0.0.1:8000 and follows changes
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/environment.sh
install_docs() {
    local extra
    extra=$(python -c 'import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")') ||
        fail "could not read the docs extra"
    python -m pip install -qq setuptools wheel || fail "could not install setuptools, which jieba is built with"
    python -m pip install --no-build-isolation -r <(echo "$extra") ||
        fail "could not install the docs extra; $work/docs is unfinished and goes on with the next run"
}
make_in "$work/docs" install_docs
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
for file in pathlib.Path("out/site/zh").glob("*.html"):
    words = file.read_text(encoding="utf-8")
    home = 'href="index.html" title="npu_replay"'
    for wanted in ('<html lang="zh"', 'placeholder="搜索"', 'hreflang="en"', "首页", home):
        bad += [f"{file} lacks {wanted}"] * (wanted not in words)
sys.exit("\n".join(bad[:20]) or None if len(pages) > 20 else "out/site has no pages")
CODE
echo "docs: out/site/index.html"
