"""The console entry point, which also has something to say where the command line's packages are missing."""

from __future__ import annotations

import sys

_MISSING = (
    "npu-replay needs the packages typer and rich ({error}): pip install 'npu-replay[cli]'. "
    'Without them: python -c "import npu_replay; print(npu_replay.report())"'
)


def main() -> None:
    """Run the command that sys.argv asks for; exits 2 where typer or rich is missing and it isn't smoke."""
    try:
        import rich  # noqa: F401 - typer has worked without it
        import typer  # noqa: F401
    except ImportError as error:
        if sys.argv[1:2] == ["smoke"]:  # for containers that are left as they are
            from npu_replay.smoke import run_command_line

            run_command_line(sys.argv[2:])
        print(_MISSING.format(error=error), file=sys.stderr)
        raise SystemExit(2) from None
    from npu_replay.commands import app

    app()
